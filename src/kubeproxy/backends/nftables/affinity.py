"""Session affinity: rules that store and look up a client's endpoint; metrics of the number of stored clients."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Final

from kubeproxy.backends.mode import Room
from kubeproxy.backends.nftables import layout, port_ranges
from kubeproxy.backends.nftables.layout import CLIENTS, FIRST_ENDPOINT, POOLS_OF, TABLE, ChainName, Layout, SetId
from kubeproxy.backends.nftables.table import KernelTable
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.netlink.protocol import Netlink
from kubeproxy.kernel.nftables.elements import element_messages, plain_element, timed_element
from kubeproxy.kernel.nftables.nfnetlink import DELETE_ELEMENT, NEW_ELEMENT
from kubeproxy.kernel.nftables.reader import TableReader
from kubeproxy.kernel.nftables.tables import DYNAMIC, TIMEOUT, SetSpec
from kubeproxy.model.addresses import Family
from kubeproxy.model.maglev import SEED, slot_of
from kubeproxy.model.plan import Hashing, HashKey
from kubeproxy.registry import MetricRegistry

AFFINITY_TIMEOUT: Final = 3 * 3600 * 1000
"""Default timeout of a map of clients, in milliseconds. The rule that adds a client sets the Service's own timeout."""

AFFINITY_SHARE: Final = 1 << 16
"""Number of different client hashes in one pool. The Go kube-proxy has the same limit of clients for one endpoint."""

AFFINITY_CLIENTS: Final = 1 << 24
"""Capacity of the map of clients: 256 full pools. If the map is full, new clients are served without affinity."""

ENDPOINT_NUMBERS: Final = {
    Family.IPV4: f"{ipaddress.IPv4Address(FIRST_ENDPOINT)}/2",
    Family.IPV6: f"{ipaddress.IPv6Address(FIRST_ENDPOINT)}/98",
}
"""Numbers of endpoints and of pools are packed as addresses. These networks contain all numbers of endpoints, and no
number of a pool."""

_RESERVED: Final = 1024
_FOREVER: Final = 10 * 365 * 86_400 * 1000  # ms
_PICK: Final = "session-choose"
_GO: Final = "session-go"
"""Name of the chain that translates a packet to an endpoint. The packet carries the endpoint's number; the chain
returns if no endpoint has this number."""


def declaration(layout: Layout) -> SetSpec:
    """Return the declaration of the map of clients."""
    # The key is computed by jhash, but declared as numgen, which has the same type: nft 1.0.6 crashes when it lists
    # jhash.
    client, number = ("numgen random mod 2", f"{layout.ip} daddr"), (f"{layout.ip} daddr",)
    return SetSpec(CLIENTS, client, number, TIMEOUT | DYNAMIC, AFFINITY_CLIENTS, AFFINITY_TIMEOUT)


def rules(layout: Layout, choose: str) -> dict[str, tuple[str, ...]]:
    """Return the chains of session affinity that are independent of the timeout; `choose` is the chain that picks an
    endpoint. A rule of nft can store a value from a map only in a field of the packet. Therefore the packet carries the
    pool's number in place of its source address, and the endpoint's number in place of its destination address."""
    ip = layout.ip
    original = f"{ip} daddr set ct original {ip} daddr"
    own = f"{ip} daddr . ct original {ip} daddr . th dport @{SetId.SESSION_OWN}"
    to = f"{ip} daddr . meta l4proto map @{SetId.SESSION_ENDPOINTS}"
    return {
        _PICK: (f"th dport set {ip} daddr map @{SetId.SESSION_CLASSES}", f"goto {choose}"),
        _GO: (
            f"{ip} saddr set ct original {ip} saddr",
            f"{own} goto {_GO}-untranslated",
            f"meta l4proto @transports dnat {ip} addr . port to {to}",
            original,
        ),
        # If the endpoint is the original destination, the kernel's translation does not change the packet, so the
        # first rule restores the packet's destination address.
        f"{_GO}-untranslated": (original, f"dnat to {ip} daddr"),
    }


def client_rules(layout: Layout, name: ChainName, frontend: str, onwards: list[str]) -> list[str]:
    """Return the rules of a chain that looks up or stores the endpoint of a client. `frontend` is the key of a frontend
    as an nft expression, `onwards` are the jumps to the next chains. A client's key contains its pool's number, so all
    frontends of a pool share one element. The key contains a hash of the client's address, so a pool has at most
    AFFINITY_SHARE elements. Clients with equal hashes share an endpoint."""
    ip = layout.ip
    client = f"jhash ct original {ip} saddr mod {AFFINITY_SHARE} seed {SEED:#x} . {ip} saddr"
    known = f"{ip} daddr set {client} map @{CLIENTS}"
    update = f"update @{CLIENTS} {{ {client} timeout {name.affinity}s : {ip} daddr }}"
    forget = f"delete @{CLIENTS} {{ {client} : {ip} daddr }}"
    if name.treatment.endswith("remember"):
        # If another packet of the client stored an endpoint in the meantime, the second rule does not replace this
        # endpoint, and the third rule reads it.
        return [f"jump {_PICK}", update, known, f"goto {'range-go' if name.of_ranges else _GO}"]
    if name.of_ranges:
        rules = port_ranges.client_rules(ip, name, known, forget, onwards)
        return rules if name.treatment.endswith("pick") else [update, *rules]
    number = f"{frontend} map @{POOLS_OF[name.endpoint_map]}"
    pool = f"{ip} daddr set {number}", f"{ip} saddr set {ip} daddr"
    if name.treatment.endswith("pick"):
        to_recall, to_remember = onwards
        return [*pool, f"{known} {to_recall}", to_remember]
    # The second rule returns only if no endpoint has the stored number. The rule `forget` then deletes the client,
    # because an update does not replace the data of an element.
    return [update, f"jump {_GO}", *pool, forget, *onwards]


class NumberMark:
    """The marker element of the map of clients: an element that belongs to no client, with a number that no assigned
    endpoint number exceeds. The marker element is needed because clients may still be stored with a removed endpoint's
    number. A later process reads the marker element, and assigns only larger numbers. The marker element must exist as
    long as the map, so it is in the map. The marker element's number advances in steps of 1,024."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._key = b"\xff" * 4 + bytes(family.address_size)
        self.number = 0

    def read(self, table: KernelTable) -> int:
        """Return the number in the marker element as the kernel stores it (at least FIRST_ENDPOINT); 0 if there is no
        marker element. Raises NetlinkError."""
        there = int.from_bytes(table.lookup(CLIENTS, [self._key]).get(self._key, b""), "big")
        self.number = max(0, there - FIRST_ENDPOINT)
        return there

    def advance(self, last: int) -> tuple[int, list[bytes]]:
        """Return two values: the marker element's number, which is at least `last`, and the messages that write this
        element to the kernel. There are no messages if the element's present number is at least `last`."""
        if last <= self.number:
            return self.number, []
        number = min(last + _RESERVED, layout.LARGEST_NUMBER)
        place = self._family, TABLE, CLIENTS
        old = element_messages(DELETE_ELEMENT, *place, [plain_element(self._key)]) if self.number else []
        element = timed_element(self._key, _FOREVER, _FOREVER, layout.endpoint_number(number, self._family))
        return number, [*old, *element_messages(NEW_ELEMENT, *place, [element])]


def client_number(address: bytes) -> bytes:
    """Return the hash of a client in the map of clients, packed: see `client_rules`."""
    number = slot_of(Hashing(HashKey.CLIENT, AFFINITY_SHARE), address, 0)
    return (number or 0).to_bytes(4, "little")


class ClientGauges:
    """Metrics of the number of clients, which need Linux 6.16 or newer."""

    def __init__(self, registry: MetricRegistry) -> None:
        self._clients = registry.gauge(
            "kubeproxy_session_affinity_clients",
            "Clients that session affinity remembers (not in the Go kube-proxy)",
            "ip_family",
        )
        self._limit = registry.gauge(
            "kubeproxy_session_affinity_clients_limit",
            "Maximum number of clients that session affinity can remember (not in the Go kube-proxy)",
            "ip_family",
        )

    def look(self, table: KernelTable, marks: int) -> None:
        """Update the metrics with one short request to the kernel. `marks` is the number of marker elements."""
        try:
            clients = table.count(CLIENTS)
        except ApplyError:  # the table is missing: an inspection reports it
            return
        if clients is not None:
            self._clients.labels(table.family.label).set(clients - marks)
            self._limit.labels(table.family.label).set(AFFINITY_CLIENTS)


def rooms(families: Sequence[Family]) -> Sequence[Room]:
    """Return the use of the maps of clients, read with a separate socket. Raises NetlinkError."""
    with Netlink.open() as link:
        counts = [(family, TableReader(family, TABLE, link).count(CLIENTS)) for family in families]
    return [
        Room(
            f"session affinity ({family.label})",
            used=clients,
            limit=AFFINITY_CLIENTS,
            why="when it is full, new clients of all Services are served without affinity",
            fix="lower sessionAffinityConfig.clientIP.timeoutSeconds of Services with many clients; check for a flood "
            "from forged addresses",
        )
        for family, clients in counts
        if clients is not None
    ]
