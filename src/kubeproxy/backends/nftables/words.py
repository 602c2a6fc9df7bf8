"""Texts about objects of our table, and about differences from the plans. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kubeproxy.backends.nftables.gone import GONE
from kubeproxy.backends.nftables.layout import (
    CLASS_MAPS,
    ENDPOINT_MAPS,
    POOL_MAPS,
    SERVICE_CIDRS,
    TRANSPORTS,
    VERDICT_MAPS,
    Layout,
    SetId,
)
from kubeproxy.backends.nftables.render import MaglevTable
from kubeproxy.backends.state import Wording, front_text, meanings
from kubeproxy.backends.table_view import CHAINS, TableWords
from kubeproxy.model.addresses import destination_text, unpack
from kubeproxy.model.plan import ServiceName

SOCKETS: Final = "sockets"
"""Place of the proxy's own listeners in a state; a key is address and port."""

_MEANINGS: Final[dict[str, str]] = {
    SetId.CLUSTER_SERVICES: "forwarded",
    SetId.EXTERNAL_SERVICES: "forwarded, masqueraded",
    SetId.POLICY_LOCAL_SERVICES: "forwarded by policy Local",
    SetId.EXTERNAL_NODEPORTS: "forwarded, masqueraded",
    SetId.POLICY_LOCAL_NODEPORTS: "forwarded by policy Local",
    SetId.LOCAL_SERVICES: "forwarded to this node's own",
    SetId.LOCAL_NODEPORTS: "forwarded to this node's own",
    SetId.STICKY_NODEPORTS: "a NodePort with session affinity",
    SetId.CLUSTER_IPS: "a cluster IP, whose other ports are refused",
    SetId.HAIRPIN: "masqueraded on the way to itself",
    SetId.NO_ENDPOINT_SERVICES: "refused, as no endpoint is ready",
    SetId.NO_ENDPOINT_NODEPORTS: "refused, as no endpoint is ready",
    SetId.NO_LOCAL_ENDPOINT_SERVICES: "dropped, as no endpoint is on this node",
    SetId.NO_LOCAL_ENDPOINT_NODEPORTS: "dropped, as no endpoint is on this node",
    SetId.FIREWALL_IPS: "closed to all but its source ranges",
}

_OWN_NUMBERS: Final[dict[str, str]] = {
    **dict.fromkeys(POOL_MAPS, "its clients are remembered under a number of their own"),
    SetId.FIREWALL_LISTS: "its source ranges are kept under a number of their own",
}
"""Comparable form of elements with numbers: the number itself does not matter."""


class ElementWords(TableWords):
    """See state.StateWords. `owners` are Services by frontend, and by number of their list of source ranges;
    `unplanned` by the address of an endpoint that they have and should not have.
    """

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
        if place == SetId.FIREWALL_ALLOW:
            return self._owners.get(key[: len(key) // 4])
        return self._owners.get(key[: self._front_size(place)] if place in ENDPOINT_MAPS else key)

    def wording(self, place: str, key: Any, wanted: Any, present: Any) -> Wording:
        """See state.StateWords."""
        if place == SOCKETS:
            return Wording(f"NodePort {key[1]}/tcp on {key[0]}", "the proxy's own sockets")
        shape = self._layout.shapes.get(place)
        where = f"{shape.spec.keyword if shape is not None else 'set'} {place} of {self._where}"
        if place in {SERVICE_CIDRS, TRANSPORTS}:
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
        """Return an entry of a pool that differs: see examine._normalised; bytes are an element beyond the pool."""
        size = self._front_size(place)
        front = self._front(place, key)
        if len(key) == size:
            wrong = sum(one != other for one, other in zip(wanted, present, strict=True))
            if isinstance(wanted, MaglevTable):
                what = f"{wrong} of {len(wanted)} slots of the table of {front}"
                return Wording(what, where, "the endpoints of Maglev", "others")
            return Wording(f"{wrong} of {len(wanted)} slots of {front}", where, "as of its other frontends", "others")
        destination = present if isinstance(present, bytes) else key[size:]
        what = f"{'local ' * place.startswith('local-')}endpoint {destination_text(destination[:-2])} of {front}"
        times = (_times(wanted), _times(present)) if wanted is not None and present is not None else ()
        return Wording(what, where, *times)

    def _front_size(self, place: str) -> int:
        """Return the size of the frontend in a key of an endpoint map."""
        return self._layout.shapes[place].key_size(self._layout.family) - 4

    def _front(self, set_id: str, key: bytes) -> str:
        """Return the subject of an element: a frontend, or an address if the set has no ports."""
        fields = self._layout.shapes[set_id].fields
        size = self._layout.family.address_size if "address" in fields else 0
        if set_id == SetId.FIREWALL_ALLOW:
            return f"source ranges number {unpack(key[:size])}"
        if "port" not in fields:
            return unpack(key[:size])
        return front_text(key[:size], key[size], int.from_bytes(key[size + 4 : size + 6], "big"))

    def _meaning(self, set_id: str, key: bytes, data: bytes) -> str:
        """Return the meaning of an element for its subject."""
        if set_id == SetId.FIREWALL_ALLOW:
            size, half = self._layout.family.address_size, len(key) // 2
            first, last = unpack(key[half - size : half]), unpack(key[-size:])
            return f"open for {first}" if first == last else f"open for {first} to {last}"
        if set_id in VERDICT_MAPS:
            return f"forwarded with session affinity, by chain {data.decode(errors='replace')}"
        if set_id == SetId.FIREWALL_LISTS:
            return f"its source ranges are kept under the number {unpack(data)}"
        if set_id in POOL_MAPS:
            return f"its clients are remembered under the number {unpack(data)}"
        meaning = _MEANINGS.get(set_id, "known")
        if set_id in CLASS_MAPS and data:
            size = int.from_bytes(data, "big")
            return f"{meaning}, picked among up to {size} endpoint{'s' * (size > 1)}"
        return meaning


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
