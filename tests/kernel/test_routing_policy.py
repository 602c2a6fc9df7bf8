"""The kernel's refusals to route packets, and the rules and routes that findings name for them."""

from __future__ import annotations

import errno
import subprocess

import pytest

from kubeproxy.kernel.route import default_gateway
from kubeproxy.kernel.routing_policy import RoutedPacket, refusal, routing_tables
from kubeproxy.model.addresses import family_of, pack
from support.own_network import own_network

BASE = """link add name near type veth peer name near1
link add name far type veth peer name far1
addr add 10.1.0.1/24 dev near
addr add 10.2.0.1/24 dev far
addr add fd00:1::1/64 dev near nodad
addr add fd00:2::1/64 dev far nodad
link set dev near up
link set dev near1 up
link set dev far up
link set dev far1 up
"""


def packet(version: int, mark: int = 0, port: int = 80, source: str = "", end: str = "") -> RoutedPacket:
    client, endpoint = ("10.1.0.7", "10.2.0.7") if version == 4 else ("fd00:1::7", "fd00:2::7")
    return RoutedPacket(pack(source or client), pack(end or endpoint), "near", mark, 6, port)


def refused_by(one: RoutedPacket) -> str:
    return routing_tables(family_of(one.destination)).refusing(one)


def setup(*commands: str) -> None:
    subprocess.run(["ip", "-batch", "-"], input=BASE, text=True, check=True)
    for key in ("net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"):
        subprocess.run(["sysctl", "-qw", f"{key}=1"], check=True)
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)


@pytest.mark.parametrize(
    ("commands", "code", "named", "asked"),
    [
        ([], 0, "", {}),
        (["rule add pref 100 blackhole"], errno.EINVAL, "ip rule 100 (blackhole)", {}),
        (["rule add pref 100 from {client} prohibit"], errno.EACCES, "ip rule 100 (prohibit)", {}),
        (["rule add pref 100 to {end} iif near unreachable"], errno.ENETUNREACH, "ip rule 100 (unreachable)", {}),
        (["rule add pref 100 iif far unreachable"], 0, "", {}),
        (["rule add pref 100 fwmark 7 prohibit"], 0, "", {}),
        (["rule add pref 100 fwmark 7/0xf prohibit"], errno.EACCES, "ip rule 100 (prohibit)", {"mark": 0x4007}),
        (["rule add pref 100 ipproto tcp dport 80 prohibit"], errno.EACCES, "ip rule 100 (prohibit)", {}),
        (["rule add pref 100 ipproto tcp dport 80 prohibit"], 0, "", {"port": 81}),
        (
            ["rule add pref 100 lookup 300", "route add prohibit {net} table 300"],
            errno.EACCES,
            "prohibit {net} in table 300 (ip rule 100)",
            {},
        ),
        (["route add unreachable {end}"], errno.EHOSTUNREACH, "unreachable {end} in table 254 (ip rule 32766)", {}),
    ],
)
@pytest.mark.parametrize("version", [4, 6])
def test_a_refused_packet(version, commands, code, named, asked):
    one = packet(version, **asked)
    texts = (
        {"client": "10.1.0.7/32", "end": "10.2.0.7/32", "net": "10.2.0.0/24"}
        if version == 4
        else {"client": "fd00:1::7/128", "end": "fd00:2::7/128", "net": "fd00:2::/64"}
    )
    with own_network():
        setup(*(f"-{version} {command.format(**texts)}" for command in commands))
        assert (refusal(one), refused_by(one) if code else "") == (code, named.format(**texts))


def test_a_packet_without_a_route_and_one_of_another_network():
    with own_network():
        setup()
        lost = packet(4, end="10.3.0.1")
        assert (refusal(lost), refused_by(lost)) == (errno.ENETUNREACH, "")
        subprocess.run(["sysctl", "-qw", "net.ipv4.conf.near.rp_filter=1"], check=True)
        other = packet(4, source="10.2.0.9")
        assert refused_by(other) == ""
        assert refusal(other) in {errno.EXDEV, errno.EINVAL}
        assert refusal(packet(4)) == 0


@pytest.mark.parametrize("version", [4, 6])
def test_the_gateway_of_the_default_route_is_known_unless_another_route_is_longer(version: int) -> None:
    near, net = ("10.1.0.9", "10.9.0.0/16") if version == 4 else ("fd00:1::9", "fd00:9::/32")
    end = pack(net.partition("/")[0])
    with own_network():
        setup()
        assert default_gateway(end) is None
        subprocess.run(["ip", f"-{version}", "route", "add", "default", "via", near], check=True)
        assert default_gateway(end) == pack(near)
        subprocess.run(["ip", f"-{version}", "route", "add", net, "via", near], check=True)
        assert default_gateway(end) is None
