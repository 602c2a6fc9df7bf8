"""Tries to reach endpoints from this node: a TCP connect, or a UDP datagram that an unused port would refuse.

Packets of pods and of outside clients take another way, and policies may treat them in another way. An answered probe
shows that the endpoint listens; a failed one proves something only of clients that the endpoint sees as this node.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from msgspec import Struct

from kubeproxy.ask.finding import Diagnosis, Severity
from kubeproxy.ask.why import Target
from kubeproxy.meaning.firewall import Drop
from kubeproxy.model.addresses import PROTOCOLS

TIMEOUT = 1.0
"""Seconds to wait for a connection."""
_UDP_TIMEOUT = 0.2
MOST = 20
"""Endpoints that are tried."""

_TCP, _UDP = PROTOCOLS["TCP"], PROTOCOLS["UDP"]


class Probe(Struct, frozen=True, rename="camel"):
    """The result of one attempt. `problem` is '' on success; `seconds` is its duration."""

    address: str
    protocol: str
    seconds: float
    problem: str = ""
    refused: bool = False

    @property
    def failed(self) -> bool:
        """Return whether the endpoint could not be reached."""
        return bool(self.problem)


def all_of(endpoints: Sequence[Target], protocol: int) -> tuple[Probe, ...]:
    """Try the first MOST of these endpoints, at the same time. SCTP is not tried."""
    if protocol not in {_TCP, _UDP} or not endpoints:
        return ()
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - many questions need no probe

    attempt = _tcp if protocol == _TCP else _udp
    chosen = [one.address for one in endpoints[:MOST]]
    with ThreadPoolExecutor(len(chosen)) as pool:
        return tuple(pool.map(attempt, chosen))


class ProbedFor(NamedTuple):
    """The connection behind probes: whether this node is its client, the endpoints that see the client's own address,
    and the chains that surely stop this node's packets, by endpoint.
    """

    is_node: bool = True
    own_address: Collection[str] = ()
    blocked: Mapping[str, Drop] = {}


def findings(probes: Sequence[Probe], connection: ProbedFor) -> Iterator[Diagnosis]:
    """Yield one finding for all endpoints that answered, and one for each of the others."""
    reached = [one for one in probes if not one.failed]
    if reached:
        each = ", ".join(f"{one.address} {one.seconds * 1000:.1f} ms" for one in reached)
        what = "TCP" if reached[0].protocol == "TCP" else "UDP (nothing refused it)"
        yield Diagnosis(Severity.FINE, "endpoints", f"{what} from this node: {each}")
    wrong = [one for one in probes if one.failed and one.address not in connection.blocked]
    refused = [one.address for one in wrong if one.refused]
    ports = ", ".join(sorted({address.rpartition(":")[2] for address in refused}))
    closed = f"nothing listens on port {ports} of {', '.join(refused)}"
    silent = ", ".join(one.address for one in wrong if not one.refused)
    for one in probes:
        if not one.failed:
            continue
        what = f"{one.protocol} from this node to {one.address}: {one.problem}"
        if drop := connection.blocked.get(one.address):
            yield _blocked(what, drop, is_node=connection.is_node)
        elif one.address in connection.own_address and one.problem != _BLACKHOLE:
            cause = "nothing listens" if one.refused else "the pod network does not carry packets there"
            yield Diagnosis(Severity.UNKNOWN, "endpoints", what, f"{cause}, or {_THIS_NODE_ALONE}")
        else:
            fix = (
                f"{closed}: is targetPort right, and does the process listen on the pod's address rather than on "
                "127.0.0.1? Or a NetworkPolicy or a firewall rejects this node: let it pass"
                if one.refused
                else f"this node does not reach {silent}: look at the pod network, and at NetworkPolicies"
            )
            yield Diagnosis(Severity.BROKEN, "endpoints", what, fix=fix)


_THIS_NODE_ALONE: Final = (
    "a NetworkPolicy or a firewall rejects this node alone; the endpoint sees the client's own address, so only a "
    "connection of the client shows it"
)
_BLACKHOLE: Final = "its route is a blackhole"


def _blocked(what: str, drop: Drop, *, is_node: bool) -> Diagnosis:
    """Return the finding of a probe that a chain of this node stops: it is no fault of the endpoint."""
    reason = f"{drop.where}, chain {drop.chain} drops packets of this node's own at the hook {drop.packet.hook}"
    if is_node:
        return Diagnosis(Severity.BROKEN, "endpoints", what, reason, f"let {drop.where} {drop.chain} accept them")
    return Diagnosis(Severity.NOTE, "endpoints", what, f"{reason}; the client's are others")


def _tcp(address: str) -> Probe:
    began = time.monotonic()
    try:
        with _socket(address, socket.SOCK_STREAM) as sock:
            sock.settimeout(TIMEOUT)
            sock.connect(place(address))
    except OSError as error:
        return _failed(address, "TCP", began, error)
    return Probe(address, "TCP", time.monotonic() - began)


def _udp(address: str) -> Probe:
    """Send an empty datagram: a closed port answers with an ICMP error."""
    began = time.monotonic()
    try:
        with _socket(address, socket.SOCK_DGRAM) as sock:
            sock.settimeout(_UDP_TIMEOUT)
            sock.connect(place(address))
            sock.send(b"")
            sock.recv(1)
    except TimeoutError:
        return Probe(address, "UDP", time.monotonic() - began)
    except OSError as error:
        return _failed(address, "UDP", began, error)
    return Probe(address, "UDP", time.monotonic() - began)


def _socket(address: str, kind: int) -> socket.socket:
    return socket.socket(socket.AF_INET6 if address.startswith("[") else socket.AF_INET, kind | socket.SOCK_CLOEXEC)


def place(address: str) -> tuple[str, int]:
    """Return address and port from an endpoint's text."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _failed(address: str, protocol: str, began: float, error: OSError) -> Probe:
    seconds = time.monotonic() - began
    if isinstance(error, TimeoutError):
        return Probe(address, protocol, seconds, f"no answer within {TIMEOUT:.0f} s")
    if error.errno == errno.ECONNREFUSED:
        return Probe(address, protocol, seconds, "refused", refused=True)
    if error.errno == errno.EINVAL:  # the kernel's errors for these kinds of routes
        return Probe(address, protocol, seconds, _BLACKHOLE)
    return Probe(address, protocol, seconds, os.strerror(error.errno or errno.EIO).lower())
