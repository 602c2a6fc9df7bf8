"""Ranges of ports: the annotation that adds ranges to a Service's addresses, and the resulting frontends. Pure.
A port of a range leads to the same port of an endpoint; the endpoints are those of the Service's first port. See
docs/port-ranges.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from msgspec import structs

from kubeproxy.features import PORT_RANGES
from kubeproxy.model.addresses import PORT_BYTES, PROTOCOL_NAMES, PROTOCOLS
from kubeproxy.model.endpoints import annotation_field
from kubeproxy.model.objects import Annotations
from kubeproxy.model.plan import Frontend, Globals, PortRange, Problem, ServicePlan
from kubeproxy.model.spec import SpecPort

FIELD: Final = annotation_field("port-ranges")
_ENTRY: Final = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?/([A-Za-z]{1,5})")


def not_programmed(frontend: Frontend, reason: str) -> Problem:
    """Return the problem that a frontend, or a port of a range, belongs to another Service."""
    field = FIELD if isinstance(frontend, PortRange) else "spec.ports"
    return Problem(field, f"{frontend} {reason}; not programmed for this Service")


class ProtocolRange(NamedTuple):
    """The ports of a protocol, from the first to the last port."""

    protocol: int
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}-{self.last}/{PROTOCOL_NAMES[self.protocol]}"

    def overlaps(self, other: ProtocolRange) -> bool:
        """Return whether two ranges have a port in common."""
        return self.protocol == other.protocol and self.first <= other.last and other.first <= self.last


def requested_ranges(
    annotations: Annotations, ports: Iterable[SpecPort], world: Globals, problems: list[Problem]
) -> Sequence[ProtocolRange]:
    """Return the valid ranges of a Service's annotation, given its ports; add a problem for each invalid range."""
    text = annotations.port_ranges
    if text is None:
        return ()
    most = PORT_RANGES.value(world)
    if not most:
        reason = "ignored: the proxy on this node serves no ranges of ports, by its mode or its flags"
        problems.append(Problem(FIELD, reason))
        return ()
    entries = [entry for part in text.split(",") if (entry := part.strip())]
    if len(entries) > most:
        reason = f"{len(entries)} ranges are more than {most} (--{PORT_RANGES.flag}); the later ranges are skipped"
        problems.append(Problem(FIELD, reason))
    taken = [ProtocolRange(port.protocol, port.port, port.port) for port in ports]
    found: list[ProtocolRange] = []
    for entry in entries[:most]:
        parsed = parse_range(entry)
        if isinstance(parsed, str):
            problems.append(Problem(FIELD, parsed))
        elif (port := next(filter(parsed.overlaps, taken), None)) is not None:
            where = f"{port.first}/{PROTOCOL_NAMES[port.protocol]}, a port of spec.ports"
            problems.append(Problem(FIELD, f"{parsed} contains {where}; range skipped"))
        elif (other := next(filter(parsed.overlaps, found), None)) is not None:
            problems.append(Problem(FIELD, f"{parsed} overlaps {other}; range skipped"))
        else:
            found.append(parsed)
    return found


def parse_range(entry: str) -> ProtocolRange | str:
    """Return the range of a text such as 10000-20000/udp, or the reason why the text is no range."""
    match = _ENTRY.fullmatch(entry)
    protocol = PROTOCOLS.get(match[3].upper()) if match is not None else None
    if match is None or protocol is None:
        return f"{entry[:64]!r} is not FIRST-LAST/PROTOCOL with tcp, udp or sctp, as 10000-20000/udp; range skipped"
    first, last = int(match[1]), int(match[2] or match[1])
    if not 0 < first <= last < len(PORT_BYTES):
        return f"{entry!r}: ports are from 1 to 65535, and the first is not after the last; range skipped"
    return ProtocolRange(protocol, first, last)


def with_ranges(plans: Sequence[ServicePlan], ranges: Sequence[ProtocolRange]) -> Sequence[ServicePlan]:
    """Return a Service's plans of one family; the first plan gets these ranges at each of its addresses."""
    if not plans or not ranges:
        return plans
    first, *others = plans
    places = [(frontend.kind, frontend.address) for frontend in first.frontends if frontend.address]
    found = [
        PortRange(kind, address + bytes((each.protocol,)) + PORT_BYTES[each.first], each.last)
        for each in ranges
        for kind, address in places
    ]
    return [structs.replace(first, port_ranges=tuple(found)), *others]
