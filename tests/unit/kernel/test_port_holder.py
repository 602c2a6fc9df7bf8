"""The process that listens on a port."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kubeproxy.kernel.proc import processes
from kubeproxy.kernel.proc.processes import Process, holder

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
LINE = "   0: {address}:{port:04X} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 0 0 {inode} 1 0\n"


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_this_process_is_found(family, address):
    with socket.create_server((address, 0), family=family) as listener:
        port = listener.getsockname()[1]
        command = Path("/proc/self/comm").read_text().strip()
        assert holder(port, "kube-proxy") == Process(os.getpid(), command)
        packed, other = socket.inet_pton(family, address), bytes(16)[:-1] + b"\2"
        assert holder(port, "kube-proxy", address=packed) == Process(os.getpid(), command)
        assert holder(port, "kube-proxy", address=other) is None
        with socket.create_connection((address, port)):
            pass
    assert holder(port, "kube-proxy") is None


def line(port, inode, state="0A", address="00000000"):
    return LINE.format(address=address, port=port, state=state, inode=inode)


@pytest.fixture
def proc(tmp_path):
    """A folder like /proc: processes by number, with command, sockets and the listening sockets of their namespace."""

    def process(pid, command, inodes=(), tcp=""):
        folder = tmp_path / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "net").mkdir()
        (folder / "comm").write_text(f"{command}\n")
        (folder / "net/tcp").write_text(HEAD + tcp)
        for number, inode in enumerate(inodes):
            (folder / "fd" / str(number)).symlink_to(f"socket:[{inode}]")

    (tmp_path / "net").mkdir()
    (tmp_path / "net/tcp").write_text(HEAD + line(10256, 77) + line(10249, 78) + line(5000, 10256, "01"))
    (tmp_path / "version").touch()
    process.root = tmp_path
    return process


def hide(monkeypatch, *pids):
    """These processes hide their sockets, as processes with more capabilities do."""
    usual = processes._holds

    def holds(folder, links):
        if int(folder.name) in pids:
            raise PermissionError(13, "Permission denied")
        return usual(folder, links)

    monkeypatch.setattr(processes, "_holds", holds)


def test_only_listening_sockets_count(proc):
    proc(1, "init", [12])
    proc(7, "nginx", [12, 78])
    proc(9, "kube-proxy", [77])
    assert holder(10256, "kube-proxy", proc.root) == (9, "kube-proxy")
    assert holder(10249, "kube-proxy", proc.root) == (7, "nginx")
    assert holder(5000, "kube-proxy", proc.root) is None


def test_of_those_that_hide_it_the_one_of_that_name_in_this_network(proc, monkeypatch):
    ours = line(10256, 77)
    proc(1, "init", tcp=ours)
    proc(5, "kube-proxy", tcp=line(10256, 99))  # in a container with a separate network
    proc(8, "kube-proxy", tcp=ours)
    hide(monkeypatch, 1, 5, 8)
    assert holder(10256, "kube-proxy", proc.root) == (8, "kube-proxy")
    proc(9, "kube-proxy", tcp=ours)
    hide(monkeypatch, 9)
    assert holder(10256, "kube-proxy", proc.root) is None  # one of the two
