"""The texts that describe differences between elements of nftables mode and the plans. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from kubeproxy.backends.nftables import layout
from kubeproxy.backends.nftables.gone import GONE
from kubeproxy.backends.nftables.layout import (
    ENDPOINT_MAPS,
    INTERVALS,
    OF_NUMBERS,
    POOL_MAPS,
    RANGE_POOLS,
    Layout,
    Packing,
    SetId,
)
from kubeproxy.backends.nftables.render import MaglevTable
from kubeproxy.backends.state import Wording, front_text, meanings
from kubeproxy.backends.table_view import CHAINS, TableWords
from kubeproxy.model.addresses import destination_text, unpack
from kubeproxy.model.plan import FrontendKind, PortRange, ServiceName
from kubeproxy.wording import counted

SOCKETS: Final = "sockets"
"""Place of the proxy's own listeners in a state; a key is address and port."""

_ENDS: Final = re.compile("-(services|nodeports|ranges)$")
_MEANINGS: Final[dict[str, str]] = {
    "cluster": "forwarded",
    "external": "forwarded, masqueraded",
    "policy-local": "forwarded by policy Local",
    "local": "forwarded to this node's endpoints",
    "sticky": "a NodePort with session affinity",
    "unserved": "refused, as no endpoint is ready",
    "no-local-endpoint": "dropped, as no endpoint is on this node",
    "firewalled": "closed to all but its source ranges",
    SetId.CLUSTER_IPS: "a cluster IP; connections to its other ports are refused",
    SetId.HAIRPIN: "masqueraded when it connects to itself",
    SetId.SESSION_CLASSES: "with session affinity",
    SetId.SESSION_OWN: "is both endpoint and frontend, and is not translated",
}
"""Texts by the name of a set; for sets of frontends, by the name without its ending (_ENDS)."""

_NUMBERED: Final[dict[str, str]] = {
    **dict.fromkeys(POOL_MAPS, "session affinity uses the pool number"),
    **dict.fromkeys(RANGE_POOLS, "forwarded to the same port, by the pool number"),
    SetId.FIREWALL_RANGES: "the source ranges are list number",
    SetId.RANGE_ENDPOINTS: "of a range of ports, at",
    SetId.FIREWALL_LISTS: "the source ranges are list number",
    SetId.SESSION_SLOTS: "with session affinity, endpoint number",
}

_OWN_NUMBERS: Final[dict[str, str]] = {
    **dict.fromkeys(POOL_MAPS, "session affinity uses a separate pool number"),
    **dict.fromkeys(RANGE_POOLS, "forwarded to the same port"),
    SetId.FIREWALL_RANGES: "the source ranges have a separate list number",
    SetId.FIREWALL_LISTS: "the source ranges have a separate list number",
}
"""Texts about desired elements with a pool's or a list's number as data. The texts contain no numbers, because numbers
are not compared."""


class ElementWords(TableWords):
    """See state.StateWords. `owners` contains the Service of each frontend, and of each number that identifies a list
    of source ranges, a pool or an endpoint. `unplanned` contains the Service of each surplus endpoint, by address."""

    def __init__(
        self, layout: Layout, owners: Mapping[bytes, ServiceName], unplanned: Mapping[bytes, ServiceName]
    ) -> None:
        super().__init__(f"table {layout.ip} kube-proxy")
        self._layout = layout
        self._owners = owners
        self._unplanned = unplanned

    def owner(self, place: str, key: Any) -> ServiceName | None:
        """See state.StateWords."""
        if place == GONE:
            name: ServiceName = key[0]
            return name
        if place == SetId.HAIRPIN:
            return self._unplanned.get(key[: len(key) // 2])
        if place in INTERVALS:
            return self._owners.get(key[: len(key) // 2 - 4])
        if place == SetId.FIREWALL_ALLOW:
            return self._owners.get(key[: len(key) // 4])
        if place in OF_NUMBERS:
            return self._owners.get(key[: self._layout.family.address_size])
        return self._owners.get(key[: self._front_size(place)] if place in ENDPOINT_MAPS else key)

    def wording(self, place: str, key: Any, wanted: Any, present: Any) -> Wording:
        """See state.StateWords."""
        if place == SOCKETS:
            return Wording(f"NodePort {key[1]}/tcp on {key[0]}", "the proxy's own sockets")
        spec = self._layout.sets.get(place)
        where = f"{spec.keyword if spec is not None else 'set'} {place} of {self._where}"
        if place in {layout.SERVICE_CIDRS, layout.TRANSPORTS}:
            return Wording(key, where, wanted, present)
        if place == GONE:
            return Wording(f"{destination_text(key[1])}, whose connections are reset as if it were deleted", where)
        if place in {CHAINS, SetId.NODEPORT_IPS}:
            return TableWords(self._where if place == CHAINS else where).wording(place, key, wanted, present)
        if place in ENDPOINT_MAPS:
            return self._endpoint(place, key, wanted, present, where)
        what, (should, there) = (
            self._front(place, key),
            meanings(lambda d: self._meaning(place, key, d), wanted, present),
        )
        return Wording(what, where, _OWN_NUMBERS.get(place, should) if should else "", there)

    def _endpoint(self, place: str, key: bytes, wanted: Any, present: Any, where: str) -> Wording:
        """Return the text about an entry of a pool (examine._normalised). If the found value has the type bytes, the
        text is about an element outside the pool."""
        size = self._front_size(place)
        front = self._front(place, key)
        if len(key) == size:
            wrong = sum(one != other for one, other in zip(wanted, present, strict=True))
            if isinstance(wanted, MaglevTable):
                what = f"{wrong} of {len(wanted)} slots of the table of {front}"
                return Wording(what, where, "the endpoints of Maglev", "others")
            slots = f"{wrong} of {len(wanted)} slots of {front}"
            return Wording(slots, where, "the endpoints of the Service's other frontends", "other endpoints")
        destination = present if isinstance(present, bytes) else key[size:]
        what = f"{'local ' * place.startswith('local-')}endpoint {destination_text(destination[:-2])} of {front}"
        times = (_times(wanted), _times(present)) if wanted is not None and present is not None else ()
        return Wording(what, where, *times)

    def _front_size(self, place: str) -> int:
        """Return the size in bytes of the frontend in an endpoint map's key; the 4 bytes after it are the slot's
        number."""
        return SetId(place).key_size(self._layout.family) - 4

    def _front(self, set_id: str, key: bytes) -> str:
        fields = SetId(set_id).fields
        size = self._layout.family.address_size if "address" in fields else 0
        if set_id == SetId.FIREWALL_ALLOW:
            return f"source ranges number {unpack(key[:size])}"
        if set_id in INTERVALS:
            last = int.from_bytes(key[-4:-2], "big")
            span = PortRange(FrontendKind.CLUSTER, key[: size + 1] + key[size + 4 : size + 6], last)
            return f"{unpack(span.address)}, ports {span.port_text}"
        if set_id in OF_NUMBERS:
            size = self._layout.family.address_size
            slot = f"slot {int.from_bytes(key[size:], 'little')} of " if set_id == SetId.SESSION_SLOTS else ""
            subject = (
                "pool" if set_id in {SetId.SESSION_SLOTS, SetId.SESSION_CLASSES, SetId.RANGE_CHAINS} else "endpoint"
            )
            return f"{slot}{subject} number {unpack(key[:size])}"
        if "port" not in fields:
            return unpack(key[:size])
        return front_text(key[:size], key[size], int.from_bytes(key[size + 4 : size + 6], "big"))

    def _meaning(self, set_id: str, key: bytes, data: bytes) -> str:
        if set_id == SetId.FIREWALL_ALLOW:
            size, half = self._layout.family.address_size, len(key) // 2
            first, last = unpack(key[half - size : half]), unpack(key[-size:])
            return f"open for {first}" if first == last else f"open for {first} to {last}"
        packing = SetId(set_id).packing
        if packing is Packing.VERDICT:
            return f"forwarded with session affinity, by chain {data.decode(errors='replace')}"
        if set_id in _NUMBERED:
            return f"{_NUMBERED[set_id]} {unpack(data)}"
        if set_id == SetId.SESSION_ENDPOINTS:
            return f"with session affinity, {destination_text(data[:-2])}"
        meaning = _MEANINGS.get(_ENDS.sub("", set_id), "known")
        if packing is Packing.CLASS and data:
            size = int.from_bytes(data, "big")
            return f"{meaning}, picked among up to {counted(size, 'endpoint')}"
        return meaning


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
