"""Connections of each endpoint as the kernel counts them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kubeproxy.backends.nftables.counting import Read
from kubeproxy.backends.nftables.layout import ENDPOINT_MAPS, SetId
from kubeproxy.backends.nftables.render import Numbers, place_all, render
from kubeproxy.model.plan import ServicePlan, ServicePortKey


class Total(NamedTuple):
    """Number of new connections, and bytes of their first packets."""

    connections: int
    bytes: int


def connections(read: Read, plans: Iterable[ServicePlan]) -> Mapping[tuple[ServicePortKey, bytes], Total]:
    """Return the new connections of each endpoint (packed address and port) of service ports, over all frontends.

    Endpoints without a connection are left out; the result is
    empty if the table has no counters. Raises ApplyError.
    """
    found: dict[tuple[ServicePortKey, bytes], Total] = {}
    numbers = Numbers()
    for plan in plans:
        # The keys depend only on the number of endpoints, not on their slots or numbers.
        asked = render(place_all([plan], (), numbers))
        maps = [name for name in (*ENDPOINT_MAPS, SetId.SESSION_ENDPOINTS) if name in asked]
        for count in (count for name in maps for count in read(name, list(asked[name])) if count.packets):
            place = plan.key, count.data[:-2]
            before = found.get(place, Total(0, 0))
            found[place] = Total(before.connections + count.packets, before.bytes + count.bytes)
    return found
