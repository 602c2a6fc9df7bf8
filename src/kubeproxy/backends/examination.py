"""What an operator is shown of a kernel that holds something else than it should: findings, and who makes them.

An examiner reads, in a process of its own beside the proxy, and cannot write: what it is made of has no way to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import NamedTuple, Protocol

from kubeproxy.model import addresses
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import ServiceName, ServicePlan

Plans = Mapping[ServiceName, tuple[ServicePlan, ...]]


class Kind(StrEnum):
    """How the kernel differs."""

    MISSING = "missing"
    EXTRA = "too many"
    DIFFERENT = "different"


class Finding(NamedTuple):
    """One thing in which the kernel differs from the plans; `service` is whose it is, None for nobody's or everybody's.

    `what` is it in words (a frontend, an endpoint of one), `where` in the kernel's (a map, a chain, a set). `wanted`
    and `present` say what should be of it and what is, '' where `what` says it all.
    """

    service: ServiceName | None
    kind: Kind
    what: str
    where: str
    wanted: str = ""
    present: str = ""


class Examiner(Protocol):
    """Compares one family of the kernel with plans. All calls block and raise ApplyError when it cannot be read."""

    family: Family

    @property
    def remembered(self) -> Callable[[ServicePlan, bytes], Iterator[bytes]] | None:
        """What yields the endpoints (packed address and port) that a client with this packed address is kept at, one
        for each pool of the service port in which it has one; None where the kernel does not tell.
        """

    def some(self, plans: Plans) -> Iterator[Finding]:
        """Yield in what the kernel differs for these Services; reads no more than concerns them, where it can."""

    def everything(self, wanted: Plans) -> Iterator[Finding]:
        """Yield in what the kernel differs, with what belongs to no Service and what all of them share."""

    def caveats(self) -> Iterable[str]:
        """Return what could not be compared, and why, in sentences."""

    def close(self) -> None:
        """Let go of the kernel."""


def front_text(address: bytes, protocol: int, port: int) -> str:
    """Return a frontend as people write it: 10.96.0.1:80/tcp, [fd00::1]:80/tcp, NodePort 30080/tcp without address."""
    text = addresses.front_text(address, port, protocol)
    return text if address else f"NodePort {text.removeprefix('*:')}"
