"""Annotations of Cilium that restrict the frontends and the clients of a Service. Pure. The annotations take effect
only with the flag --cilium-annotations: see docs/beyond.md "Annotations of Cilium"."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address, summarize_address_range
from typing import Final, TypeVar

from kubeproxy.features import CILIUM
from kubeproxy.model.addresses import Range, merge_ranges
from kubeproxy.model.objects import Annotations
from kubeproxy.model.plan import FrontendKind, Globals, Problem

T = TypeVar("T")

Kinds = frozenset[FrontendKind]

CILIUM_TYPE: Final = "metadata.annotations[service.cilium.io/type]"
CILIUM_POLICY: Final = "metadata.annotations[service.cilium.io/src-ranges-policy]"

# As in Cilium, external IPs are served with every value of the annotation.
_KINDS: Final[Mapping[str, Kinds]] = {
    "ClusterIP": frozenset({FrontendKind.CLUSTER, FrontendKind.EXTERNAL}),
    "NodePort": frozenset({FrontendKind.NODEPORT, FrontendKind.EXTERNAL}),
    "LoadBalancer": frozenset({FrontendKind.LOADBALANCER, FrontendKind.EXTERNAL}),
}
_DENIES: Final = {"allow": False, "deny": True}


def served_kinds(annotations: Annotations, world: Globals, problems: list[Problem]) -> Kinds | None:
    """Return the kinds of frontends that an annotation permits for a Service, or None if it permits all kinds."""
    text = annotations.cilium_type
    return _read(text, CILIUM_TYPE, _KINDS, world, problems) if text is not None else None


def denies(annotations: Annotations | None, world: Globals, problems: list[Problem]) -> bool:
    """Return whether a Service's source ranges list the clients to refuse, instead of the clients to admit."""
    text = annotations.cilium_source_policy if annotations is not None else None
    return text is not None and bool(_read(text, CILIUM_POLICY, _DENIES, world, problems))


def _read(text: str, field: str, known: Mapping[str, T], world: Globals, problems: list[Problem]) -> T | None:
    if not CILIUM.value(world):
        problems.append(Problem(field, "has no effect: the proxy on this node runs without --cilium-annotations"))
        return None
    if text not in known:
        problems.append(Problem(field, f"{text[:64]!r} is none of {', '.join(known)}; ignored"))
    return known.get(text)


def outside_of(ranges: tuple[Range, ...]) -> tuple[Range, ...]:
    """Return all addresses outside of one or more ranges of one family, as networks."""
    size = len(ranges[0][0])
    networks: list[Range] = []
    free = 0
    for first, last in (*merge_ranges(ranges), (_packed(1 << 8 * size, size + 1), b"")):
        if free < (end := int.from_bytes(first, "big")):
            gap = ip_address(_packed(free, size)), ip_address(_packed(end - 1, size))
            networks += [(n.network_address.packed, n.broadcast_address.packed) for n in summarize_address_range(*gap)]
        free = int.from_bytes(last, "big") + 1
    return tuple(networks)


def _packed(number: int, size: int) -> bytes:
    return number.to_bytes(size, "big")
