"""Parses an operator's question: a source, and a destination that is an address or the name of a Service. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from kubeproxy.ask.snapshot import Snapshot, unwatched
from kubeproxy.errors import QuestionError
from kubeproxy.model.addresses import PROTOCOL_NAMES, PROTOCOLS, Family, family_of, pack, unpack
from kubeproxy.model.answer import Packet
from kubeproxy.model.compile import skipped
from kubeproxy.model.objects import LABEL
from kubeproxy.model.plan import Frontend, FrontendKind, ServiceName, ServicePlan

NODE = "node"  # name of this node as a source; the kernel picks the address
_SHOWN = 3  # maximum number of Services in other namespaces that an error message proposes


def packet(snapshot: Snapshot, source: str, target: str, interface: str = "") -> Packet:
    """Return the first packet of a connection from `source` to `target`. Raises QuestionError.

    A source is an address, with an optional port as in 192.0.2.7:40000, or `node`. A target is ADDRESS:PORT,
    NAMESPACE/NAME:PORT, or NAME:PORT for a Service in default, with /PROTOCOL after it unless that is TCP. A Service's
    name means its first cluster IP of the source's family. Its port may be given by name, which implies the protocol.
    """
    where, number, protocol = _parted(target)
    client = source_of(source)
    destination = pack(where.strip("[]")) if "/" not in where else None
    if destination is None:
        if not _names_service(where):
            raise QuestionError(
                f"{where!r} is no IP address and no Service; expected ADDRESS:PORT or NAMESPACE/NAME:PORT"
            )
        namespace, slash, own = where.partition("/")
        name = (namespace, own) if slash else ("default", where)
        destination, number, protocol = _service_address(snapshot, name, number, protocol, client[0])
    return _packet(client, destination, protocol, number, interface)


def addressed(source: str, target: str) -> Packet:
    """Return the first packet of a connection to ADDRESS:PORT, without a proxy. Raises QuestionError."""
    where, number, protocol = _parted(target)
    destination = pack(where.strip("[]"))
    if destination is None:
        raise QuestionError(f"{where!r} is no IP address, and no proxy is there that knows Services: give an address")
    return _packet(source_of(source), destination, protocol, number)


def _packet(
    source: tuple[bytes | None, int], destination: bytes, protocol: str, number: str, interface: str = ""
) -> Packet:
    client, client_port = source
    if client is not None and len(client) != len(destination):
        raise QuestionError(f"{unpack(client)} and the destination are of different IP families")
    return Packet(client, destination, PROTOCOLS[protocol or "TCP"], _port(number), interface, client_port)


def _parted(target: str) -> tuple[str, str, str]:
    """Return address or name, port, and protocol of a target; '' if the protocol is omitted."""
    where, colon, end = target.rpartition(":")
    number, slash, protocol = end.partition("/")
    if not colon and _names_service(target):
        return target, "", ""
    if not colon or (":" in where and not where.startswith("[")):
        raise QuestionError(
            f"{target!r} has no port; expected ADDRESS:PORT[/PROTOCOL], as 10.96.0.10:53/udp, [fd00::1]:80 or "
            "default/web:80"
        )
    if slash and protocol.upper() not in PROTOCOLS:
        raise QuestionError(f"{protocol!r} is no protocol of Services; expected tcp, udp or sctp")
    return where, number, protocol.upper()


def source_of(text: str) -> tuple[bytes | None, int]:
    """Return the client's address (None for this node) and the client's port (0 for none)."""
    if text == NODE:
        return None, 0
    where, _, port = text.rpartition(":") if text.count(":") == 1 or "]:" in text else (text, "", "")
    source = pack(where.strip("[]"))
    if source is None:
        raise QuestionError(f"{text!r} is no IP address; expected the client's address, or {NODE!r} for this node")
    return source, _port(port) if port else 0


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text[:6]) < 65536):
        raise QuestionError(f"port: expected a number from 1 to 65535, got {text!r}")
    return int(text)


def _names_service(text: str) -> bool:
    """Return whether a text is a valid name. A mistyped address has dots or colons, which names cannot contain."""
    parts = text.split("/")
    return len(parts) <= 2 and all(LABEL.fullmatch(part) for part in parts)


def _service_address(
    snapshot: Snapshot, name: ServiceName, port: str, protocol: str, client: bytes | None
) -> tuple[bytes, str, str]:
    """Return a Service's first cluster IP in the client's family, the port's number as text, and its protocol."""
    service = "/".join(name)
    compiled = snapshot.planner.compiled.get(name)
    known = snapshot.planner.services.get(name)
    if compiled is None or known is None:
        raise QuestionError(
            f"{unwatched(name)}; `kubectl -n {name[0]} get service {name[1]} --show-labels` tells which"
            + "".join(_hints(snapshot, name))
        )
    if reason := skipped(known, snapshot.planner.world):
        raise QuestionError(f"Service {service} has nothing to connect to here: {reason}")
    family = family_of(client) if client is not None else None
    offered = list(_cluster_ips(compiled.plans, family))
    asked = protocol or "TCP" * port.isdigit()
    for plan, frontend in offered if port else ():
        its_own = PROTOCOL_NAMES[frontend.protocol]
        if asked in {"", its_own} and port in {str(frontend.port), plan.key.port_name}:
            return frontend.address, str(frontend.port), its_own
    if offered and port.isdigit():
        return offered[0][1].address, port, protocol
    ports = [f"{plan.key.port_name} {frontend.port_text}".strip() for plan, frontend in offered]
    if ports:
        wrong = " ".join(filter(None, ("no", protocol, "port", port))) if port else "no port in this question"
        raise QuestionError(f"Service {service} has {wrong}; it has {', '.join(dict.fromkeys(ports))} (spec.ports)")
    kind = f"{family.label} " if family is not None else ""
    raise QuestionError(f"Service {service} has no {kind}cluster IP with a port (spec.clusterIPs)")


def _hints(snapshot: Snapshot, name: ServiceName) -> Iterator[str]:
    """Yield hints for an unknown Service: the same name in other namespaces, an API server that cannot be reached."""
    same = sorted(space for space, other in snapshot.planner.services if other == name[1])
    if same:
        yield "; there is " + ", ".join(f"{space}/{name[1]}" for space in same[:_SHOWN])
    reach = snapshot.reach()
    if reach is not None and reach.trouble:
        yield f"; it may be new: the API server cannot be reached, {reach.trouble}"


def _cluster_ips(plans: tuple[ServicePlan, ...], family: Family | None) -> Iterator[tuple[ServicePlan, Frontend]]:
    for plan in plans:
        for frontend in plan.frontends:
            if frontend.kind is FrontendKind.CLUSTER and family in {None, plan.key.family}:
                yield plan, frontend
