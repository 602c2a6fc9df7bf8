"""Differences between the kernel and the plans, in words for an operator, and the examiners that find them.

An examiner runs in a process of its own beside the proxy. It only reads: its parts cannot write.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

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


class Examiner(ABC):
    """Compares one family of the kernel with plans. All calls block and raise ApplyError when it cannot be read."""

    remembered: Callable[[ServicePlan, bytes], Iterator[bytes]] | None = None
    """Yields the endpoints (packed address and port) to which a client with this packed address keeps going by session
    affinity, one for each pool of the service port; None where the kernel does not show them."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self._caveats: list[str] = []

    @abstractmethod
    def some(self, plans: Plans) -> Iterator[Finding]:
        """Yield the differences for these Services; reads no more than concerns them, where it can."""

    @abstractmethod
    def everything(self, wanted: Plans) -> Iterator[Finding]:
        """Yield all differences, also in what belongs to no Service or to all Services."""

    def caveats(self) -> Sequence[str]:
        """Return what could not be compared, and why, in sentences."""
        return self._caveats

    @abstractmethod
    def close(self) -> None:
        """Close the sockets, if there are any."""


def of_family(plans: Plans, family: Family) -> dict[ServiceName, tuple[ServicePlan, ...]]:
    """Return the plans of one family, Service by Service."""
    return {name: tuple(plan for plan in its if plan.key.family is family) for name, its in plans.items()}


def front_text(address: bytes, protocol: int, port: int) -> str:
    """Return a frontend as people write it: 10.96.0.1:80/tcp, [fd00::1]:80/tcp, NodePort 30080/tcp without address."""
    text = addresses.front_text(address, port, protocol)
    return text if address else f"NodePort {text.removeprefix('*:')}"
