"""Traces packets through nf_tables: installs rules that mark the packets to trace, and reads the announced steps. The
marking rules are in a table that a socket of this process owns (flag owner, Linux 5.12), so the kernel removes the
table when the socket is closed, even if the process is killed. Sources: net/netfilter/nf_tables_trace.c,
nft_rcv_nl_event of nf_tables_api.c and include/uapi/linux/netfilter/nf_tables.h of Linux 6.18."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import Final, NamedTuple, Self

from kubeproxy.errors import Unsupported
from kubeproxy.kernel.netlink.announcements import Announcements
from kubeproxy.kernel.netlink.protocol import Closing, Netlink, NetlinkError, messages, parts, understood
from kubeproxy.kernel.nftables import compiling, nfta
from kubeproxy.kernel.nftables import expressions as x
from kubeproxy.kernel.nftables.messages import appended, chain_message, table_message
from kubeproxy.kernel.nftables.nfnetlink import GENERIC, SUBSYSTEM, Transactions
from kubeproxy.kernel.nftables.tables import HOOKS, Hook, listed_chains
from kubeproxy.model.addresses import unpack

_TRACE: Final = SUBSYSTEM << 8 | 17
_GROUP: Final = 9  # NFNLGRP_NFTRACE
_RECEIVE_BUFFER: Final = 4 << 20
_OWNER: Final = 2  # NFT_TABLE_F_OWNER

PREROUTING, INPUT, FORWARD, OUTPUT, POSTROUTING = range(5)

REQUESTS: Final = "requests-"
ANSWERS: Final = "answers-"
"""Prefixes of the names of the chains that mark packets."""
_BEFORE_ALL: Final = -350  # before the priority of raw, -300
_TRACKED: Final = -190  # after the priority of connection tracking, -200
_TCP: Final = 6

# Only the first packet of a connection passes all rules, so few of the later packets of TCP are traced.
_FIRST_PACKETS: Final = 20  # the maximum number of packets per second that a rule marks
_OTHER_PACKETS: Final = 2

_META_NFTRACE: Final = 12  # enum nft_meta_keys
_REGISTER: Final = 1


class MarkedFlow(NamedTuple):
    """Selects the packets to trace: from a packed address (b'' for any) to an address, protocol and port. `hooks` are
    the hooks at which the rules mark the packets: PREROUTING, OUTPUT. `clients` are packed addresses: only replies in
    connections of these clients are marked; if `clients` is empty, all replies are marked."""

    source: bytes
    destination: bytes
    protocol: int
    port: int
    hooks: tuple[int, ...]
    clients: tuple[bytes, ...] = ()


_FIRST_OF_TCP: Final = compiling.rule("tcp flags & 0x12 == 0x02", "ip")


def _traced(per_second: int) -> x.Rule:
    return (x.Limit(per_second, 1, per_second), x.Immediate(_REGISTER, b"\1"), x.Meta(_META_NFTRACE, sreg=_REGISTER))


def _packets_of(flow: MarkedFlow, ip: str) -> tuple[x.Rule, list[x.Rule]]:
    """Return a rule that matches a flow's requests, and rules that match its replies, one per client or one for all."""
    to, source = f"{ip} daddr {unpack(flow.destination)}", f"{ip} saddr {unpack(flow.source)}" if flow.source else ""
    original = f"ct original protocol {flow.protocol} ct original {to} ct original proto-dst {flow.port}"
    clients = [f"ct original {ip} saddr {unpack(one)}" for one in flow.clients]
    return (
        compiling.rule(f"meta l4proto {flow.protocol} {source} {to} th dport {flow.port}", ip),
        [compiling.rule(f"ct direction reply {original} {client}", ip) for client in clients or [""]],
    )


def marking(flow: MarkedFlow, table: str) -> list[bytes]:
    """Return the messages that create the table with the rules that mark a flow's packets in both directions."""
    family, ip = (2, "ip") if len(flow.destination) == 4 else (10, "ip6")
    requests, answers = _packets_of(flow, ip)

    def chain(name: str, hook: int, priority: int) -> bytes:
        return chain_message(family, table, name, Hook("filter", hook, priority))

    def rule(name: str, *parts: x.Expression) -> Iterator[bytes]:
        return appended(family, table, name, parts)

    made = [table_message(family, table, flags=_OWNER)]
    for hook in flow.hooks:
        name = f"{REQUESTS}{HOOKS[hook]}"
        made.append(chain(name, hook, _BEFORE_ALL))
        if flow.protocol == _TCP:
            made += rule(name, *requests, *_FIRST_OF_TCP, *_traced(_FIRST_PACKETS))
        made += rule(name, *requests, *_traced(_OTHER_PACKETS if flow.protocol == _TCP else _FIRST_PACKETS))
    for hook in (PREROUTING, OUTPUT):
        name = f"{ANSWERS}{HOOKS[hook]}"
        made.append(chain(name, hook, _TRACKED))
        for answer in answers:
            made += rule(name, *answer, *_traced(_FIRST_PACKETS))
    return made


class Mark(Closing):
    """Marks the packets of a flow for tracing, until `close`."""

    def __init__(self, transactions: Transactions, table: str) -> None:
        self._transactions = transactions
        self.table = table

    @classmethod
    def open(cls, flow: MarkedFlow) -> Self:
        """Start to mark packets in the caller's network namespace. Raises Unsupported if the kernel cannot trace."""
        table = f"kube-proxy-trace-{os.getpid()}"
        transactions = Transactions.open()
        try:
            transactions.commit(marking(flow, table))
        except NetlinkError as error:
            transactions.close()
            if error.code in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOENT, errno.EPROTONOSUPPORT}:
                raise Unsupported(
                    f"this kernel cannot trace packets ({error}): tracing needs Linux 5.12, nf_tables and nft_limit"
                ) from error
            raise
        return cls(transactions, table)

    def close(self) -> None:
        """Close the socket that owns the table, so that the kernel removes the table."""
        self._transactions.close()


class Headers(NamedTuple):
    """The headers of a packet at a hook: packed addresses, ports (0 for none), indices of interfaces (0 for none).
    `flags` are TCP's flags, or ICMP's type and code in two bytes."""

    source: bytes
    source_port: int
    destination: bytes
    destination_port: int
    protocol: int
    flags: int
    came_by: int
    leaves_by: int


class Step(NamedTuple):
    """A step of a packet: a match of a rule ('rule'), the end of a base chain ('policy'), or of another chain
    ('return'). `packet` is the packet's number in all its steps. `verdict` is 0 for drop, 1 for accept, 2 for stolen, 3
    for queue; below 0, the packet continues. `leads_to` is the chain of a jump or goto. A base chain's first step has
    `headers`."""

    packet: int
    family: int
    table: str
    chain: str
    handle: int
    kind: str
    verdict: int
    leads_to: str = ""
    headers: Headers | None = None


_KINDS: Final = {1: "policy", 2: "return", 3: "rule"}


class Traces(Announcements):
    """The traces of a network namespace, including traces that other programs requested."""

    @classmethod
    def listen(cls) -> Self:
        """Receive traces from now on, in the caller's network namespace. Raises NetlinkError."""
        return cls.open("traces", (_GROUP,), _RECEIVE_BUFFER)

    def steps(self, end: float) -> Iterator[Step]:
        """Yield the steps of packets until the time `end` of time.monotonic(). Raises NetlinkError."""
        with understood("traced packets"):
            for data in self.until(end):
                for at in messages(data):
                    if at.kind == _TRACE:
                        yield read(data, at.start, at.end)


def read(data: bytes, start: int, end: int) -> Step:
    """Parse the step in a message's payload."""
    found = parts(data, start + GENERIC.size, end)
    end_of_rule = parts(found.get(nfta.TRACE_VERDICT, b""))
    verdict = _signed(end_of_rule.get(nfta.VERDICT_CODE, b"\xff\xff\xff\xff"))
    kind = _KINDS.get(int.from_bytes(found.get(nfta.TRACE_TYPE, b"")), "rule")
    if kind == "policy":
        verdict = _signed(found.get(nfta.TRACE_POLICY, b"\0\0\0\1"))
    network = found.get(nfta.TRACE_NETWORK_HEADER, b"")
    return Step(
        int.from_bytes(found.get(nfta.TRACE_ID, b"")),
        data[start],
        _name(found.get(nfta.TRACE_TABLE, b"")),
        _name(found.get(nfta.TRACE_CHAIN, b"")),
        int.from_bytes(found.get(nfta.TRACE_RULE_HANDLE, b"")),
        kind,
        verdict,
        _name(end_of_rule.get(nfta.VERDICT_CHAIN, b"")),
        _headers(network, found.get(nfta.TRACE_TRANSPORT_HEADER, b""), found) if network else None,
    )


def _headers(network: bytes, transport: bytes, found: dict[int, bytes]) -> Headers | None:
    version = network[0] >> 4
    if version == 4 and len(network) >= 20:
        source, destination, protocol = network[12:16], network[16:20], network[9]
    elif version == 6 and len(network) >= 40:
        source, destination, protocol = network[8:24], network[24:40], network[6]
    else:
        return None
    ported = protocol in {6, 17, 132} and len(transport) >= 4
    return Headers(
        source,
        int.from_bytes(transport[0:2]) if ported else 0,
        destination,
        int.from_bytes(transport[2:4]) if ported else 0,
        protocol,
        transport[13] if protocol == _TCP and len(transport) > 13 else 0 if ported else int.from_bytes(transport[:2]),
        int.from_bytes(found.get(nfta.TRACE_IIF, b"")),
        int.from_bytes(found.get(nfta.TRACE_OIF, b"")),
    )


def _signed(data: bytes) -> int:
    return int.from_bytes(data, "big", signed=True)


def _name(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")


def base_chains(link: Netlink) -> dict[tuple[int, str, str], Hook]:
    """Return the hooks of all base chains, by family, table and name. Raises ApplyError."""
    return {(one.family, one.table, one.name): one.hook for one in listed_chains(link) if one.hook is not None}
