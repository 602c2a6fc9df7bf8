"""Tries to reach endpoints from this node: a TCP connect, or a UDP datagram that an unused port would refuse.

Packets of pods and of outside clients take another way. A probe shows only whether the endpoint listens, and whether
the cluster's network carries packets from this node to it.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator, Sequence

from msgspec import Struct

from kubeproxy.ask.finding import Diagnosis, Severity
from kubeproxy.ask.why import Target
from kubeproxy.model.addresses import PROTOCOLS

PATIENCE = 1.0
"""Seconds to wait for a connection."""
_UDP_PATIENCE = 0.2
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


def findings(probes: Sequence[Probe]) -> Iterator[Diagnosis]:
    """Yield one finding for all endpoints that answered, and one for each of the others."""
    reached = [one for one in probes if not one.failed]
    if reached:
        each = ", ".join(f"{one.address} {one.seconds * 1000:.1f} ms" for one in reached)
        what = "TCP" if reached[0].protocol == "TCP" else "UDP (nothing refused it)"
        yield Diagnosis(Severity.FINE, "endpoints", f"{what} from this node: {each}")
    refused = [one.address for one in probes if one.refused]
    ports = sorted({address.rpartition(":")[2] for address in refused})
    silent = ", ".join(one.address for one in probes if one.failed and not one.refused)
    for one in probes:
        if one.failed:
            fix = (
                f"nothing listens on port {', '.join(ports)} of {', '.join(refused)}: is targetPort right, and does "
                "the process listen on the pod's address rather than on 127.0.0.1?"
                if one.refused
                else f"this node does not reach {silent}: look at the pod network, and at NetworkPolicies"
            )
            what = f"{one.protocol} from this node to {one.address}: {one.problem}"
            yield Diagnosis(Severity.BROKEN, "endpoints", what, fix=fix)


def _tcp(address: str) -> Probe:
    began = time.monotonic()
    try:
        with _socket(address, socket.SOCK_STREAM) as sock:
            sock.settimeout(PATIENCE)
            sock.connect(place(address))
    except OSError as error:
        return _failed(address, "TCP", began, error)
    return Probe(address, "TCP", time.monotonic() - began)


def _udp(address: str) -> Probe:
    """Send an empty datagram: a closed port answers with an ICMP error."""
    began = time.monotonic()
    try:
        with _socket(address, socket.SOCK_DGRAM) as sock:
            sock.settimeout(_UDP_PATIENCE)
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
        return Probe(address, protocol, seconds, f"no answer within {PATIENCE:.0f} s")
    if error.errno == errno.ECONNREFUSED:
        return Probe(address, protocol, seconds, "refused", refused=True)
    if error.errno == errno.EINVAL:  # the kernel's errors for these kinds of routes
        return Probe(address, protocol, seconds, "its route is a blackhole")
    return Probe(address, protocol, seconds, os.strerror(error.errno or errno.EIO).lower())
