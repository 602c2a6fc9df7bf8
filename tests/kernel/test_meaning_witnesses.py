"""Each fault in recorded rules of the Go kube-proxy is found with a witness, and real packets have its outcomes."""

from __future__ import annotations

import gzip
import re
import socket
import struct
from collections import Counter
from contextlib import ExitStack
from typing import NamedTuple

import pytest

from kubeproxy.meaning import firewall
from kubeproxy.meaning.compare import FirstPacket, Shares, Witness, compare
from kubeproxy.meaning.firewall import place_of
from kubeproxy.meaning.rules import CompiledRules, NodePlace
from kubeproxy.model.addresses import Family
from support.namespaces import inside, namespace, run
from support.places import RECORDINGS

NODE, PLAIN = "192.168.100.2", "10.96.1.0"
PACKETS = 150
FEW = 10
"""Packets where all have one outcome: the kernel limits the rate of errors."""
FAR = 0.15
"""Shares of as many connections are as close as that to those of the rules: five standard deviations of 1/3."""

NFT = {
    "element": (r"\n.*10\.96\.1\.1 \. tcp \. 80 : goto service-.*", ""),
    "endpoint": (r"(mod 3 map { 0 : )10\.244\.0\.10", r"\g<1>10.244.0.13"),
    "share": (r"mod 3 map { 0 : (\S+ \. \d+), 1 : (\S+ \. \d+)", r"mod 4 map { 0 : \1, 3 : \1, 1 : \2"),
    "masquerade": (r"\n.*masquerade clusterIP traffic from outside cluster.*", ""),
    "hairpin": (r"\n.*10\.244\.0\.11 \. 10\.244\.0\.11 \. tcp \. 3000,", ""),
    "priority": (r"(hook prerouting priority) dstnat - 10", r"\1 filter"),
    "port": (rf"({PLAIN} \. tcp \.) 80", r"\1 81"),
    "protocol": (rf"({PLAIN} \.) udp( \. 80)", r"\1 sctp\2"),
    "target port": (r"(mod 3 map { 0 : 10\.244\.0\.10 \.) 3000", r"\1 3001"),
    "reject": (r"\n\s*reject\n", "\n"),
    "jump": (r"(chain filter-forward {\n.*\n.*)\n.*jump cluster-ips-check", r"\1"),
}
"""Faults by name: a pattern in the listing of nft, and its replacement."""
IPTABLES = {
    "rule": (rf"\n-A KUBE-SERVICES -d {PLAIN}/32 -p tcp .*", ""),
    "endpoint": (r"(default/plain:tcp.*--to-destination 10\.244\.0\.)10:", r"\g<1>13:"),
    "share": (r"(default/plain:tcp -> .* --probability) 0\.33\d+", r"\1 0.60000000000"),
    "masquerade": (r"\n.*default/plain:tcp cluster IP.*KUBE-MARK-MASQ", ""),
    "port": (rf"(-A KUBE-SERVICES -d {PLAIN}/32 -p tcp .*--dport) 80", r"\1 81"),
    "protocol": (rf"(-A KUBE-SERVICES -d {PLAIN}/32 -p) udp (.* -m) udp", r"\1 sctp \2 sctp"),
    "target port": (r"(default/plain:tcp.*--to-destination \S+:)3000", r"\g<1>3001"),
    "reject": (r"\n-A KUBE-SERVICES .*default/none:tcp has no endpoints.*", ""),
    "source range": (r"\n-A KUBE-PROXY-FIREWALL .*default/ranged:tcp.*", ""),
    "jump": (r"\n-A PREROUTING .*KUBE-SERVICES", ""),
}
"""The same in the text of iptables-save."""


class Program(NamedTuple):
    """How rules get into a network namespace: their file, the command, and their faults."""

    file: str
    command: str
    faults: dict[str, tuple[str, str]]


PROGRAMS = {
    "nftables": Program("v1.36.nft.gz", "nft -f -", NFT),
    "iptables": Program("v1.36.iptables.gz", "iptables-nft-restore", IPTABLES),
}
WITHOUT = re.compile(r" -m nfacct --nfacct-name +\S+")
"""Counters of the Go kube-proxy are objects beside the rules."""


class Node:
    """A node whose only link leads to a world with all other addresses."""

    def __init__(self, name: str, world: str, link: str, stack: ExitStack) -> None:
        run("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", link, "netns", world)
        run("ip", "-n", world, "link", "set", link, "up")
        self.out = inside(world, lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800)))
        stack.enter_context(self.out).bind((link, 0))
        self.out.settimeout(10)
        mac = self.out.getsockname()[4].hex(":")
        for command in (
            f"addr add {NODE}/32 dev eth0",
            "link set eth0 up",
            "route add 192.168.100.1 dev eth0",
            "route add default via 192.168.100.1",
            f"neigh add 192.168.100.1 lladdr {mac} dev eth0",
        ):
            run("ip", "-n", name, *command.split())
        for setting in ("ip_forward=1", "conf.all.rp_filter=0", "conf.eth0.rp_filter=0", "icmp_ratelimit=0"):
            run("ip", "netns", "exec", name, "sysctl", "-qw", f"net.ipv4.{setting}")
        for each in ("all", "eth0"):
            run("ip", "netns", "exec", name, "sysctl", "-qw", f"net.ipv4.conf.{each}.send_redirects=0")
        found = inside(name, lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
        with found:
            found.bind(("eth0", 0))
            self._head = found.getsockname()[4] + self.out.getsockname()[4] + b"\x08\0"

    def fates(self, packet: FirstPacket, count: int) -> dict[str, float]:
        """Send first packets of connections, and one that marks the end; return the shares of their outcomes."""
        end = FirstPacket("198.51.100.9", "198.51.100.8", socket.IPPROTO_UDP, 9, "eth0", "")
        for number in range(count):
            self.out.send(self._head + datagram(packet, 20000 + number))
        self.out.send(self._head + datagram(end, 9))
        found: Counter[str] = Counter()
        while True:
            frame, (_, _, kind, *_) = self.out.recvfrom(2048)
            if kind == socket.PACKET_OUTGOING:
                continue
            source, target = (socket.inet_ntoa(frame[at : at + 4]) for at in (26, 30))
            protocol, port = frame[23], int.from_bytes(frame[36:38], "big")
            if target == end.destination:
                break
            resets = protocol == socket.IPPROTO_TCP and frame[47] & 4
            if target == packet.source and (protocol == socket.IPPROTO_ICMP or resets):
                found["refused"] += 1
            else:
                found[f"to {target}:{port}" + ", masqueraded" * (source != packet.source)] += 1
        found["dropped"] = count - found.total()
        return {fate: number / count for fate, number in found.items() if number}


def datagram(packet: FirstPacket, port: int) -> bytes:
    """Return an IPv4 packet of UDP, or the first one of a TCP connection."""
    ends = socket.inet_aton(packet.source) + socket.inet_aton(packet.destination)
    if packet.protocol == socket.IPPROTO_TCP:
        body = struct.pack("!HHIIBBHHH", port, packet.port, port, 0, 5 << 4, 2, 65535, 0, 0)
        at = 16
    else:
        body, at = struct.pack("!HHHH4s", port, packet.port, 12, 0, b"ping"), 6
    pseudo = ends + struct.pack("!HH", packet.protocol, len(body))
    body = body[:at] + checksum(pseudo + body) + body[at + 2 :]
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(body), 0, 0, 64, packet.protocol, 0) + ends
    return head[:10] + checksum(head) + head[12:] + body


def checksum(data: bytes) -> bytes:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return (~total & 0xFFFF).to_bytes(2, "big")


def stated(packet: FirstPacket, shares: Shares) -> dict[str, float]:
    """Return shares of outcomes by their words, as `Node.fates` does."""
    found: dict[str, float] = {}
    for outcome, share in shares:
        if outcome.kind in {"dropped", "refused"}:
            words = outcome.kind
        elif outcome.kind == "passed" and packet.destination == NODE:
            words = "refused"  # nothing listens
        elif outcome.kind == "passed":
            words = f"to {packet.destination}:{packet.port}"
        else:
            address = socket.inet_ntoa(outcome.address.to_bytes(4, "big"))
            words = f"to {address}:{packet.port if outcome.port < 0 else outcome.port}"
        found[words + ", masqueraded" * outcome.masquerade] = share
    return found


def rules_and_place() -> tuple[CompiledRules, NodePlace]:
    place = place_of(Family.IPV4)
    return firewall.rules_of_kube_proxy(Family.IPV4, place), place


def is_sendable(witness: Witness) -> bool:
    """Return whether a packet comes in from the world, and no endpoint keeps the client of the first of them."""
    remembered = any(outcome.remembered for outcome, _ in (*witness.first, *witness.second))
    return bool(witness.packet.interface) and witness.packet.protocol in {6, 17} and not remembered


@pytest.mark.quick
@pytest.mark.parametrize(
    ("program", "fault"), [(name, fault) for name, program in PROGRAMS.items() for fault in program.faults]
)
def test_a_fault_has_a_witness_and_the_kernel_agrees(program: str, fault: str) -> None:
    file, command, faults = PROGRAMS[program]
    text = WITHOUT.sub("", gzip.decompress((RECORDINGS / "go-rules" / file).read_bytes()).decode())
    changed, times = re.subn(*faults[fault], text, count=1)
    assert times == 1
    with ExitStack() as stack, namespace() as world, namespace() as first, namespace() as second:
        nodes = [Node(first, world, "w0", stack), Node(second, world, "w1", stack)]
        for name, rules in ((first, text), (second, changed)):
            run("ip", "netns", "exec", name, *command.split(), text=rules)
        sides = [inside(name, rules_and_place) for name in (first, second)]
        found = compare(sides[0][0], sides[1][0], sides[0][1])
        assert not found.unknown
        assert found.causes
        sendable = [cause.witness for cause in found.causes if is_sendable(cause.witness)]
        assert sendable
        for packet, *both in sendable[:3]:
            for node, shares in zip(nodes, both, strict=True):
                wanted = stated(packet, shares)
                seen = node.fates(packet, PACKETS if len(wanted) > 1 else FEW)
                assert seen.keys() == wanted.keys(), str(packet)
                assert all(abs(seen[words] - share) < FAR for words, share in wanted.items()), (wanted, seen)
