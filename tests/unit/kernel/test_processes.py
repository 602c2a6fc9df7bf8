"""The recognition of kube-proxy processes, in a fake /proc."""

import os

import pytest

from kubeproxy.kernel.proc import processes


@pytest.fixture
def proc(tmp_path):
    def start(pid, *words, net="here"):
        folder = tmp_path / str(pid)
        (folder / "ns").mkdir(parents=True)
        (folder / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in words))
        (tmp_path / net).touch()
        (folder / "ns/net").symlink_to(tmp_path / net)
        return folder

    start.root = tmp_path
    start("self", "x")
    return start


def test_a_go_proxy_and_our_own(proc):
    proc(10, "/usr/local/bin/kube-proxy", "--config=/c", "--v=2")
    proc(11, "/x/bin/python3", "/x/bin/kube-proxy", "--proxy-mode", "userspace")
    proc(12, "/x/bin/python3.11", "-I", "-m", "kubeproxy.cli", "--v=1")
    proc(13, "/usr/local/bin/kube-proxy")
    found = processes.proxies(proc.root)
    assert [(one.pid, one.ours, one.arguments) for one in found] == [
        (10, False, ("--config=/c", "--v=2")),
        (11, True, ("--proxy-mode", "userspace")),
        (12, True, ("--v=1",)),
        (13, False, ()),
    ]


def test_processes_that_are_no_proxy(proc):
    proc(20, "/x/bin/python3", "/x/bin/kube-proxy", "why", "node", "default/web:80")
    proc(21, "/usr/local/bin/kube-proxy", "--v=2", net="elsewhere")
    proc(22, "vi", "kube-proxy")
    proc(23)
    proc(24, "/x/bin/python3", "-V")
    (proc.root / "25").mkdir()  # the process has ended
    assert processes.proxies(proc.root) == []
    assert [processes.is_elsewhere(pid, proc.root) for pid in (20, 21, 25, 26)] == [False, True, False, False]


def test_a_process_of_another_network_namespace_has_no_counted_name(proc):
    (proc(30, "k3s", net="elsewhere") / "comm").write_text("k3s-server\n")
    assert not processes.named(("k3s",), proc.root)
    (proc(31, "k3s") / "comm").write_text("k3s-server\n")
    assert processes.named(("k3s",), proc.root)


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (("--config=/c",), "/c"),
        (("-config", "/c"), "/c"),
        (("--v=2", "--config", "/c"), "/c"),
        (("--configured=/d",), ""),
        (("--config",), ""),
        ((), ""),
    ],
)
def test_values_of_flags(arguments, value):
    assert processes.value_of(arguments, "config") == value


def test_descriptors(proc):
    folder = proc(30, "x")
    assert processes.descriptors(30, proc.root) is None
    (folder / "fd").mkdir()
    (folder / "fd/0").touch()
    (folder / "limits").write_text(
        "Limit  Soft Limit  Hard Limit  Units\nMax open files            1024       4096  files\n"
    )
    assert processes.descriptors(30, proc.root) == (1, 1024)
    own = processes.descriptors(os.getpid())
    assert own is not None
    assert 0 < own.used < own.limit
