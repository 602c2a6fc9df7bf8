"""Reads what an operator asks about: a source, and a destination by address or by the name of a Service. Pure."""

from __future__ import annotations

from kubeproxy.model.addresses import PROTOCOLS, pack
from kubeproxy.model.answer import Packet
from kubeproxy.model.compile import skipped
from kubeproxy.model.plan import FrontendKind
from kubeproxy.observe.state import UNWATCHED
from kubeproxy.seeing.subject import Subject

NODE = "node"
"""The source that stands for this node itself, whichever of its addresses it picks."""


class QuestionError(ValueError):
    """What is asked cannot be understood; the message says what would be."""


def packet(subject: Subject, source: str, target: str, interface: str = "") -> Packet:
    """Return the first packet of a connection from `source` to `target`. Raises QuestionError.

    A source is an address, or `node`. A target is ADDRESS:PORT or NAMESPACE/NAME:PORT, with /PROTOCOL after it unless
    that is TCP; a Service's name stands for its first cluster IP, and its port may be given by name.
    """
    where, number, protocol = _parted(target)
    if "/" in where:
        destination, number = _service_address(subject, where, number, protocol)
    else:
        address = pack(where.strip("[]"))
        if address is None:
            raise QuestionError(f"{where!r} is no IP address; expected ADDRESS:PORT or NAMESPACE/NAME:PORT")
        destination = address
    return Packet(_source(source, destination), destination, PROTOCOLS[protocol], _port(number), interface)


def addressed(source: str, target: str) -> Packet:
    """Return the first packet of a connection to ADDRESS:PORT, when nobody can be asked for Services.

    Raises QuestionError.
    """
    where, number, protocol = _parted(target)
    destination = pack(where.strip("[]"))
    if destination is None:
        raise QuestionError(f"{where!r} is no IP address, and no proxy is there that knows Services: give an address")
    return Packet(_source(source, destination), destination, PROTOCOLS[protocol], _port(number))


def _parted(target: str) -> tuple[str, str, str]:
    """Return address or name, port and protocol of a target."""
    rest, slash, protocol = target.rpartition("/")
    if not slash or protocol.upper() not in PROTOCOLS:
        rest, protocol = target, "TCP"
    where, colon, number = rest.rpartition(":")
    if not colon or (":" in where and not where.startswith("[")):
        raise QuestionError(
            f"{target!r} has no port; expected ADDRESS:PORT[/PROTOCOL], as 10.96.0.10:53/udp, [fd00::1]:80 or "
            "default/web:80"
        )
    return where, number, protocol.upper()


def _source(text: str, destination: bytes) -> bytes | None:
    if text == NODE:
        return None
    source = pack(text.strip("[]"))
    if source is None:
        raise QuestionError(f"{text!r} is no IP address; expected the client's address, or {NODE!r} for this node")
    if len(source) != len(destination):
        raise QuestionError(f"{text} and the destination are of different IP families")
    return source


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text[:6]) < 65536):
        raise QuestionError(f"port: expected a number from 1 to 65535, got {text!r}")
    return int(text)


def _service_address(subject: Subject, name: str, port: str, protocol: str) -> tuple[bytes, str]:
    """Return the first cluster IP of a Service, and the number of its port."""
    namespace, _, service = name.partition("/")
    compiled = subject.planner.compiled.get((namespace, service))
    known = subject.planner.services.get((namespace, service))
    if compiled is None or known is None:
        raise QuestionError(f"no Service {name} that is watched: {UNWATCHED}")
    if reason := skipped(known):
        raise QuestionError(f"Service {name} has nothing to connect to here: {reason}")
    for plan in compiled.plans:
        for frontend in plan.frontends:
            if (
                frontend.kind is FrontendKind.CLUSTER
                and frontend.protocol == PROTOCOLS[protocol]
                and port in (str(frontend.port), plan.key.port_name)
            ):
                return frontend.address, str(frontend.port)
    addresses = [f.address for plan in compiled.plans for f in plan.frontends if f.kind is FrontendKind.CLUSTER]
    if not addresses or not port.isdigit():
        raise QuestionError(f"Service {name} has no port {port}/{protocol} with a cluster IP")
    return addresses[0], port
