"""Owners of addresses and ports that several Services claim: the Service of the allocation, else the oldest Service.

Source: CVE-2020-8554: a user who may write externalIPs must not take addresses of other Services. In the Go kube-proxy
the owner is random.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from enum import IntEnum

from msgspec import Struct, structs

from kubeproxy.model.addresses import Family, pack
from kubeproxy.model.objects import Service
from kubeproxy.model.plan import WRITTEN, Frontend, FrontendKind, ServiceName, ServicePlan

_CLUSTER_IP = FrontendKind.CLUSTER  # looked up once, as in model.compile


class Right(IntEnum):
    """The reason of a claim; the smaller one wins."""

    ALLOCATED = 0  # by the API server: cluster IPs, NodePorts
    WRITTEN = 1  # by a client of the API: external IPs, addresses of load balancers


class Claimant(Struct, frozen=True, order=True, gc=False):
    """A Service that claims frontends, and its reason; the smallest claimant is the owner.

    `created` is RFC 3339: text order is age.
    """

    right: Right
    created: str
    namespace: str
    name: str

    @property
    def writing(self) -> Claimant:
        """The same Service as a claimant for the reason WRITTEN."""
        return structs.replace(self, right=Right.WRITTEN)

    @property
    def service(self) -> ServiceName:
        """The Service's namespace and name."""
        return self.namespace, self.name

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Claims:
    """The owners of the frontends of one family, by Frontend.key.

    `written` are the keys claimed for the reason WRITTEN. A claim on a contested key costs the logarithm of its
    claimants.
    """

    def __init__(self) -> None:
        self.written: dict[ServiceName, tuple[bytes, ...]] = {}
        self._owner: dict[bytes, Claimant] = {}
        self._contested: dict[bytes, list[Claimant]] = {}

    def replace(
        self, old: Claimant | None, new: Claimant | None, before: Collection[bytes], after: Collection[bytes]
    ) -> set[bytes]:
        """Replace a Service's claims for one reason; return the contested keys with a new owner.

        `old` and `new` differ when a Service was deleted and made again with another age.
        """
        moved: set[bytes] = set()
        if old is not None and before:
            keys = set(after)
            moved.update([key for key in before if (old != new or key not in keys) and self._release(key, old)])
        if new is not None:
            for key in after:
                owner = self._owner.setdefault(key, new)
                if owner is not new and owner != new and self._contest(key, new):
                    moved.add(key)
        return moved

    def replace_written(
        self, name: ServiceName, old: Claimant | None, new: Claimant | None, after: tuple[bytes, ...]
    ) -> set[bytes]:
        """Replace a Service's claims for the reason WRITTEN; return the same keys as `replace`."""
        before = self.written.pop(name, ())
        if after:
            self.written[name] = after
        return self.replace(old and old.writing, new and new.writing, before, after)

    @property
    def contested(self) -> bool:
        """Whether any key has more than one claimant."""
        return bool(self._contested)

    def owner(self, key: bytes) -> Claimant | None:
        """Return the owner of a key."""
        return self._owner.get(key)

    def asking(self, key: bytes) -> Iterable[ServiceName]:
        """Return all Services that claim a key; a new owner changes the plans or problems of each."""
        owner = self._owner.get(key)
        return [claimant.service for claimant in self._contested.get(key, () if owner is None else (owner,))]

    def _release(self, key: bytes, claimant: Claimant) -> bool:
        """Withdraw a claim; return whether the key has another owner now."""
        waiting = self._contested.get(key)
        if waiting is None:
            if self._owner.get(key) == claimant:
                del self._owner[key]
            return False
        at = bisect_left(waiting, claimant)
        if at < len(waiting) and waiting[at] == claimant:
            del waiting[at]
        self._owner[key] = waiting[0]
        if len(waiting) == 1:
            del self._contested[key]
        return at == 0

    def _contest(self, key: bytes, claimant: Claimant) -> bool:
        """Add a claim to a key that has an owner; return whether the claimant is the owner now."""
        waiting = self._contested.setdefault(key, [self._owner[key]])
        at = bisect_left(waiting, claimant)
        if at < len(waiting) and waiting[at] == claimant:
            return False
        waiting.insert(at, claimant)
        self._owner[key] = waiting[0]
        return at == 0


def parted(plans: tuple[ServicePlan, ...], family: Family) -> tuple[Sequence[bytes], Sequence[Frontend]]:
    """Return the keys allocated to a Service in a family, and the frontends with addresses written into it."""
    if not plans or (len(plans) == 1 and plans[0].key.family is not family):
        return (), ()
    if len(plans) == 1 and len(plans[0].frontends) == 1 and plans[0].frontends[0].kind is _CLUSTER_IP:
        return [plans[0].frontends[0].key], ()
    allocated: list[bytes] = []
    written: list[Frontend] = []
    for plan in plans:
        if plan.key.family is family:
            for frontend in plan.frontends:
                if frontend.kind in WRITTEN:
                    written.append(frontend)
                else:
                    allocated.append(frontend.key)
    return allocated, written


def written_addresses(service: Service) -> set[bytes | None]:
    """Return the packed external IPs and load balancer addresses of a Service."""
    status = service.status.load_balancer if service.status else None
    ingress = (status.ingress if status else None) or ()
    return {pack(text) for text in (*(service.spec.external_ips or ()), *(each.ip for each in ingress if each.ip))}
