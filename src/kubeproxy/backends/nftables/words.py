"""Descriptions of the elements of our table for an operator. Pure."""

from __future__ import annotations

from typing import Final

from kubeproxy.backends.examination import front_text
from kubeproxy.backends.nftables.layout import CLASS_MAPS, POOL_MAPS, VERDICT_MAPS, Layout, SetId
from kubeproxy.model.addresses import destination_text, unpack

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
    SetId.NODEPORT_IPS: "an address on which NodePorts answer",
}


class ElementWords:
    """Descriptions of the elements of one family."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def where(self, set_id: str) -> str:
        """Return a set or map and its table as nft names them."""
        return f"{self._layout.shapes[set_id].spec.keyword} {set_id} of table {self._layout.ip} kube-proxy"

    def front(self, set_id: str, key: bytes) -> str:
        """Return the subject of an element: a frontend, or an address if the set has no ports."""
        size = self._layout.family.address_size if "address" in self._layout.shapes[set_id].fields else 0
        if set_id == SetId.FIREWALL_ALLOW:
            return f"source ranges number {unpack(key[:size])}"
        if "port" not in self._layout.shapes[set_id].fields:
            return unpack(key[:size])
        return front_text(key[:size], key[size], int.from_bytes(key[size + 4 : size + 6], "big"))

    def endpoint(self, set_id: str, key: bytes, destination: bytes) -> str:
        """Return the description of an endpoint; `destination` is an address, a port, and two zero bytes."""
        local = "local " * set_id.startswith("local-")
        return f"{local}endpoint {destination_text(destination[:-2])} of {self.front(set_id, key)}"

    def meaning(self, set_id: str, key: bytes, data: bytes) -> str:
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
