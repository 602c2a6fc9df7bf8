"""A node whose only link leads to a namespace with all other addresses, and the real outcomes of packets there."""

from __future__ import annotations

import os
import socket
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from kubeproxy.meaning.compare import FirstPacket, Shares
from support.namespaces import inside, run

NODE = "192.168.100.2"
_END = FirstPacket("198.51.100.9", "198.51.100.8", socket.IPPROTO_UDP, 9, "eth0", "")
"""The packet that marks the end of a round."""
_PORT, _PORTS = 10_000, 40_000
_RCVBUFFORCE = 33  # asm-generic/socket.h
_BUFFER = 1 << 24


class Node:
    """A network namespace as a node; `link` is the name of the link in the namespace `world`."""

    def __init__(self, name: str, world: str, link: str, stack: ExitStack) -> None:
        run("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", link, "netns", world)
        run("ip", "-n", world, "link", "set", link, "up")
        self._out = _capture(world, link, stack)
        self._lo = _capture(name, "lo", stack)
        self._port = _PORT
        self._here = inside(name, lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW))
        stack.enter_context(self._here)
        mac = self._out.getsockname()[4]
        for command in (
            f"addr add {NODE}/32 dev eth0",
            "link set eth0 up",
            "route add 192.168.100.1 dev eth0",
            "route add default via 192.168.100.1",
            f"neigh add 192.168.100.1 lladdr {mac.hex(':')} dev eth0",
        ):
            run("ip", "-n", name, *command.split())
        for setting in ("ip_forward=1", "conf.all.rp_filter=0", "conf.eth0.rp_filter=0", "icmp_ratemask=0"):
            run("ip", "netns", "exec", name, "sysctl", "-qw", f"net.ipv4.{setting}")
        for each in ("all", "eth0"):
            run("ip", "netns", "exec", name, "sysctl", "-qw", f"net.ipv4.conf.{each}.send_redirects=0")
        found = inside(name, lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
        with found:
            found.bind(("eth0", 0))
            self._head = found.getsockname()[4] + mac + b"\x08\0"

    def fates(self, packet: FirstPacket, count: int) -> dict[str, float]:
        """Send first packets of connections; return the shares of their outcomes."""
        return {fate: number / count for fate, number in Counter(self.outcomes([packet] * count)).items()}

    def outcomes(self, packets: Sequence[FirstPacket]) -> list[str]:
        """Send each packet as the first one of a connection; return the outcomes in words, as `stated` does."""
        found = ["dropped"] * len(packets)
        with _one_cpu():
            self._send(packets)
        port = self._port
        self._port = _PORT + (port - _PORT + len(packets)) % _PORTS
        for frame in [*_frames(self._lo, once=True), *_frames(self._out)]:
            source, target = (socket.inet_ntoa(frame[at : at + 4]) for at in (26, 30))
            number, refused = _number(frame, port)
            if number >= len(packets) or target == "127.0.0.1":
                continue
            if refused:
                found[number] = "refused"
            elif target != NODE:
                found[number] = f"to {target}:{int.from_bytes(frame[36:38])}" + ", masqueraded" * (
                    source != packets[number].source
                )
        return found

    def _send(self, packets: Sequence[FirstPacket]) -> None:
        """Send packets, and then the packet that ends the round."""
        for number, packet in enumerate(packets):
            data = datagram(packet, number, self._port)
            if packet.interface:
                self._out.send(self._head + data)
            else:
                with suppress(PermissionError):  # Rules may drop or reject this packet.
                    self._here.sendto(data, (packet.destination, 0))
        self._out.send(self._head + datagram(_END, 0, self._port))


@contextmanager
def _one_cpu() -> Iterator[None]:
    """Keep this thread on one CPU, so that the kernel processes its packets in their order."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _capture(namespace: str, link: str, stack: ExitStack) -> socket.socket:
    found = inside(namespace, lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800)))
    stack.enter_context(found).bind((link, 0))
    found.setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, _BUFFER)
    found.settimeout(10)
    return found


def _frames(opened: socket.socket, *, once: bool = False) -> list[bytes]:
    """Return received frames up to the packet that ends the round; with `once` the frames that have already arrived."""
    found = []
    end = socket.inet_aton(_END.destination)
    opened.settimeout(0 if once else 10)
    with suppress(BlockingIOError):
        while True:
            frame, (_, _, kind, *_) = opened.recvfrom(2048)
            if frame[30:34] == end:
                break
            if kind != socket.PACKET_OUTGOING:
                found.append(frame)
    return found


def _number(frame: bytes, port: int) -> tuple[int, bool]:
    """Return the number in a packet, or in the packet that a reject quotes; and whether it is a reject.

    `port` is the source port of the first packet of the round.
    """
    protocol, body = frame[23], frame[34:]
    if protocol == socket.IPPROTO_ICMP:
        return int.from_bytes(body[28:30], "big") - port, True
    if protocol == socket.IPPROTO_TCP and body[13] & 4:
        return int.from_bytes(body[2:4], "big") - port, True
    return int.from_bytes(body[4:8] if protocol == socket.IPPROTO_TCP else body[8:12], "big"), False


def datagram(packet: FirstPacket, number: int, first: int) -> bytes:
    """Return an IPv4 packet of UDP, or the first one of a TCP connection; its source port is `first` plus a number."""
    ends = socket.inet_aton(packet.source) + socket.inet_aton(packet.destination)
    port = first + number
    if packet.protocol == socket.IPPROTO_TCP:
        body = struct.pack("!HHIIBBHHH", port, packet.port, number, 0, 5 << 4, 2, 65535, 0, 0)
        at = 16
    else:
        body, at = struct.pack("!HHHHI", port, packet.port, 12, 0, number), 6
    pseudo = ends + struct.pack("!HH", packet.protocol, len(body))
    body = body[:at] + checksum(pseudo + body) + body[at + 2 :]
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(body), 0, 0, 64, packet.protocol, 0) + ends
    return head[:10] + checksum(head) + head[12:] + body


def checksum(data: bytes) -> bytes:
    """Return the Internet checksum (RFC 1071)."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return (~total & 0xFFFF).to_bytes(2, "big")


def stated(packet: FirstPacket, shares: Shares) -> dict[str, float]:
    """Return the shares of outcomes by their text, as `Node.fates` does."""
    found: dict[str, float] = {}
    for outcome, share in shares:
        if outcome.kind in {"dropped", "refused"}:
            words = outcome.kind
        elif outcome.kind == "passed" and packet.destination == NODE:
            words = "refused"  # No process listens there.
        elif outcome.kind == "passed":
            words = f"to {packet.destination}:{packet.port}"
        else:
            address = socket.inet_ntoa(outcome.address.to_bytes(4, "big"))
            words = f"to {address}:{packet.port if outcome.port < 0 else outcome.port}"
        found[words + ", masqueraded" * outcome.masquerade] = share
    return found
