"""Stale UDP flows in connection tracking: their detection, and their deletion over ctnetlink. A UDP flow has no end, so
a tracked flow continues to translate a client's packets to a deleted endpoint. Entries of TCP and SCTP are never read
or deleted. Sources: kube-proxy's conntrack reconciler (since v1.32), issues 139628 and 141371;
net/netfilter/nf_conntrack_netlink.c of Linux 6.18."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from typing import Final, Literal, NamedTuple

from msgspec import Struct

from kubeproxy.errors import ApplyError, KubeProxyError
from kubeproxy.kernel.conntrack import tracked
from kubeproxy.kernel.conntrack.tracked import level
from kubeproxy.kernel.netlink.protocol import LastingLink, NetlinkError, attributes, netfilter_header
from kubeproxy.kernel.proc.sysctl import read_sysctl

FamilyNumber = Literal[2, 10]  # AF_INET, AF_INET6 on Linux

Endpoints = frozenset[bytes]
"""Serving endpoints, each as its packed address followed by its port in two bytes, big endian."""

_UDP: Final = socket.IPPROTO_UDP
_IPV4_TARGET: Final = 7
"""The size of an IPv4 target in bytes: address, protocol, port."""
_BUCKETS: Final = "net/netfilter/nf_conntrack_buckets"


USUAL_BUCKETS: Final = 262_144
"""The default number of hash buckets on machines with more than 4 GB of memory. Machines with more than 1 GB have a
quarter of this number."""

# The kernel has no index of entries by destination: each request reads the whole hash table. The costs, in nanoseconds,
# were measured on one machine (2 cores, Linux 6.18, 262,144 buckets); only their ratios matter. A dump locks each
# bucket, which takes 3.7 ms if the table is empty, and 4.2 ms with 10,000 entries. A deletion skips empty buckets,
# which takes 0.17 ms if the table is in the CPU's caches, else 1 ms. After each bucket with entries, a deletion lets
# waiting packets pass; with 10,000 entries, this takes 1.4 ms.
_DUMPED_BUCKET: Final = 14.0  # ns
_DUMPED_ENTRY: Final = 80.0
_DELETED_BUCKET: Final = 1.2
_DELETED_ENTRY: Final = 125.0
_TAKEN_ENTRY: Final = 1200.0
"""Half of the 2.4 us for sending and reading a UDP flow, because half of all entries are assumed to be UDP flows."""


class TrackingTable(NamedTuple):
    """The numbers of buckets and entries in the hash table; the methods estimate costs of requests in nanoseconds."""

    buckets: int
    entries: int

    def deletions(self, count: int) -> float:
        """Return the cost of `count` deletions with a filter."""
        return count * (self.buckets * _DELETED_BUCKET + self.entries * _DELETED_ENTRY)

    def dumps(self, count: int) -> float:
        """Return the cost of `count` dumps with a filter that few entries match."""
        return count * (self.buckets * _DUMPED_BUCKET + self.entries * _DUMPED_ENTRY)

    def everything(self) -> float:
        """Return the cost of dumping and reading all UDP flows."""
        return self.buckets * _DUMPED_BUCKET + self.entries * _TAKEN_ENTRY


class UdpFlow(Struct, frozen=True, gc=False):
    """A tracked UDP flow, with target, client and server as in Tracked. `entry` contains all packed attributes of the
    flow; tuple, zone and id identify the flow for a deletion."""

    target: bytes
    client: bytes
    server: bytes
    entry: bytes


class Translation(NamedTuple):
    """Selects the flows to `destination` with replies from `endpoint`; each field is a packed address and a port."""

    destination: bytes
    endpoint: bytes


def stale_flows(
    flows: Iterable[UdpFlow],
    services: Mapping[bytes, Container[bytes]],
    nodeports: Mapping[bytes, Container[bytes]],
    node_addresses: Collection[bytes],
    former: Callable[[bytes], bool] | None = None,
) -> list[UdpFlow]:
    """Return the flows to UDP frontends that get their replies from an address that is no serving endpoint of the
    frontend.

    `services` maps the target of each cluster, external and load balancer frontend to the serving endpoints;
    `nodeports` maps packed ports, which are frontends on each of `node_addresses`. A Service that is deleted or has no
    endpoints has an empty set, so all its flows are stale. (The Go kube-proxy skips such Services, so clients lose
    packets.) The replies of a flow without translation come from the frontend's own address, so the flow is stale as
    well. Flows to other destinations are stale if they are translated to a `former` endpoint."""
    stale = []
    for flow in flows:
        endpoints = services.get(flow.target)
        if endpoints is None:
            endpoints = nodeports.get(flow.target[-2:])
            if endpoints is None or flow.target[:-3] not in node_addresses:
                if former and former(flow.server) and flow.server != flow.target[:-3] + flow.target[-2:]:
                    stale.append(flow)
                continue
        if flow.server not in endpoints:
            stale.append(flow)
    return stale


class Conntrack(LastingLink):
    """The connection tracking table of the caller's network namespace. Calls block: a dump takes milliseconds."""

    def __init__(self) -> None:
        self._filters = True
        self._deletes = True

    def udp_flows(
        self, family: FamilyNumber, frontends: Collection[bytes] | None = None, ports: Collection[bytes] = ()
    ) -> Iterator[UdpFlow]:
        """Yield the UDP flows with a target in `frontends`, or a packed target port in `ports`. Raises NetlinkError.
        `frontends` None selects all flows."""
        questions = [_only(family)]
        if frontends is not None and self._filters:
            table = self._table()
            if not table.entries:
                return  # no flow exists here, but a request would make the kernel search the flows of all namespaces
            least = len({target[-2:] for target in frontends})  # at least one request per port; a range has many ports
            filtered = _questions(family, frontends, ports) if table.dumps(least) < table.everything() else questions
            if table.dumps(len(filtered)) < table.everything():
                questions = filtered
        for question in questions:
            yield from self._dump(family, question, frontends, ports)

    def delete(self, flows: Iterable[UdpFlow]) -> int:
        """Delete exactly these entries; return the number of deletions. Raises ApplyError after a refusal."""
        deleted = 0
        by_family: dict[FamilyNumber, list[bytes]] = {}
        for flow in flows:
            family: FamilyNumber = 2 if len(flow.target) == _IPV4_TARGET else 10
            by_family.setdefault(family, []).append(netfilter_header(family) + _identity(flow.entry))
        for payloads in by_family.values():
            with self.link() as link:
                deleted += tracked.delete(link, payloads, "stale UDP flows")
        return deleted

    def forget(self, family: FamilyNumber, translations: Collection[Translation], frontends: int) -> int | None:
        """Delete the flows of these translations; return the number of deleted flows. Return None if the kernel cannot
        delete by translation, or if `clean` costs less. The kernel does not report how many entries it deleted. The
        result is the decrease of the number of entries, which is too small if flows begin in the meantime."""
        # With an IPv6 address the kernel would delete all other flows, because its comparison is inverted (see
        # `_questions`).
        if family != 2 or not self._deletes:
            return None
        if not translations:
            return 0
        table = self._table()
        if table.deletions(len(translations)) > min(table.dumps(frontends), table.everything()):
            return None
        ends = [[(end[:-2], end[-2:]) for end in translation] for translation in translations]
        payloads = [netfilter_header(2) + tracked.selection(_UDP, *each) for each in ends]
        with self.link() as link:
            results = link.requests(tracked.DELETE, payloads, "the deletion of stale UDP flows")
            deleted = max(0, table.entries - level(link).entries)
        for code, text in results:
            if code in {errno.EINVAL, errno.EOPNOTSUPP}:  # this kernel deletes only by a complete tuple
                self._deletes = False
                return None
            if code not in {0, errno.ENOENT}:
                raise NetlinkError(code, "cannot delete stale UDP flows", text)
        return deleted

    def clean(
        self,
        family: FamilyNumber,
        services: Mapping[bytes, Container[bytes]],
        nodeports: Mapping[bytes, Container[bytes]],
        node_addresses: Collection[bytes],
        certain: Callable[[], bool] = lambda: True,
        former: Callable[[bytes], bool] | None = None,
    ) -> int | None:
        """Delete the stale flows (see stale_flows); return their number. Raises ApplyError when the kernel refuses. The
        serving endpoints may change while flows are read. After the read, the endpoints' newest state is used, so that
        no flow that has become valid is deleted. If `certain` returns False after the read, nothing is deleted, and the
        result is None."""
        if not services and not nodeports:
            return 0
        flows = self.udp_flows(family, services.keys() if former is None else None, nodeports.keys())
        stale = stale_flows(flows, services, nodeports, node_addresses, former)
        if stale and not certain():
            return None
        return self.delete(stale_flows(stale, services, nodeports, node_addresses, former))

    def _table(self) -> TrackingTable:
        with self.link() as link:
            entries = level(link).entries
        try:
            buckets = int(read_sysctl(_BUCKETS))
        except (KubeProxyError, ValueError):
            buckets = USUAL_BUCKETS
        return TrackingTable(buckets, entries)

    def _dump(
        self, family: FamilyNumber, payload: bytes, frontends: Collection[bytes] | None, ports: Collection[bytes]
    ) -> Iterator[UdpFlow]:
        read, udp = tracked.LAYOUTS[family].entries, bytes([_UDP])
        with self.link() as link:
            try:
                for data in link.dump(tracked.GET, payload, "UDP flows from connection tracking"):
                    for ends in read(data, udp, frontends, ports):
                        if ends is None:
                            self._filters = False  # a kernel before 5.8 ignores CTA_FILTER
                        else:
                            target, client, server, start, _, end, _ = ends
                            yield UdpFlow(target, client, server, data[start:end])
            except NetlinkError as error:
                if error.code in {errno.EINVAL, errno.EOPNOTSUPP}:
                    raise ApplyError(f"{error}: is the kernel module nf_conntrack_netlink loaded?") from error
                raise


def _questions(family: FamilyNumber, frontends: Collection[bytes], ports: Collection[bytes]) -> list[bytes]:
    """Return dump requests; together, their answers contain each flow to these destinations once."""
    whole = set(ports)
    if family == 10:
        # Linux, up to 6.18 at least, inverts the comparison of IPv6 addresses (ctnetlink_filter_match_tuple).
        whole.update(target[-2:] for target in frontends)
    by_address = [_only(family, target[-2:], target[:-3]) for target in frontends if target[-2:] not in whole]
    return [_only(family, port) for port in whole] + by_address


def _only(family: FamilyNumber, port: bytes = b"", address: bytes = b"") -> bytes:
    return netfilter_header(family) + tracked.selection(_UDP, (address, port))


def _identity(entry: bytes) -> bytes:
    """Return the attributes that identify an entry. If the id were missing, a newer flow would match, too."""
    return b"".join(
        entry[begin - 4 : (stop + 3) & ~3]
        for kind, begin, stop in attributes(entry, 0, len(entry))
        if kind in {tracked.TUPLE_ORIGINAL, tracked.ZONE, tracked.ID}
    )
