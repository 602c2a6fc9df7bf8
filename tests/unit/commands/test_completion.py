"""Shell completion, also as computed by the shells themselves; and manual pages, rendered by groff."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from kubeproxy.commands import COMMANDS, completion
from kubeproxy.commands.completion import SCRIPTS, following
from kubeproxy.commands.parsers import PROXY, parser_of, run
from kubeproxy.config.flags import FLAGS
from kubeproxy.config.modes import MODES
from support.places import ROOT
from support.programs import program

MANUAL = runpy.run_path(str(ROOT / "deploy/node/manual.py"))
# A kube-proxy that lists two Services.
KNOWN = f"""#!{sys.executable}
import sys
from kubeproxy.commands import completion, parsers
completion.names = lambda prefix, _: (
    [prefix + "80", prefix + "9/udp"] if ":" in prefix
    else [one for one in ("default/web", "shop/web") if one.startswith(prefix)]
)
sys.exit(parsers.run(sys.argv[1:]))
"""
BASH = """
. /dev/stdin <<'SCRIPT'
{script}
SCRIPT
COMP_LINE={line!r} COMP_POINT={point} COMP_WORDBREAKS={breaks}
_kube_proxy 2>/dev/null
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def shell(tmp_path: Path) -> Path:
    """A folder with a file and a folder, and a folder of programs to call."""
    (tmp_path / "a").touch()
    (tmp_path / "folder").mkdir()
    made = tmp_path / "folder/bin/kube-proxy"
    made.parent.mkdir()
    made.write_text(KNOWN)
    made.chmod(0o755)
    return tmp_path


def asked(shell: Path, command: list[str], text: str = "") -> list[str]:
    environment = {"HOME": str(shell), "PATH": f"{shell}/folder/bin:/usr/bin:/bin"}
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True, env=environment, cwd=shell)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("kube-proxy wh", ["why"]),
        ("kube-proxy why ", ["node"]),
        ("kube-proxy why 10.244.0.9 --no-p", ["--no-probe"]),
        ("kube-proxy why --interface eth0 node ", ["default/web:", "shop/web:"]),
        ("kube-proxy why node default/web:", ["default/web:80"]),
        ("kube-proxy why --trace node d", ["default/web:", "shop/web:"]),
        ("kube-proxy services ", ["default/web", "shop/web"]),
        ("kube-proxy services x ", []),
        ("kube-proxy services -o j", ["json"]),
        ("kube-proxy services --output=", ["--output=text", "--output=json"]),
        ("kube-proxy --proxy-mode ", [*MODES]),
        ("kube-proxy --v 4 --proxy-mode=nft", ["--proxy-mode=nftables"]),
        ("kube-proxy --masq", ["--masquerade-all"]),
        ("kube-proxy --masquerade-all --cl", ["--cleanup", "--cluster-cidr"]),
        ("kube-proxy --config ", [":file"]),
        ("kube-proxy --config=x", [":file"]),
        ("kube-proxy why node x --manifests ", [":folder"]),
        ("kube-proxy plan --now a", [":file"]),
        ("kube-proxy plan --detect-local-mode B", ["BridgeInterface"]),
        ("kube-proxy plan --masquerade-all ", ["true", "false"]),
        ("kube-proxy plan --hostname-override ", []),
        ("kube-proxy completion ", ["bash", "zsh", "fish"]),
        ("kube-proxy --bind-address ", []),
        ("kube-proxy", [*COMMANDS]),
    ],
)
def test_possible_completions(monkeypatch: pytest.MonkeyPatch, line: str, shown: list[str]) -> None:
    monkeypatch.setattr(
        completion,
        "names",
        lambda prefix, _: ["default/web:80"] if ":" in prefix else ["default/web", "shop/web"],
    )
    assert [one.partition("\t")[0] for one in following(line)] == shown


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("kube-proxy wh", ["why"]),
        ("kube-proxy why node ", ["default/web:", "shop/web:"]),
        # Only the part after the colon or the equals sign, where readline splits words.
        ("kube-proxy why node default/web:", ["80", "9/udp"]),
        ("kube-proxy services --output=", ["text", "json"]),
        ("kube-proxy --config ", ["a", "folder"]),
        ("kube-proxy --config=fo", ["folder"]),
        ("kube-proxy why node x --manifests ", ["folder"]),
        ("kube-proxy --bind-address ", [""]),
    ],
)
def test_bash_completes(shell: Path, line: str, shown: list[str]) -> None:
    breaks = "$' \\t\\n\"\\'><=;|&(:'"
    text = BASH.format(script=SCRIPTS["bash"], line=line, point=len(line), breaks=breaks)
    assert sorted(asked(shell, ["bash", "--norc"], text)) == sorted(shown)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("kube-proxy wh", ["why"]),
        ("kube-proxy --masq", ["--masquerade-all"]),
        ("kube-proxy services -o ", ["json", "text"]),
        ("kube-proxy services def", ["default/web"]),
        ("kube-proxy why node default/web:", ["default/web:80", "default/web:9/udp"]),
        ("kube-proxy --config=f", ["--config=folder/"]),
        ("kube-proxy why node x --manifests ", ["folder/"]),
    ],
)
def test_fish_completes(shell: Path, line: str, shown: list[str]) -> None:
    found = asked(shell, [program("fish"), "--no-config", "-c", f"{SCRIPTS['fish']}\ncomplete -C {line!r}"])
    assert sorted(one.partition("\t")[0] for one in found) == shown


@pytest.mark.parametrize("shell", SCRIPTS)
def test_a_shell_reads_its_script(tmp_path: Path, shell: str) -> None:
    (tmp_path / shell).write_text(SCRIPTS[shell], encoding="utf-8")
    done = subprocess.run([program(shell), "-n", tmp_path / shell], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_completion_proposes_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "bash"]) == 0
    assert capsys.readouterr().out == SCRIPTS["bash"]
    # No proxy answers here, or only one with other Services.
    assert run(["completion", "zsh", "kube-proxy services no-such-namespace/"]) == 0
    assert capsys.readouterr() == ("", "")


def test_every_flag_of_the_proxy_is_known_and_no_other() -> None:
    flags = {f"--{flag.name}" for flag in FLAGS if not flag.hidden}
    assert {one.partition("\t")[0] for one in following("kube-proxy -")} == flags


def test_manual_pages_are_well_formed_and_have_every_option(tmp_path: Path) -> None:
    MANUAL["write"](tmp_path)
    assert {path.name for path in (tmp_path / "completion").iterdir()} == set(MANUAL["FILES"].values())
    pages = {path.stem: path.read_text(encoding="utf-8") for path in (tmp_path / "man/man8").iterdir()}
    assert set(pages) == {"kube-proxy", *(f"kube-proxy-{name}" for name in COMMANDS)}
    for name in (PROXY, *COMMANDS):
        text = pages[f"kube-proxy-{name}" if name else "kube-proxy"]
        for option in parser_of(name)._option_string_actions:
            assert "\\fB" + option.replace("-", "\\-") + "\\fR" in text
        requests = set(re.findall(r"^\.(\w+)", text, re.MULTILINE))
        assert requests <= {"TH", "SH", "TP", "B", "PP", "nf", "fi", "RS", "RE", "br", "nh", "ad"}
        # groff would interpret a line of text that begins with a dot or an apostrophe as a request.
        assert not re.search(r"^'", text, re.MULTILINE)
    for path in (tmp_path / "man/man8").iterdir():
        command = [program("groff"), "-man", "-Tutf8", "-ww", "-z", path]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stderr == "", path
