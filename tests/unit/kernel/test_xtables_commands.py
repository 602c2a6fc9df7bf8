"""The commands of iptables: with names that are not valid UTF-8, and on a system that cannot start a process."""

from __future__ import annotations

import errno
import os
import subprocess
import threading

import pytest

from kubeproxy.errors import ApplyError
from kubeproxy.kernel.xtables import xtables
from kubeproxy.kernel.xtables.xtables import Commands
from kubeproxy.model.addresses import Family

COMMANDS = Commands("iptables-fake", Family.IPV4, True, (1, 8, 9))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Commands that store their input, and print it."""
    for name, script in (("save", 'cat "$RULES"'), ("restore", 'cat > "$RULES"')):
        file = tmp_path / f"iptables-fake-{name}"
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("RULES", str(tmp_path / "rules"))
    return tmp_path


def test_names_that_are_no_text_are_written_as_they_were_read(folder):
    """As for another program's chain that a full sync removes; root may give it any name."""
    rules = b":KUBE-SEP-\xff - [0:0]\n-X KUBE-SEP-\xff\n"
    (folder / "rules").write_bytes(rules)
    COMMANDS.restore(list(COMMANDS.saved("nat")))
    assert (folder / "rules").read_bytes() == rules


RUNS = {"save": lambda: list(COMMANDS.saved("nat")), "restore": lambda: COMMANDS.restore(["*nat\nCOMMIT\n"])}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_system_without_descriptors_is_an_error_that_is_tried_again(folder, monkeypatch, run):
    def refuse(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(ApplyError, match="Too many open files"):
        run()


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_system_without_threads_is_an_error_and_leaves_no_process(folder, monkeypatch, run):
    (folder / "rules").write_text("")
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            started.append(self)

    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(subprocess, "Popen", Popen)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(ApplyError, match="can't start new thread"):
        run()
    assert [process.returncode is not None for process in started] == [True]


def test_a_command_that_takes_too_long_is_ended(folder, monkeypatch):
    monkeypatch.setattr(xtables, "_RESTORE_TIMEOUT", 0.1)
    (folder / "iptables-fake-restore").write_text("#!/bin/sh\nexec sleep 100\n")
    with pytest.raises(ApplyError, match="did not finish in 0 s"):
        COMMANDS.restore(["*nat\nCOMMIT\n"])
