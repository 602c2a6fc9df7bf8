"""Checks of the ports on which the proxy itself listens: its own ports, and ports of Services."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from kubeproxy.ask.checks.node import CheckedNode
from kubeproxy.ask.facts import NodeListener
from kubeproxy.ask.finding import STOPS, Diagnosis, Severity
from kubeproxy.ask.source import Source
from kubeproxy.kernel.proc import processes
from kubeproxy.kernel.proc.processes import Listening, Process, holder, listening
from kubeproxy.model.addresses import Family, family_of, place_text, split_host_port
from kubeproxy.model.answer import HEALTH_FIELD, Packet

HIDDEN = Process(-1, "")
"""Stands for a process that uses a port and is not visible in this PID namespace (in a pod without hostPID)."""


class ListeningPort(NamedTuple):
    """A port of the proxy that a field configures. `holder` is the process that uses the port, or None if unknown."""

    field: str
    address: str
    bound: bool
    holder: tuple[int, str] | None = None
    service: str = ""  # NAMESPACE/NAME of the Service with the field; '' for the configuration


def check(ports: Iterable[ListeningPort], pid: int) -> Iterator[Diagnosis]:
    """Check whether the proxy with this pid listens on its ports."""
    for port in ports:
        if port.bound and (port.holder is None or port.holder[0] == pid):
            continue
        who = f"process {port.holder[1]} (pid {port.holder[0]})" if port.holder else "nobody"
        who = "a process not visible here" if port.holder == HIDDEN else who
        field = f"{port.field} of {port.service}" if port.service else port.field
        what = f"{field}: {port.address} is not the proxy's: {who} listens there"
        yield Diagnosis(Severity.DEGRADED, "ports", what, _why(port), _fix(port))


def _why(port: ListeningPort) -> str:
    if port.service and port.field == HEALTH_FIELD:
        return "at this port, load balancers check whether this node has endpoints of the Service"
    if port.service:
        return f"{'that program' if port.bound else 'no endpoint'} gets the connections to this NodePort"
    if port.field.startswith("healthz"):
        return "at this port, load balancers check whether this node is healthy"
    return "metrics of this node are missing, or belong to another program"


def _fix(port: ListeningPort) -> str:
    again = "the proxy tries again every 5 s"
    if not port.bound:
        return f"read in the proxy's log why the proxy does not listen; {again}"
    other = f"give {port.field} another address"
    if port.service:
        other = "have it use another port"
    return f"stop the other program, or {other}; {again}"


def own(node: CheckedNode, others: Collection[int] = ()) -> Iterator[Diagnosis]:
    """Check whether the proxy listens on the ports of its configuration, except ports of the processes `others`."""
    listened = [one for family in Family for one in listening(family, socket.IPPROTO_TCP)]
    found = []
    for field, address in node.config.own_addresses.items():
        place = split_host_port(address) if address else None
        if place is not None:
            number = int(place[1])
            bound = any(one.port == number for one in listened)
            who = holder(number, "kube-proxy") if bound else None
            if who is None or who.pid not in others:
                found.append(ListeningPort(field, address, bound, who))
    yield from check(found, node.pid)


def asked(node: CheckedNode, source: Source, packet: Packet, field: str) -> Iterator[Diagnosis]:
    """Check whether the proxy listens on the port of a connection that the proxy itself answers: a port of a Service,
    or the port of a `field` of the configuration."""
    listeners = [one for one in source.listeners() if one.port == packet.port]
    found = list(of_services(node, listeners, unheld=True)) if node.pid else []
    if not listeners and node.pid:
        family, place = family_of(packet.destination), place_text(packet.destination, packet.port)
        bound = _listening_at(packet.destination, packet.port) & {
            one for each in (family, Family.IPV6) for one in listening(each, socket.IPPROTO_TCP)
        }
        who = holder(packet.port, "kube-proxy", address=packet.destination) if bound else None
        found = list(check([ListeningPort(field, place, bool(bound), who)], node.pid))
    yield from (replace(one, severity=Severity.BROKEN, harm=STOPS) for one in found)


def of_services(node: CheckedNode, listeners: Sequence[NodeListener], *, unheld: bool = False) -> Iterator[Diagnosis]:
    """Check whether other programs use ports on which the proxy should listen for Services. `unheld` also reports ports
    that no program uses, which is normal shortly before the proxy listens."""
    ours = processes.sockets(node.pid) if node.pid else None
    tables = {family: processes.listeners(family, socket.IPPROTO_TCP) for family in Family} if listeners else {}
    for one in listeners if node.pid else ():
        places: dict[Process | None, list[str]] = {}
        for address in one.addresses:
            holds = {**tables[Family.IPV6], **tables[family_of(address)]}
            at = _listening_at(address, one.port)
            there = {inode for inode, found in holds.items() if found in at}
            if not any(address):  # a listener on all addresses needs the port on every address
                there |= {inode for inode, found in tables[family_of(address)].items() if found.port == one.port}
            if there & (ours or set()) or not (there or unheld):
                continue
            who = holder(one.port, "kube-proxy", address=address if any(address) else b"") if there else None
            if there and who is None and ours is not None:
                who = HIDDEN
            places.setdefault(who, []).append(place_text(address, one.port))
        for who, texts in places.items():
            bound = who is not None or ours is None
            yield from check([ListeningPort(one.field, ", ".join(texts), bound, who, one.service)], node.pid)


def _listening_at(address: bytes, port: int) -> set[Listening]:
    return {Listening(address, port), *(Listening(bytes(each.address_size), port) for each in Family)}
