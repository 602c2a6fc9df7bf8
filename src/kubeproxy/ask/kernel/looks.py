"""Compares the kernel with the plans, and confirms each difference by further readings, because the proxy and other
programs may change the rules during a comparison. A Service's difference is reported if two readings show the
difference, and the proxy had the same plan of the Service before, between and after these readings. An element without
a Service is reported if it has no Service in two complete readings."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import chain

from msgspec import Struct

from kubeproxy.ask.facts import Facts, ProgrammedService
from kubeproxy.backends.state import Examiner, Finding
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import ServiceName, ServicePlan
from kubeproxy.setup import modes

Ask = Callable[[Sequence[ServiceName]], Iterable[ProgrammedService]]
"""A function that requests these Services from the proxy; if no Service is given, it requests all Services."""

LOOKS = 6  # maximum number of further readings while Services change
PAUSE = 0.05  # seconds between two readings


class Seen(Struct, frozen=True):
    """The result of comparisons."""

    services: int  # compared Services
    findings: tuple[Finding, ...] = ()
    on_their_way: tuple[ServiceName, ...] = ()  # Services with queued changes
    unstable: tuple[ServiceName, ...] = ()  # Services that changed at every reading
    caveats: tuple[str, ...] = ()  # the parts that could not be compared


def look(ask: Ask, examiners: Sequence[Examiner], names: Sequence[ServiceName]) -> Seen:
    """Compare these Services, or everything if no name is given. Raises KubeProxyError."""
    held = {one.name: one for one in ask(names)}
    steady = [one for one in held.values() if one.wanted is None]
    plans = {one.name: one.plans for one in steady}
    # A Service with a queued change is compared with its old plans, so its new elements have no Service until the next
    # reading.
    first = _some(examiners, plans) if names else _everything(examiners, {o.name: o.plans for o in held.values()})
    suspects = {name: held[name] for finding in first if (name := finding.service) in plans and name is not None}
    findings, unstable = _confirmed(ask, examiners, suspects, first)
    if unowned := {finding for finding in first if finding.service is None}:
        findings += _unowned(ask, examiners, names, unowned)
    return Seen(
        len(plans if names else held),
        tuple(dict.fromkeys(findings)),
        tuple(sorted(held.keys() - plans.keys())),
        tuple(sorted(unstable)),
        tuple(dict.fromkeys(chain.from_iterable(examiner.caveats for examiner in examiners))),
    )


def _confirmed(
    ask: Ask, examiners: Sequence[Examiner], suspects: Mapping[ServiceName, ProgrammedService], first: Iterable[Finding]
) -> tuple[list[Finding], list[ServiceName]]:
    before = _by_service(first)
    confirmed: list[Finding] = []
    for _ in range(LOOKS):
        if not suspects:
            break
        time.sleep(PAUSE)
        between = _still_known(ask, suspects)
        now = _by_service(_some(examiners, {name: one.plans for name, one in between.items()}))
        after = _still_known(ask, list(now))
        done = [name for name in now if suspects[name] == between[name] == after.get(name)]
        confirmed += [finding for name in done for finding in before.get(name, ()) if finding in now[name]]
        suspects = {name: after[name] for name in now if name in after and name not in done}
        before = now
    return confirmed, list(suspects)


def _unowned(
    ask: Ask, examiners: Sequence[Examiner], names: Sequence[ServiceName], unowned: set[Finding]
) -> list[Finding]:
    """Repeat the reading, at most LOOKS times, until no plan changes during a reading; return the elements that have no
    Service in any reading. A single reading is not enough, because the elements of a new or removed endpoint may be
    read before or after the plans with that endpoint."""
    before = {one.name: one for one in ask(names)}
    still: list[Finding] = []
    for _ in range(LOOKS):
        time.sleep(PAUSE)
        plans = {name: one.plans for name, one in before.items()}
        again = _some(examiners, plans) if names else _everything(examiners, plans)
        still = [finding for finding in again if finding in unowned]
        after = {one.name: one for one in ask(names)}
        if not still or before == after:
            break
        before, unowned = after, set(still)
    return still


def _still_known(ask: Ask, names: Iterable[ServiceName]) -> dict[ServiceName, ProgrammedService]:
    wanted = list(names)
    return {one.name: one for one in ask(wanted) if one.wanted is None} if wanted else {}


def _some(examiners: Sequence[Examiner], plans: Mapping[ServiceName, tuple[ServicePlan, ...]]) -> list[Finding]:
    return [finding for examiner in examiners for finding in examiner.some(plans)] if plans else []


def _everything(examiners: Sequence[Examiner], plans: Mapping[ServiceName, tuple[ServicePlan, ...]]) -> list[Finding]:
    return [finding for examiner in examiners for finding in examiner.everything(plans)]


def _by_service(findings: Iterable[Finding]) -> dict[ServiceName, list[Finding]]:
    found: dict[ServiceName, list[Finding]] = {}
    for finding in findings:
        if finding.service is not None:
            found.setdefault(finding.service, []).append(finding)
    return found


@contextmanager
def examiners(facts: Facts, families: Iterable[Family]) -> Iterator[list[Examiner]]:
    """Open the examiners of these families, for the mode that the proxy reports. Raises KubeProxyError."""
    examine = modes.named(facts.mode).operations().examine
    config = facts.configuration()
    with ExitStack() as opened:
        yield [opened.enter_context(closing(each)) for each in examine(config, facts.world, list(families))]
