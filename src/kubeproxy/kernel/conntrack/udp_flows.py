"""Connection tracking over ctnetlink: read the UDP flows of a family, decide which are stale, delete them.

UDP has no end of a connection, so a tracked flow keeps sending a client to an endpoint that is gone. `stale_flows` is
pure. TCP and SCTP are never read or touched. Source: kube-proxy's conntrack reconciler (since v1.32), issues 139628 and
141371; ctnetlink as in net/netfilter/nf_conntrack_netlink.c of Linux 6.18.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Literal, NamedTuple, Self

from msgspec import Struct

from kubeproxy.errors import ApplyError, KubeProxyError
from kubeproxy.kernel.conntrack.counts import level
from kubeproxy.kernel.conntrack.walks import USUAL_BUCKETS, Table
from kubeproxy.kernel.netlink.protocol import (
    ATTRIBUTE,
    HEADER,
    NETLINK_NETFILTER,
    NLA_F_NESTED,
    NLMSG_DONE,
    Netlink,
    NetlinkError,
    attribute,
    attributes,
    nested,
)
from kubeproxy.kernel.proc.sysctl import read_sysctl

FamilyNumber = Literal[2, 10]  # AF_INET, AF_INET6 on Linux

Endpoints = frozenset[bytes]
"""Serving endpoints, each as its packed address followed by its port in two bytes, big endian."""

_SUBSYSTEM: Final = 1 << 8  # NFNL_SUBSYS_CTNETLINK
_GET: Final = _SUBSYSTEM | 1  # IPCTNL_MSG_CT_GET
_DELETE: Final = _SUBSYSTEM | 2  # IPCTNL_MSG_CT_DELETE

_CTA_TUPLE_ORIG: Final = 1
_CTA_TUPLE_REPLY: Final = 2
_CTA_ID: Final = 12
_CTA_ZONE: Final = 18
_CTA_FILTER: Final = 25

_CTA_TUPLE_IP: Final = 1
_CTA_IP_V4_SRC: Final = 1
_CTA_IP_V4_DST: Final = 2
_CTA_TUPLE_PROTO: Final = 2
_CTA_PROTO_NUM: Final = 1
_CTA_PROTO_SRC_PORT: Final = 2
_CTA_PROTO_DST_PORT: Final = 3

# CTA_FILTER_ORIG_FLAGS, CTA_FILTER_REPLY_FLAGS and the fields of the tuples that they make the kernel compare
# (Linux >= 5.8).
_FILTER_ORIG_FLAGS: Final = 1
_FILTER_REPLY_FLAGS: Final = 2
_U32: Final = struct.Struct("=I")
_COMPARE_SOURCE: Final = 1 << 0
_COMPARE_DESTINATION: Final = 1 << 1
_COMPARE_PROTOCOL: Final = 1 << 3
_COMPARE_SOURCE_PORT: Final = 1 << 4
_COMPARE_DESTINATION_PORT: Final = 1 << 5

_BUCKETS: Final = "net/netfilter/nf_conntrack_buckets"


class Flow(Struct, frozen=True, gc=False):
    """One tracked UDP flow. Addresses are packed, ports are numbers.

    `entry` holds all its attributes as the kernel sent them: tuple, zone and id name exactly this entry when deleting.
    """

    family: FamilyNumber
    source: bytes
    source_port: int
    destination: bytes
    destination_port: int
    reply_source: bytes
    reply_source_port: int
    entry: bytes


class Translation(NamedTuple):
    """Flows to one destination (packed address and port) whose replies come from one endpoint."""

    destination: bytes
    port: int
    endpoint: bytes


def stale_flows(
    flows: Iterable[Flow],
    services: Mapping[tuple[bytes, int], Endpoints],
    nodeports: Mapping[int, Endpoints],
    node_addresses: Collection[bytes],
) -> list[Flow]:
    """Return the flows to a UDP frontend whose replies come from no serving endpoint of it.

    `services` has the cluster, external and load balancer frontends by (packed address, port), `nodeports` the ports
    that count on any of `node_addresses`. A Service that is gone, or has no endpoints, is given with an empty set: all
    its flows are stale (kube-proxy skips both, which leaves clients in a black hole). A flow that was never translated
    answers from the frontend's own address, so it is stale as well. Flows to any other destination are left alone.
    """
    stale = []
    for flow in flows:
        endpoints = services.get((flow.destination, flow.destination_port))
        if endpoints is None:
            endpoints = nodeports.get(flow.destination_port)
            if endpoints is None or flow.destination not in node_addresses:
                continue
        if flow.reply_source + flow.reply_source_port.to_bytes(2) not in endpoints:
            stale.append(flow)
    return stale


class Conntrack:
    """The connection tracking table of the caller's network namespace. Blocking calls: a dump takes milliseconds.

    A context manager; opened by the first call. It keeps its socket: the kernel settles pending nf_tables work whenever
    a netfilter socket is closed, which makes the next transaction of anybody wait for 10 to 30 ms (nft_rcv_nl_event).
    """

    def __init__(self) -> None:
        self._filters = True
        self._deletes = True
        self._netlink: Netlink | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket; it is opened again when needed."""
        if self._netlink is not None:
            self._netlink.close()
            self._netlink = None

    @contextmanager
    def _socket(self) -> Iterator[Netlink]:
        """Lend the socket; after a failure in between, what it still holds goes with it."""
        if self._netlink is None:
            self._netlink = Netlink.open(NETLINK_NETFILTER)
        try:
            yield self._netlink
        except BaseException:
            self.close()
            raise

    def udp_flows(
        self,
        family: FamilyNumber,
        frontends: Collection[tuple[bytes, int]] | None = None,
        ports: Collection[int] = (),
    ) -> Iterator[Flow]:
        """Yield the UDP flows whose original destination is one of `frontends`, or has one of `ports`; None means all.

        Raises NetlinkError when the kernel refuses.
        """
        questions = [_only(family)]
        if frontends is not None and self._filters:
            table = self._table()
            if not table.entries:
                return  # the table is one for all namespaces, and is walked for nothing else
            filtered = _questions(family, frontends, ports)
            if table.dumps(len(filtered)) < table.everything():
                questions = filtered
        for question in questions:
            yield from self._dump(family, question, frontends, ports)

    def delete(self, flows: Iterable[Flow]) -> int:
        """Delete exactly these entries; return how many were there. Raises ApplyError when the kernel refuses any."""
        deleted = 0
        by_family: dict[FamilyNumber, list[bytes]] = {}
        for flow in flows:
            by_family.setdefault(flow.family, []).append(_nfgenmsg(flow.family) + _identity(flow.entry))
        for payloads in by_family.values():
            with self._socket() as netlink:
                results = netlink.requests(_DELETE, payloads, "the deletion of stale UDP flows")
            refused = [result for result in results if result[0] not in {0, errno.ENOENT}]
            if refused:
                raise NetlinkError(
                    refused[0][0], f"cannot delete {len(refused)} of {len(results)} stale UDP flows", refused[0][1]
                )
            deleted += sum(code == 0 for code, _ in results)
        return deleted

    def forget(self, family: FamilyNumber, translations: Collection[Translation], frontends: int) -> int | None:
        """Delete the flows of translations of so many frontends; return how many.

        None when the kernel cannot, or when `clean` finds them for less. The kernel does not say how many it deleted:
        they are what its count of entries fell by meanwhile, and what began in the same fraction of a millisecond
        counts against them.
        """
        # The kernel compares IPv6 addresses the wrong way round (see _questions): it would delete all the others.
        if family != 2 or not self._deletes:
            return None
        if not translations:
            return 0
        table = self._table()
        if table.deletions(len(translations)) > min(table.dumps(frontends), table.everything()):
            return None
        payloads = [_exactly(translation) for translation in translations]
        with self._socket() as netlink:
            results = netlink.requests(_DELETE, payloads, "the deletion of stale UDP flows")
            deleted = max(0, table.entries - level(netlink).entries)
        for code, text in results:
            if code in {errno.EINVAL, errno.EOPNOTSUPP}:  # older kernels: a deletion names one whole tuple
                self._deletes = False
                return None
            if code not in {0, errno.ENOENT}:
                raise NetlinkError(code, "cannot delete stale UDP flows", text)
        return deleted

    def clean(
        self,
        family: FamilyNumber,
        services: Mapping[tuple[bytes, int], Endpoints],
        nodeports: Mapping[int, Endpoints],
        node_addresses: Collection[bytes],
    ) -> int:
        """Delete the flows that `stale_flows` finds; return how many. Raises ApplyError when the kernel refuses.

        The mappings may change meanwhile: what serves once all flows were read counts, so that none goes that began by
        a change that came then.
        """
        if not services and not nodeports:
            return 0
        flows = self.udp_flows(family, services.keys(), nodeports.keys())
        for _ in range(2):
            flows = iter(stale_flows(flows, services, nodeports, node_addresses))
        return self.delete(flows)

    def _table(self) -> Table:
        """Return how large the table is. Raises ApplyError."""
        with self._socket() as netlink:
            entries = level(netlink).entries
        try:
            buckets = int(read_sysctl(_BUCKETS))
        except (KubeProxyError, ValueError):
            buckets = USUAL_BUCKETS
        return Table(buckets, entries)

    def _dump(
        self,
        family: FamilyNumber,
        payload: bytes,
        frontends: Collection[tuple[bytes, int]] | None,
        ports: Collection[int],
    ) -> Iterator[Flow]:
        layout = _LAYOUTS[family]
        with self._socket() as netlink:
            try:
                for data in netlink.dump(_GET, payload, "UDP flows from connection tracking"):
                    for flow in layout.flows(data, frontends, ports):
                        if flow is None:
                            self._filters = False  # an older kernel passes over CTA_FILTER and sends everything
                        else:
                            yield flow
            except NetlinkError as error:
                if error.code in {errno.EINVAL, errno.EOPNOTSUPP}:
                    raise ApplyError(f"{error}: is the kernel module nf_conntrack_netlink there?") from error
                raise


class _Layout:
    """Where a flow's fields are in the messages that kernels really send, to read them without walking attributes.

    A message with another layout is read attribute by attribute.
    """

    def __init__(self, family: FamilyNumber) -> None:
        size = 4 if family == 2 else 16
        first = 1 if family == 2 else 3  # CTA_IP_V4_SRC or CTA_IP_V6_SRC
        ip = 4 + 2 * (4 + size)
        self.family = family
        self.size = size
        self.length = 4 + ip + 28
        self.addresses = ATTRIBUTE.pack(ip, _CTA_TUPLE_IP | NLA_F_NESTED) + ATTRIBUTE.pack(4 + size, first)
        self.udp = (
            ATTRIBUTE.pack(28, _CTA_TUPLE_PROTO | NLA_F_NESTED)
            + attribute(_CTA_PROTO_NUM, bytes([socket.IPPROTO_UDP]))
            + ATTRIBUTE.pack(6, _CTA_PROTO_SRC_PORT)
        )
        self.original = ATTRIBUTE.pack(self.length, _CTA_TUPLE_ORIG | NLA_F_NESTED) + self.addresses
        self.reply = ATTRIBUTE.pack(self.length, _CTA_TUPLE_REPLY | NLA_F_NESTED) + self.addresses

    def flows(
        self, data: bytes, frontends: Collection[tuple[bytes, int]] | None, ports: Collection[int]
    ) -> Iterator[Flow | None]:
        """Yield the wanted flows of one received buffer, and None for an entry of another protocol.

        One long function with everything in local names: it runs 100,000 times for each sync of a busy node.
        """
        unpack, number, family, size, udp = HEADER.unpack_from, int.from_bytes, self.family, self.size, self.udp
        original, reply = self.original, self.reply
        source = HEADER.size + 4 + len(original)
        destination = source + size + 4
        after = destination + size
        source_port = after + len(udp)
        destination_port = source_port + 8
        answer = destination_port + 4
        answer_source = answer + len(reply)
        answer_port = answer + (source_port - HEADER.size - 4)
        following, end = 0, len(data) - HEADER.size
        while following <= end:
            at = following
            length, kind, _, _, _ = unpack(data, at)
            following += (length + 3) & ~3
            if kind == NLMSG_DONE:
                return
            usual = (
                data.startswith(original, at + HEADER.size + 4)
                and data.startswith(udp, at + after)
                and data.startswith(reply, at + answer)
            )
            if not usual:
                flow = _flow(family, data, at + HEADER.size + 4, at + length)
                if flow is None or frontends is None or _wanted(flow, frontends, ports):
                    yield flow
                continue
            target = data[at + destination : at + after]
            port = number(data[at + destination_port : at + destination_port + 2])
            if frontends is None or port in ports or (target, port) in frontends:
                yield Flow(
                    family,
                    data[at + source : at + source + size],
                    number(data[at + source_port : at + source_port + 2]),
                    target,
                    port,
                    data[at + answer_source : at + answer_source + size],
                    number(data[at + answer_port : at + answer_port + 2]),
                    data[at + HEADER.size + 4 : at + length],
                )


_LAYOUTS: Final[Mapping[FamilyNumber, _Layout]] = {2: _Layout(2), 10: _Layout(10)}


def _nfgenmsg(family: FamilyNumber) -> bytes:
    return bytes([family, 0, 0, 0])


def _questions(family: FamilyNumber, frontends: Collection[tuple[bytes, int]], ports: Collection[int]) -> list[bytes]:
    """Return the dump requests that find each flow to these destinations once."""
    whole = set(ports)
    if family == 10:
        # Linux up to 6.18 at least compares IPv6 addresses the wrong way round (ctnetlink_filter_match_tuple).
        whole.update(port for _, port in frontends)
    by_address = [_only(family, port, address) for address, port in frontends if port not in whole]
    return [_only(family, port) for port in whole] + by_address


def _only(family: FamilyNumber, port: int | None = None, address: bytes | None = None) -> bytes:
    """Pack a dump request for UDP flows, all of them or those to an original port, and an IPv4 address."""
    compare = _COMPARE_PROTOCOL
    fields = [attribute(_CTA_PROTO_NUM, bytes([socket.IPPROTO_UDP]))]
    parts = []
    if port is not None:
        compare |= _COMPARE_DESTINATION_PORT
        fields.append(attribute(_CTA_PROTO_DST_PORT, port.to_bytes(2)))
    if address is not None:
        compare |= _COMPARE_DESTINATION
        parts.append(nested(_CTA_TUPLE_IP, attribute(_CTA_IP_V4_DST, address)))
    parts.append(nested(_CTA_TUPLE_PROTO, *fields))
    flags = attribute(_FILTER_ORIG_FLAGS, _U32.pack(compare))
    return _nfgenmsg(family) + nested(_CTA_TUPLE_ORIG, *parts) + nested(_CTA_FILTER, flags)


def _exactly(wanted: Translation) -> bytes:
    """Pack a deletion of all IPv4 UDP flows of a translation."""
    protocol = attribute(_CTA_PROTO_NUM, bytes([socket.IPPROTO_UDP]))
    original = nested(
        _CTA_TUPLE_ORIG,
        nested(_CTA_TUPLE_IP, attribute(_CTA_IP_V4_DST, wanted.destination)),
        nested(_CTA_TUPLE_PROTO, protocol, attribute(_CTA_PROTO_DST_PORT, wanted.port.to_bytes(2))),
    )
    reply = nested(
        _CTA_TUPLE_REPLY,
        nested(_CTA_TUPLE_IP, attribute(_CTA_IP_V4_SRC, wanted.endpoint[:-2])),
        nested(_CTA_TUPLE_PROTO, protocol, attribute(_CTA_PROTO_SRC_PORT, wanted.endpoint[-2:])),
    )
    flags = (
        attribute(_FILTER_ORIG_FLAGS, _U32.pack(_COMPARE_DESTINATION | _COMPARE_PROTOCOL | _COMPARE_DESTINATION_PORT)),
        attribute(_FILTER_REPLY_FLAGS, _U32.pack(_COMPARE_SOURCE | _COMPARE_PROTOCOL | _COMPARE_SOURCE_PORT)),
    )
    return _nfgenmsg(2) + original + reply + nested(_CTA_FILTER, *flags)


def _wanted(flow: Flow, frontends: Collection[tuple[bytes, int]], ports: Collection[int]) -> bool:
    return flow.destination_port in ports or (flow.destination, flow.destination_port) in frontends


def _flow(family: FamilyNumber, data: bytes, start: int, end: int) -> Flow | None:
    """Read one entry attribute by attribute; None when it is no UDP flow."""
    original = reply = None
    for kind, begin, stop in attributes(data, start, end):
        if kind == _CTA_TUPLE_ORIG:
            original = _tuple(data, begin, stop)
        elif kind == _CTA_TUPLE_REPLY:
            reply = _tuple(data, begin, stop)
    if original is None or reply is None or original[4] != socket.IPPROTO_UDP:
        return None
    return Flow(family, *original[:4], *reply[:2], data[start:end])


def _tuple(data: bytes, start: int, end: int) -> tuple[bytes, int, bytes, int, int]:
    """Read a tuple: (source, source port, destination, destination port, protocol)."""
    addresses = [b"", b""]
    numbers = {_CTA_PROTO_NUM: 0, _CTA_PROTO_SRC_PORT: 0, _CTA_PROTO_DST_PORT: 0}
    for kind, begin, stop in attributes(data, start, end):
        if kind == _CTA_TUPLE_IP:
            for which, first, last in attributes(data, begin, stop):
                addresses[(which - 1) & 1] = data[first:last]  # sources have odd numbers: 1 and 3
        elif kind == _CTA_TUPLE_PROTO:
            for which, first, last in attributes(data, begin, stop):
                numbers[which] = int.from_bytes(data[first:last])
    source_port, destination_port = numbers[_CTA_PROTO_SRC_PORT], numbers[_CTA_PROTO_DST_PORT]
    return addresses[0], source_port, addresses[1], destination_port, numbers[_CTA_PROTO_NUM]


def _identity(entry: bytes) -> bytes:
    """Return the attributes that name an entry to the kernel: without the id, a newer flow of that tuple would go."""
    return b"".join(
        entry[begin - 4 : (stop + 3) & ~3]
        for kind, begin, stop in attributes(entry, 0, len(entry))
        if kind in {_CTA_TUPLE_ORIG, _CTA_ZONE, _CTA_ID}
    )
