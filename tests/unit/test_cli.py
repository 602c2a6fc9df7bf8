"""The command: help, version, exit codes, and the options that the program gets."""

import subprocess
import sys
import types

import pytest

from kubeproxy.cli import main, version_text
from kubeproxy.config.flags import FLAGS, GROUPS
from kubeproxy.config.load import load_text
from kubeproxy.errors import ConfigError, Unsupported
from kubeproxy.release import Build, build
from kubeproxy.report.metrics import build_info

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
DEPRECATED = (
    "Warning: All flags other than --config, --write-config-to and --cleanup are deprecated; use a configuration file"
)


@pytest.fixture
def app(monkeypatch):
    """The program, replaced by one that records its options; its result is set on the module."""
    module = types.ModuleType("kubeproxy.program.app")
    module.seen = []
    module.result = 0

    def run(options):
        module.seen.append(options)
        if isinstance(module.result, Exception):
            raise module.result
        return module.result

    module.run = run
    monkeypatch.setitem(sys.modules, "kubeproxy.program.app", module)
    return module


def test_help_shows_every_flag_in_its_group(capsys):
    assert main(["--help"]) == 0
    out, err = capsys.readouterr()
    assert not err
    assert [line[:-1] for line in out.splitlines() if line[:-1] in GROUPS] == list(GROUPS)
    for flag in FLAGS:
        assert (f"--{flag.name} " in out or f"--{flag.name}\n" in out) is not flag.hidden
    assert max(map(len, out.splitlines())) <= 118
    assert "WatchListClient=true|false (BETA - default=true)" in out


@pytest.mark.parametrize("flag", ["--help", "--version", "--version=raw"])
def test_a_full_output_is_an_error_without_a_traceback(flag):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "kubeproxy.cli", flag]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "Error: cannot write to standard output: No space left on device\n"


def test_a_disconnected_reader_gets_nothing():
    command = [sys.executable, "-m", "kubeproxy.cli", "--help"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(60) == 1


def test_short_help_wins_over_words(capsys):
    assert main(["word", "-h"]) == 0
    assert "Usage:" in capsys.readouterr().out


def test_version(capsys):
    built = build()
    assert main(["--version"]) == 0
    git_version = f"v1.36.0+python.{built.name.replace('+', '.')}"
    assert capsys.readouterr().out == f"Kubernetes {git_version}\n"
    labels = build_info()
    assert (labels["git_version"], labels["git_commit"], labels["git_tree_state"]) == (git_version, *built[1:])
    assert main(["--version=raw"]) == 0
    expected = f"version: {built.name}\ncommit: {built.commit}\ntree: {built.tree}\nkubernetes: v1.36\n"
    assert capsys.readouterr().out.startswith(expected)


@pytest.mark.parametrize(
    ("built", "shown"),
    [
        (Build("0.1.0", "1a2b3c4d5e6f" + "0" * 28, "clean"), "0.1.0.g1a2b3c4d5e6f"),
        (Build("0.1.0.dev0+g1a2b3c4d5e6f.dirty", "1a2b3c4d5e6f" + "0" * 28, "dirty"), "0.1.0.dev0.g1a2b3c4d5e6f.dirty"),
    ],
)
def test_the_short_version_names_the_commit(built, shown, monkeypatch):
    """After the only plus sign of a semantic version, only dots and letters are allowed."""
    monkeypatch.setattr("kubeproxy.cli.build", lambda: built)
    assert version_text("true") == f"Kubernetes v1.36.0+python.{shown}"


def test_version_false_goes_on(app):
    assert main(["--version=false", "--cleanup"]) == 0
    assert app.seen[0].cleanup


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--foo"], "Error: unknown flag: --foo\n"),
        (["--nodeport-adresses=x"], "Error: unknown flag: --nodeport-adresses; did you mean --nodeport-addresses?\n"),
        (["run"], 'Error: "kube-proxy" does not take any arguments, got ["run"]\n'),
        (["a", "", 'b"c'], 'Error: "kube-proxy" does not take any arguments, got ["a" "" "b\\"c"]\n'),
        (["--version", "x"], 'Error: "kube-proxy" does not take any arguments, got ["x"]\n'),
        (["--config=/absent"], "Error: cannot read the configuration file /absent: No such file or directory\n"),
    ],
)
def test_errors(app, capsys, arguments, message):
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", message)
    assert not app.seen


def test_empty_words_are_no_arguments(app):
    assert main(["", "--cleanup", ""]) == 0
    assert app.seen


def test_several_mistakes_are_a_list(app, capsys, tmp_path):
    (tmp_path / "c").write_text(HEAD + "mode: x\noomScoreAdj: 5000\n")
    assert main([f"--config={tmp_path}/c"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"Error: {tmp_path}/c: 2 mistakes:"
    assert lines[1].startswith("  oomScoreAdj: ")
    assert lines[2].startswith("  mode: ")
    assert main(["--proxy-mode=x", "--oom-score-adj=5000"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Error: 2 mistakes:"
    assert lines[1].startswith("  --oom-score-adj: ")


def test_the_program_gets_its_options_and_gives_the_exit_code(app, capsys):
    app.result = 3
    assert main(["--proxy-mode=iptables", "--healthz-port=0"]) == 3
    (options,) = app.seen
    assert options.config.mode == "iptables"
    assert options.config.healthz_bind_address == ""
    assert capsys.readouterr().err.splitlines() == [
        "Flag --healthz-port has been deprecated, use --healthz-bind-address instead.",
        DEPRECATED,
    ]


@pytest.mark.parametrize("error", [ConfigError("mode: no"), Unsupported("nft is missing: apt install nftables")])
def test_errors_of_the_program_are_one_line(app, capsys, error):
    app.result = error
    assert main([]) == 1
    assert capsys.readouterr().err == f"Error: {error}\n"


def test_write_config_to_writes_and_ends(app, capsys, tmp_path):
    assert main([f"--write-config-to={tmp_path}/c", "--proxy-mode=ipvs"]) == 0
    assert load_text((tmp_path / "c").read_text()).mode == "ipvs"
    assert f"Wrote the configuration to {tmp_path}/c" in capsys.readouterr().err
    assert not app.seen
    assert main([f"--config={tmp_path}/c", f"--write-config-to={tmp_path}/d"]) == 0
    assert (tmp_path / "c").read_text() == (tmp_path / "d").read_text()
    assert main([f"--write-config-to={tmp_path}/no/c"]) == 1


def test_the_arguments_of_the_process_are_the_default(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kube-proxy", "--version"])
    assert main() == 0
    assert "Kubernetes" in capsys.readouterr().out


def test_version_and_help_load_nothing_heavy():
    code = (
        "import sys; from kubeproxy.cli import main; main(['--version']); main(['--help']);"
        "rooms = ('msgspec', 'yaml', 'asyncio', 'logging', 'kubeproxy.program.app');"
        "print([name for name in rooms if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
