"""Ejection of failing endpoints: an endpoint that does not answer this node gets no new connections until it answers
again. Pure: the kernel's suspects, the results of attempts to connect, and the times are arguments. An endpoint's key
is its packed address, protocol (1 byte) and port (2 bytes), as in gone.Departed. See docs/failover.md."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from socket import IPPROTO_TCP, IPPROTO_UDP
from typing import Final, NamedTuple

from kubeproxy.features import Ejecting
from kubeproxy.model.addresses import endpoint_id
from kubeproxy.model.endpoints import Selection, annotation_field
from kubeproxy.model.objects import Annotations, Service
from kubeproxy.model.plan import Pool, Problem, ServiceName, ServicePlan

EJECT: Final = annotation_field("eject")

FIRST: Final = 1.0  # seconds from an ejection to the first attempt to connect
SLOWEST: Final = 30.0  # seconds; the pause between two attempts doubles with each failure, up to this maximum
LONGEST: Final = 300.0
"""Seconds after which an ejection ends although the endpoint does not answer the proxy: a network policy may allow
connections of clients, but not of the proxy."""
REST: Final = 0.25
"""Seconds for which an endpoint is not suspected again after it accepted an attempt to connect. The time doubles with
each further attempt that the endpoint accepts, up to LONGEST_REST."""
LONGEST_REST: Final = 1.0  # seconds; TCP's first retransmission does not come earlier, so no ejection is delayed
RELAPSE: Final = 60.0
"""Seconds after an endpoint's return in which a failure doubles the last pause. After a later failure the pause is
FIRST."""

_PROTOCOLS: Final = frozenset({IPPROTO_TCP, IPPROTO_UDP})
"""The protocols of endpoints that are ejected: the proxy cannot confirm that an SCTP endpoint fails."""


class Failure(NamedTuple):
    """A failing endpoint: the reason, the pause between attempts to connect, and times. `since` and `began` are the
    time of the first failed attempt: `since` in seconds since the epoch, `began` in seconds of a monotonic clock. `due`
    is the time of the next attempt, in seconds of the same monotonic clock."""

    since: float
    reason: str
    began: float
    due: float
    pause: float

    @property
    def text(self) -> str:
        """The reason, and the time of the first failed attempt."""
        return f"{self.reason}, since {datetime.fromtimestamp(self.since, UTC):%Y-%m-%dT%H:%M:%SZ}"


Failures = Mapping[bytes, Failure]
"""The failing endpoints, by their keys."""


def ejecting(chosen: Selection, failures: Failures, protocol: int) -> tuple[Selection, Pool]:
    """Return a selection without failing endpoints, and the endpoints that are therefore in none of its pools. UDP
    flows to such endpoints end, as if the endpoints were deleted; TCP connections continue."""
    failing = frozenset([key[:-3] + key[-2:] for key in failures if key[-3] == protocol])
    if not failing:
        return chosen, ()
    cluster, local = _remaining(chosen.cluster, failing), _remaining(chosen.local, failing)
    ejected = {*chosen.cluster, *chosen.local}.difference(cluster, local)
    serving = chosen.serving
    if protocol == IPPROTO_UDP:
        serving = tuple([destination for destination in serving if destination not in ejected])
    return chosen._replace(cluster=cluster, local=local, serving=serving), tuple(sorted(ejected))


def _remaining(pool: Pool, failing: Collection[bytes]) -> Pool:
    """Return a pool without failing endpoints; the whole pool if more than half of it fails."""
    kept = tuple([destination for destination in pool if destination not in failing])
    return kept if 2 * len(kept) >= len(pool) else pool


def too_many(plan: ServicePlan, failures: Failures) -> Iterator[Problem]:
    """Yield the problem that failing endpoints of a plan remain in a pool, because they are more than half of it."""
    for pool in (plan.cluster, plan.local):
        count = sum(endpoint_id(destination, plan.key.protocol) in failures for destination in pool)
        if count:
            where = f"{plan.key} ({plan.key.family.label})"
            reason = f"{count} of {len(pool)} endpoints of {where} do not answer: more than half, so none is ejected"
            yield Problem(EJECT, reason)
            return


def wrong_request(annotations: Annotations, setting: Ejecting) -> Iterator[Problem]:
    """Yield the problem of an annotation that is invalid, or without effect on this node."""
    text = annotations.eject
    if text is None:
        return
    if text not in {"on", "off"}:
        yield Problem(EJECT, f"{text[:64]!r} is not on or off; the flag --eject-failing-endpoints decides")
    elif text == "on" and setting == "never":
        yield Problem(EJECT, "ignored: the proxy on this node ejects no endpoints, by its mode or its flags")


def _keys(plans: Iterable[ServicePlan]) -> set[bytes]:
    found: set[bytes] = set()
    for plan in plans:
        if plan.ejected is not None and (protocol := plan.key.protocol) in _PROTOCOLS:
            found.update(
                [endpoint_id(destination, protocol) for destination in {*plan.cluster, *plan.local, *plan.ejected}]
            )
    return found


class _Answered(NamedTuple):
    """An endpoint that answered. Before the time `rests` the endpoint is not suspected; before the time `relapses` a
    failure is a relapse. `pause` is the last pause between attempts, and `rest` is the last rest (see REST)."""

    rests: float
    relapses: float
    pause: float
    rest: float


class Ejections:
    """The failing endpoints of Services that eject endpoints. `now` is in seconds of a monotonic clock. A Service's
    endpoints are all endpoints that the API permits in its pools. If the API removes an endpoint from the pools, the
    ejection ends: the API takes precedence."""

    def __init__(self, setting: Ejecting) -> None:
        self.failures: dict[bytes, Failure] = {}
        self._setting = setting
        self._requested: set[ServiceName] = set()
        self._services: dict[bytes, tuple[ServiceName, ...]] = {}
        self._answered: dict[bytes, _Answered] = {}

    @property
    def in_use(self) -> bool:
        """Whether a Service may eject endpoints."""
        return self._setting == "always" or bool(self._requested)

    def request(self, name: ServiceName, annotations: Annotations | None) -> None:
        """Record whether a Service requests ejection."""
        if annotations is not None and annotations.eject == "on" and self._setting == "requested":
            self._requested.add(name)
        else:
            self._requested.discard(name)

    def of(self, service: Service) -> Failures | None:
        """Return the failing endpoints; None if the Service ejects none."""
        annotations = service.metadata.annotations
        text = annotations.eject if annotations is not None else None
        wanted = text != "off" if self._setting == "always" else text == "on" and self._setting == "requested"
        return self.failures if wanted else None

    def services(self, key: bytes) -> Sequence[ServiceName]:
        """Return the Services that may eject an endpoint."""
        return self._services.get(key, ())

    def replace(self, name: ServiceName, before: Iterable[ServicePlan], after: Iterable[ServicePlan]) -> None:
        """Replace the plans of a Service; forget the endpoints that are now in no plan."""
        if not (self._services or self.in_use):
            return
        had, has = _keys(before), _keys(after)
        for key in has - had:
            self._services[key] = (*self._services.get(key, ()), name)
        for key in had - has:
            others = tuple([one for one in self._services.get(key, ()) if one != name])
            if others:
                self._services[key] = others
                continue
            self._services.pop(key, None)
            self.failures.pop(key, None)
            self._answered.pop(key, None)

    def due(self, suspects: Iterable[bytes], now: float) -> list[bytes]:
        """Return the endpoints to which the proxy should connect: new suspects, and failing endpoints after a pause."""
        for key in [key for key, one in self._answered.items() if max(one.rests + one.rest, one.relapses) <= now]:
            del self._answered[key]
        resting = {key for key, answered in self._answered.items() if answered.rests > now}
        fresh = [key for key in suspects if key in self._services and key not in self.failures and key not in resting]
        return [key for key, failure in self.failures.items() if failure.due <= now] + fresh

    def failed(self, key: bytes, reason: str, now: float, epoch: float) -> Sequence[ServiceName]:
        """Record a failed attempt; return the Services that get new plans. `epoch` is the time since the epoch."""
        names, known = self.services(key), self.failures.get(key)
        if not names:
            return ()
        if known is None:
            answered = self._answered.pop(key, None)
            relapsed = answered is not None and now < answered.relapses
            pause = min(SLOWEST, 2 * answered.pause) if answered is not None and relapsed else FIRST
            self.failures[key] = Failure(epoch, reason, now, now + pause, pause)
            return names
        if now - known.began >= LONGEST:
            return self.answered(key, now)
        pause = min(SLOWEST, 2 * known.pause)
        self.failures[key] = known._replace(due=now + pause, pause=pause)
        return ()

    def answered(self, key: bytes, now: float) -> Sequence[ServiceName]:
        """Record a successful attempt; return the Services that get new plans."""
        names, known = self.services(key), self.failures.pop(key, None)
        if known is not None:
            self._answered[key] = _Answered(now, now + RELAPSE, known.pause, REST / 2)
            return names
        if names:
            before = self._answered.get(key, _Answered(now, now, FIRST, REST / 2))
            rest = min(LONGEST_REST, 2 * before.rest)
            self._answered[key] = before._replace(rests=now + rest, rest=rest)
        return ()

    def reasons(self, plan: ServicePlan) -> dict[bytes, str]:
        """Return the reason for each ejected endpoint of a plan, by its destination."""
        keys = {destination: endpoint_id(destination, plan.key.protocol) for destination in plan.ejected or ()}
        return {one: self.failures[key].text if key in self.failures else "" for one, key in keys.items()}
