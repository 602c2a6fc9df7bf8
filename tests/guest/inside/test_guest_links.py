"""The dummy interface of ipvs mode and its addresses; the modules of the guest's kernel."""

from __future__ import annotations

import socket
import subprocess
import time

import pytest

from kubeproxy.errors import ApplyError, Unsupported
from kubeproxy.kernel.proc.modules import ipvs_modules, load, present, release, require
from kubeproxy.kernel.route import (
    add_addresses,
    delete_link,
    ensure_dummy,
    link_addresses,
    link_index,
    local_addresses,
    remove_addresses,
)

NAME = "kube-ipvs0"
FOUR = {bytes([10, 96, n // 256, n % 256]) for n in range(1, 1501)}
SIX = {socket.inet_pton(socket.AF_INET6, f"fd00:10:96::{n:x}") for n in range(1, 301)}


def test_a_dummy_is_made_once_and_removed_once() -> None:
    assert link_index(NAME) is None
    index = ensure_dummy(NAME)
    assert (ensure_dummy(NAME), link_index(NAME)) == (index, index)
    assert not link_addresses(NAME, socket.AF_INET6)  # not even a link-local address
    assert delete_link(NAME)
    assert not delete_link(NAME)


def test_one_that_was_left_down_is_set_up() -> None:
    subprocess.run(["ip", "link", "add", NAME, "type", "dummy"], check=True)
    ensure_dummy(NAME)
    shown = subprocess.run(["ip", "link", "show", NAME], capture_output=True, text=True, check=True).stdout
    assert "UP" in shown.partition("<")[2].partition(">")[0].split(",")


def test_many_addresses_come_and_go_in_both_families() -> None:
    index = ensure_dummy(NAME)
    add_addresses(index, FOUR | SIX)
    add_addresses(index, FOUR | SIX)  # a repetition is no error
    assert link_addresses(NAME, socket.AF_INET) == FOUR
    assert link_addresses(NAME, socket.AF_INET6) == SIX
    assert {one.prefixlen for one in local_addresses(socket.AF_INET) if one.interface == NAME} == {32}
    keep = {min(FOUR), min(SIX)}
    remove_addresses(index, (FOUR | SIX) - keep)
    remove_addresses(index, (FOUR | SIX) - keep)
    assert link_addresses(NAME, socket.AF_INET) | link_addresses(NAME, socket.AF_INET6) == keep


def send_soon(mine: socket.socket, address: tuple[str, int]) -> None:
    """The kernel adds the local route of an IPv6 address a moment after the address (addrconf_mod_dad_work)."""
    until = time.monotonic() + 15
    while True:
        try:
            mine.sendto(b"?", address)
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.01)
        else:
            return


@pytest.mark.parametrize("address", [("10.96.0.1", 9), ("fd00:10:96::1", 9)])
def test_an_address_is_usable_and_is_no_source_for_others(address: tuple[str, int]) -> None:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    other = "fd00:10:96::2" if family == socket.AF_INET6 else "10.96.0.2"
    subprocess.run(["ip", "link", "add", "eth0", "type", "dummy"], check=True)
    subprocess.run(["ip", "link", "set", "eth0", "up"], check=True)
    own = "2001:db8::9/64" if family == socket.AF_INET6 else "192.168.0.9/24"
    nodad = ["nodad"] if family == socket.AF_INET6 else []
    subprocess.run(["ip", "address", "add", own, "dev", "eth0", *nodad], check=True)
    subprocess.run(["ip", "route", "add", f"{other}/{'128' if nodad else '32'}", "dev", "eth0"], check=True)
    add_addresses(ensure_dummy(NAME), [socket.inet_pton(family, address[0])])
    with socket.socket(family, socket.SOCK_DGRAM) as mine:
        mine.bind(address)
        mine.settimeout(15)
        send_soon(mine, address)
        assert mine.recv(1) == b"?"
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))
        assert probe.getsockname()[0] == own.partition("/")[0]


def test_a_refusal_names_the_address() -> None:
    with pytest.raises(ApplyError, match=r"cannot add the address 10\.96\.0\.1 \(interface 4711\): No such device"):
        add_addresses(4711, [bytes([10, 96, 0, 1])])


def test_required_modules_are_loaded() -> None:
    assert "ip_vs_ftp" not in present(["ip_vs_ftp"])
    require(["ip_vs_ftp", *ipvs_modules(release())], "ipvs mode")
    assert present(["ip_vs_ftp", "ip_vs", "nonsense"]) == {"ip_vs_ftp", "ip_vs"}


def test_a_missing_module_is_named_with_the_fix() -> None:
    with pytest.raises(
        Unsupported, match=r"ipvs mode needs the kernel module ip_vs_nonsense.*modprobe -a ip_vs_nonsense"
    ):
        require(["ip_vs_nonsense", *ipvs_modules(release())], "ipvs mode")
    assert list(load(["nonsense"])) == ["nonsense"]
