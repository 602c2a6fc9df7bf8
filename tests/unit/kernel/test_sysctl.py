"""Kernel parameters: reading and writing in a folder that replaces /proc/sys."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kubeproxy.errors import ApplyError, Unsupported
from kubeproxy.kernel.proc import sysctl
from kubeproxy.kernel.proc.sysctl import apply_settings, read_sysctl, write_sysctl


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "net/netfilter").mkdir(parents=True)
    (tmp_path / "net/netfilter/nf_conntrack_max").write_text("1000\n")
    (tmp_path / "net/netfilter/nf_conntrack_udp_timeout").write_text("30\n")
    (tmp_path / "hashsize").write_text("256\n")
    return tmp_path


def test_only_differences_are_written(tree: Path) -> None:
    settings = [("net/netfilter/nf_conntrack_max", 4000), ("net/netfilter/nf_conntrack_udp_timeout", 30)]
    assert apply_settings(settings, tree, tree / "hashsize") == ["net/netfilter/nf_conntrack_max"]
    assert read_sysctl("net/netfilter/nf_conntrack_max", tree) == "4000"
    assert (tree / "hashsize").read_text().startswith("1000")
    assert apply_settings(settings, tree, tree / "hashsize") == []


def test_a_larger_table_stays(tree: Path) -> None:
    """An operator's value, above the one that the proxy would set (kubernetes issue 141943)."""
    assert apply_settings([("net/netfilter/nf_conntrack_max", 100)], tree, tree / "hashsize") == []
    assert (tree / "net/netfilter/nf_conntrack_max").read_text() == "1000\n"
    assert (tree / "hashsize").read_text() == "256\n"


def test_a_hash_table_that_cannot_grow_is_only_logged(tree: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        written = apply_settings([("net/netfilter/nf_conntrack_max", 4000)], tree, tree / "nothing")
    assert written == ["net/netfilter/nf_conntrack_max"]
    assert "may be slow" in caplog.text


@pytest.mark.parametrize(("held", "fails"), [(1000, True), (5000, False)])
def test_a_read_only_limit_fails_only_when_it_is_too_small(tree: Path, monkeypatch, held: int, fails: bool) -> None:
    (tree / "net/netfilter/nf_conntrack_max").write_text(str(held))

    def refuse(path: Path, value: str, what: str) -> None:
        raise ApplyError(f"cannot set {what}")

    monkeypatch.setattr(sysctl, "_write", refuse)
    settings = [("net/netfilter/nf_conntrack_max", 4000)]
    if fails:
        with pytest.raises(ApplyError):
            apply_settings(settings, tree, tree / "hashsize")
    else:
        assert apply_settings(settings, tree, tree / "hashsize") == []


def test_a_parameter_that_is_missing_tells_how_to_get_it(tree: Path) -> None:
    with pytest.raises(Unsupported, match="modprobe nf_conntrack"):
        write_sysctl("net/netfilter/nf_conntrack_tcp_be_liberal", 1, tree)


def test_an_error_of_writing_has_the_cause_and_the_fix(tree: Path) -> None:
    key = "net/netfilter/nf_conntrack_max"
    path = tree / key
    path.unlink()
    path.mkdir()
    with pytest.raises(ApplyError, match="nf_conntrack_max"):
        write_sysctl(key, 1, tree)
    # A read-only parameter of the kernel; in an ordinary folder root may write it.
    with pytest.raises(ApplyError, match="cannot set sysctl kernel/ostype to 1: "):
        write_sysctl("kernel/ostype", 1)


@pytest.mark.parametrize(
    "key",
    ["../etc/passwd", "net/../../etc/passwd", "/etc/passwd", "net//x", "net", "", "net/ipv4/..", "net/./x", "net/a b"],
)
def test_keys_cannot_leave_the_folder(key: str, tree: Path) -> None:
    with pytest.raises(ApplyError, match="not the name of a sysctl"):
        read_sysctl(key, tree)


@pytest.mark.parametrize("key", ["net/ipv4/conf/eth0.100/rp_filter", "net/ipv4/conf/veth-a_b@c/rp_filter"])
def test_interface_names_may_stand_in_keys(key: str, tree: Path) -> None:
    with pytest.raises(Unsupported):
        read_sysctl(key, tree)
