"""What shells complete, asked of the shells themselves; and manual pages, read by groff."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from kubeproxy.commands import COMMANDS
from kubeproxy.commands.grammar import commands, proxy
from kubeproxy.commands.main import parser_of, run
from kubeproxy.commands.papers import write
from kubeproxy.commands.shells import FILES, SCRIPTS, bash, fish
from kubeproxy.config.flags import FLAGS
from kubeproxy.config.modes import MODES
from support.programs import program

# A kube-proxy that knows two Services, as a function of the shell.
KNOWN = {
    "bash": 'kube-proxy() { if [[ $3 == *:* ]]; then echo "$3"{80,9/udp}; else echo {default,shop}/web; fi | xargs '
    "-n1; }",
    "fish": 'function kube-proxy; string match -q "*:*" -- $argv[3]; and echo $argv[3]80; or echo default/web; end',
}
BASH = """
{known}
. /dev/stdin <<'SCRIPT'
{script}
SCRIPT
COMP_LINE={line!r} COMP_POINT={point} COMP_WORDBREAKS={breaks}
_kube_proxy 2>/dev/null
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def completed(line: str, folder: Path) -> list[str]:
    """What bash would show after this line; readline's own work, as the blank behind a word, is not in it."""
    breaks = "$' \\t\\n\"\\'><=;|&(:'"
    text = BASH.format(known=KNOWN["bash"], script=bash(), line=line, point=len(line), breaks=breaks)
    done = subprocess.run(["bash", "--norc"], input=text, capture_output=True, text=True, check=True, cwd=folder)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("kube-proxy wh", ["why"]),
        ("kube-proxy why ", ["node"]),
        ("kube-proxy why 10.244.0.9 --no-p", ["--no-probe"]),
        ("kube-proxy why --interface eth0 node ", ["default/web:", "shop/web:"]),
        # Only what stands behind the colon, as readline has cut there.
        ("kube-proxy why node default/web:", ["80", "9/udp"]),
        ("kube-proxy services ", ["default/web", "shop/web"]),
        ("kube-proxy services x ", []),
        ("kube-proxy services -o j", ["json"]),
        ("kube-proxy services --output=", ["text", "json"]),
        ("kube-proxy --proxy-mode ", [*MODES]),
        ("kube-proxy --v 4 --proxy-mode=nft", ["nftables"]),
        ("kube-proxy --masq", ["--masquerade-all"]),
        ("kube-proxy --config ", ["a", "folder"]),
        ("kube-proxy why node x --manifests ", ["folder"]),
        ("kube-proxy plan --now a", ["a"]),
        ("kube-proxy plan --detect-local-mode B", ["BridgeInterface"]),
        ("kube-proxy completion ", ["bash", "zsh", "fish"]),
        ("kube-proxy --bind-address ", []),
    ],
)
def test_bash_completes(tmp_path: Path, line: str, shown: list[str]) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "folder").mkdir()
    assert sorted(completed(line, tmp_path)) == sorted(shown)


@pytest.mark.parametrize("shell", SCRIPTS)
def test_a_shell_reads_its_script(tmp_path: Path, shell: str) -> None:
    (tmp_path / FILES[shell]).write_text(SCRIPTS[shell](), encoding="utf-8")
    done = subprocess.run([program(shell), "-n", tmp_path / FILES[shell]], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_fish_completes(tmp_path: Path) -> None:
    def asked(line: str) -> list[str]:
        text = f"{KNOWN['fish']}\n{fish()}\ncomplete -C {line!r}"
        environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        command = [program("fish"), "--no-config", "-c", text]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        return [word.partition("\t")[0] for word in done.stdout.splitlines()]

    assert asked("kube-proxy wh") == ["why"]
    assert "--no-probe" in asked("kube-proxy why --")
    assert "--masquerade-all" in asked("kube-proxy --mas")
    assert asked("kube-proxy services -o ") == ["json", "text"]
    assert asked("kube-proxy services def") == ["default/web"]
    assert asked("kube-proxy why node default/web:") == ["default/web:80"]


def test_every_option_of_help_is_known_and_no_other() -> None:
    flags = {f"--{flag.name}" for flag in FLAGS if not flag.hidden}
    assert {option.names[-1] for option in proxy().options} == flags
    for name, one in zip(COMMANDS, commands(), strict=True):
        assert {text for option in one.options for text in option.names} == set(parser_of(name)._option_string_actions)
    for script in SCRIPTS.values():
        text = script()
        assert all(re.search(rf"(--|-l ){flag[2:]}\b", text) for flag in flags)


def test_completion_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "bash"]) == 0
    assert capsys.readouterr().out == bash()
    # No proxy answers here, or only one whose Services have other names.
    assert run(["completion", "names", "no-such-namespace/"]) == 0
    assert capsys.readouterr() == ("", "")


def test_manual_pages_are_well_formed_and_have_every_option(tmp_path: Path) -> None:
    write(tmp_path)
    pages = {path.stem: path.read_text(encoding="utf-8") for path in (tmp_path / "man/man8").iterdir()}
    assert set(pages) == {"kube-proxy", *(f"kube-proxy-{name}" for name in COMMANDS)}
    for grammar in (proxy(), *commands()):
        text = pages[grammar.name.replace(" ", "-")]
        for option in grammar.options:
            assert "\\fB" + option.names[-1].replace("-", "\\-") + "\\fR" in text
        requests = set(re.findall(r"^\.(\w+)", text, re.MULTILINE))
        assert requests <= {"TH", "SH", "TP", "B", "BR", "PP", "nf", "fi", "RS", "RE", "br", "nh", "ad"}
        # A line of text that begins with a dot or an apostrophe would be taken for a request.
        assert not re.search(r"^'", text, re.MULTILINE)
    for path in (tmp_path / "man/man8").iterdir():
        command = [program("groff"), "-man", "-Tutf8", "-ww", "-z", path]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stderr == "", path
