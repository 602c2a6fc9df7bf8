"""Targets for answers of the kernel: netlink messages, and the texts of /proc and iptables-save.

Only the kernel can send such messages (the sender's port must be 0), so the inputs simulate other kernel versions.
"""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from kubeproxy.backends.iptables.examine import owner_of
from kubeproxy.backends.iptables.found import by_chain
from kubeproxy.errors import KubeProxyError
from kubeproxy.kernel import route
from kubeproxy.kernel.conntrack import tracked, udp_flows
from kubeproxy.kernel.conntrack import tracked as tracking_counts
from kubeproxy.kernel.ipset import Ipsets, SetKind
from kubeproxy.kernel.ipvs import Ipvs, family_id, server_key
from kubeproxy.kernel.netlink.announcements import Announcements
from kubeproxy.kernel.netlink.protocol import HEADER, NLMSG_DONE, NLMSG_ERROR, Netlink, message
from kubeproxy.kernel.nftables import fetch, trace
from kubeproxy.kernel.nftables.changes import ChangeMonitor, Interest
from kubeproxy.kernel.nftables.reader import TableReader
from kubeproxy.kernel.nftables.tables import listed_chains
from kubeproxy.kernel.proc.modules import ModuleFiles, present
from kubeproxy.kernel.proc.processes import descriptors, holder, proxies
from kubeproxy.kernel.xtables import xtables

V4: Final = 2
IPVS: Final = 0x25


class Talker:
    """A socket on which the kernel gives every request the same answer: a buffer, and then the end of the dump."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._queue: list[bytes] = []

    def sendto(self, data: bytes, _: object) -> None:
        sequence = HEADER.unpack_from(data)[3]
        last = HEADER.unpack_from(data)[3] if len(data) < 5000 else sequence
        done = message(NLMSG_DONE, 2, sequence, bytes(4))
        self._queue = [self._answer, done, message(NLMSG_ERROR, 0, last, bytes(20))]

    def recvmsg(self, _: int) -> tuple[bytes, list[Any], int, tuple[int, int]]:
        if not self._queue:
            raise TimeoutError
        return self._queue.pop(0), [], 0, (0, 0)

    def recv(self, _: int) -> bytes:
        if not self._queue:
            raise BlockingIOError
        return self._queue.pop(0)

    def say(self) -> Talker:
        """Deliver the answer as an announcement, without a request."""
        self._queue = [self._answer]
        return self

    def settimeout(self, _: float) -> None:
        pass

    def setsockopt(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass


class Told(Netlink):
    """Return a netlink socket that is connected to a Talker."""

    def dump_all(self, kind: int, payload: bytes, what: str) -> list[bytes]:
        return list(self.dump(kind, payload, what))


def _link(answer: bytes) -> Any:
    return Told(0, Talker(answer))  # type: ignore[arg-type]


def _answer(data: bytes, kinds: Sequence[int], sequence: int = 1) -> bytes:
    """Return the input as one buffer: unchanged, or as the payload of one well-formed message.

    The first byte selects the form, and the kind of the message.
    """
    if not data or data[0] >= len(kinds):
        return data[1:]
    return message(kinds[data[0]], 2, sequence, data[1:])


def _each(*readers: Callable[[], object]) -> None:
    """Call all functions; a declared error of one must not hide an error of another."""
    for reader in readers:
        try:
            found = reader()
            if isinstance(found, Iterator):
                list(found)
        except KubeProxyError:
            continue


def nf_tables(data: bytes) -> None:
    """Tables, chains, rules, sets and elements."""
    kinds = (0xA00, 0xA03, 0xA06, 0xA09, 0xA0C, 0xA12)
    answer = _answer(data, kinds)
    _each(
        lambda: _table(answer).header(),
        lambda: _table(answer).rules(),
        lambda: _table(answer).rules("c"),
        lambda: _table(answer).chains(),
        lambda: _table(answer).sets(),
        lambda: _table(answer).contents(),
        lambda: _table(answer).all_elements("s"),
        lambda: listed_chains(_link(answer)),
        lambda: _table(answer).one_pass("s"),
        lambda: _table(answer).look_up("s", [bytes(8)]),
        lambda: _table(answer).element_counts("s", [bytes(8)]),
        lambda: _table(answer).counter_packets(),
        lambda: fetch.AnswerReader().read(_at_once(answer), [bytes(8)] * 2, {}, "s"),
    )


def _table(answer: bytes) -> TableReader:
    return TableReader(V4, "kube-proxy", _link(answer))


def _at_once(answer: bytes) -> fetch.Answers:
    """Return the same answer twice, as if received with hundreds of others."""
    one = answer[: fetch._ROOM].ljust(fetch._ROOM, b"\0")
    return fetch.Answers(one * 2, fetch._KERNEL * 2, 2)


def nf_tables_announced(data: bytes) -> None:
    """Announced changes of nf_tables, and announced traces of packets."""
    kinds = (0xA00, 0xA02, 0xA03, 0xA05, 0xA06, 0xA08, 0xA0F, 0xA11)
    answer = _answer(data, kinds)
    chains = ChangeMonitor(_announced(answer), 1, Interest(b"KUBE"))
    table = ChangeMonitor(_announced(answer), 1, Interest(b"kube-proxy\0", "kube-proxy"))
    traces = trace.Traces(_announcing(answer), "traces")
    _each(
        lambda: chains.take(2, lambda: chains._counted),
        lambda: table.reset(2, lambda: table._counted),
        lambda: table.changes(2, lambda: table._counted),
        lambda: traces.steps(time.monotonic() + 1e9),
    )


def _announced(answer: bytes) -> Announcements:
    return Announcements(Talker(answer).say(), "x")  # type: ignore[arg-type]


def _announcing(answer: bytes) -> Any:
    class Once(Talker):
        def recv(self, _: int) -> bytes:
            if not self._queue:
                raise TimeoutError
            return self._queue.pop(0)

    return Once(answer).say()


def connections(data: bytes) -> None:
    """Connection tracking: entries, events, counts."""
    answer = _answer(data, (0x100, 0x102, 0x104, 0x105))
    _each(
        lambda: tracked.entries(_link(answer), 2),
        lambda: tracked.entries(_link(answer), 10),
        lambda: tracking_counts.level(_link(answer)),
        lambda: tracking_counts.refusals(_link(answer)),
        lambda: _flows(2, answer),
        lambda: _flows(10, answer),
        lambda: tracked.Events(_announcing(answer), "x").events(time.monotonic() + 1e9),
    )


def _flows(family: int, answer: bytes) -> None:
    for buffer in _link(answer).dump_all(0x101, b"", "flows"):
        for ends in tracked.LAYOUTS[family].entries(buffer, b"\x11"):
            if ends is not None:
                udp_flows._identity(buffer[ends.start : ends.end])


def routes(data: bytes) -> None:
    """Local addresses, and announcements of their changes."""
    answer = _answer(data, (20, 21))
    monitor = route.AddressMonitor(Talker(answer).say(), "x")  # type: ignore[arg-type]
    _each(monitor.drain, *(lambda family=family: _addresses(answer, family) for family in (2, 10)))


def _addresses(answer: bytes, family: int) -> None:
    route.listed(family, _link(answer).dump_all(22, b"", "addresses"), {1: "lo"})


def ipvs(data: bytes) -> None:
    """Virtual servers and real servers."""
    answer = _answer(data, (IPVS,))
    _each(
        lambda: Ipvs(_link(answer), IPVS).servers(),
        lambda: Ipvs(_link(answer), IPVS).destinations(server_key(bytes(4), 6, 80)),
        lambda: family_id(_link(_answer(data, (16,))), "IPVS"),
    )


def ipset(data: bytes) -> None:
    """IP sets: names, headers, entries and types."""
    answer = _answer(data, (0x607, 0x60D))
    _each(
        lambda: _sets(answer).counts(),
        lambda: _sets(answer).entries("x"),
        lambda: _sets(answer)._revision(_KIND),
    )


class ToldSets(Told, Ipsets):
    """Return IP sets whose socket is connected to a Talker."""


def _sets(answer: bytes) -> ToldSets:
    return ToldSets(0, Talker(answer))  # type: ignore[arg-type]


_KIND: Final = SetKind("hash:ip", socket.AF_INET)


def iptables_save(data: bytes) -> None:
    """Output of iptables-save, most of which other programs determine."""
    text = data.decode(errors="surrogateescape")
    for table in xtables._parse(text):
        for rule in table.rules:
            xtables.chain_of(rule)
            xtables.target_of(rule)
            owner_of(rule)
    for _, rules in by_chain(text.splitlines(keepends=True)):
        for rule in rules or ():
            xtables.target_of(rule.strip())


_folder: list[tempfile.TemporaryDirectory[str]] = []


def proc(data: bytes) -> None:
    """Files of /proc: sockets, modules, command lines, limits. All files have the same text."""
    if not _folder:
        _folder.append(_make_proc())
    root = Path(_folder[0].name)
    for name in ("net/tcp", "net/tcp6", "modules", "7/cmdline", "7/limits", "7/comm"):
        (root / name).write_bytes(data)
    holder(80, "kube-proxy", root)
    proxies(root)
    descriptors(7, root)
    present(["ip_vs"], ModuleFiles(root / "release", root / "modules", root, root, root))


def _make_proc() -> tempfile.TemporaryDirectory[str]:
    made = tempfile.TemporaryDirectory(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    root = Path(made.name)
    for name in ("net", "7/fd", "7/net", "7/ns", "self/ns"):
        (root / name).mkdir(parents=True)
    for name in ("7/ns/net", "self/ns/net"):
        (root / name).touch()
    (root / "release").write_text("6.18.0\n")
    return made
