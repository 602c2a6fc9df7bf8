"""`plan --shadow`: repeats the comparison of `plan --from-kernel` while another kube-proxy runs on the node. The
command watches the API server's objects, compares the rules when changes have settled, and writes nothing."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from kubeproxy.ask.facts import Facts
from kubeproxy.ask.finding import clock
from kubeproxy.ask.from_kernel import comparisons, on_purpose, outcome_words, settings_of_compared
from kubeproxy.ask.offline import read
from kubeproxy.commands import exit_code, output
from kubeproxy.config.durations import Duration
from kubeproxy.config.options import Options
from kubeproxy.config.types import KubeProxyConfiguration, made_strict
from kubeproxy.engine.pacing import wait_briefly
from kubeproxy.errors import KubeProxyError
from kubeproxy.meaning.shadow import Episode, FamilyDifference, Shadow
from kubeproxy.model.events import Event
from kubeproxy.model.planner import Planner
from kubeproxy.model.world import Settings, Surroundings, build
from kubeproxy.report.metrics import ProxyMetrics
from kubeproxy.server.text import timestamp
from kubeproxy.setup import host
from kubeproxy.setup.sources import open_sources
from kubeproxy.wording import counted

SETTLED: Final = 2.0  # seconds without a change of an object before a comparison
EVERY: Final = 60.0  # maximum seconds between two comparisons
_OUTDATED: Final = 5.0  # seconds before outdated objects are reported: watches often end and restart
_LOOKS: Final = 4  # comparisons in the grace period of a difference
_REST: Final = 4.0  # the pause after a comparison, as a multiple of the comparison's duration


class LastedDifference(Struct, frozen=True, kw_only=True, rename="camel"):
    """Differences of one kind that lasted longer than the grace period."""

    family: str
    classes: int  # classes of packets
    packet: str  # a packet of one of these classes
    now: tuple[str, ...]  # outcomes with the kernel's rules in the last comparison
    then: tuple[str, ...]  # outcomes with the rules of this program in the last comparison
    declared: str  # the reason why the difference is intended; '' if it is not intended
    first_seen: str
    last_seen: str
    ended: bool  # no difference of this kind remains


class ShadowReport(Struct, kw_only=True, rename="camel"):
    """The summary of all comparisons."""

    since: str
    until: str = ""
    grace_seconds: float
    comparisons: int = 0
    not_compared: int = 0  # failed comparisons: objects became outdated, or rules could not be read
    classes: dict[str, int] = {}  # classes of packets in the last comparison, by family
    lasted: tuple[LastedDifference, ...] = ()
    transient: int = 0  # classes of packets with a difference that disappeared within the grace period
    undecided: int = 0  # classes of packets with a difference that began within the last grace period
    unknown: tuple[str, ...] = ()  # rules that this program does not support

    @property
    def sizes(self) -> str:
        """The number of classes of packets in each family, as text."""
        return " and ".join(
            f"{counted(number, 'class')} of {family} packets" for family, number in self.classes.items()
        )


def shadow(facts: Facts, config: KubeProxyConfiguration, seconds: Duration, grace: Duration, form: str) -> int:
    """Compare for a time or until a signal; print lasting differences and a summary; return the exit code."""
    os.nice(10)
    following = _Following(facts, config, grace, quiet=form == "json")
    report = asyncio.run(following.until(time.monotonic() + seconds))
    output.answer(form, report, lambda: _print(report))
    undeclared = any(not each.declared for each in report.lasted)
    return exit_code(wrong=undeclared, unknown=report.unknown or not report.comparisons)


class _Following:
    def __init__(self, facts: Facts, config: KubeProxyConfiguration, grace: float, *, quiet: bool) -> None:
        self._facts, self._config, self._grace, self._quiet = facts, config, grace, quiet
        self._settings = settings_of_compared(facts, config)
        self._planner = Planner(build(self._settings, Surroundings()))
        # The new configuration may lack the server from which the facts were read.
        client = facts.configuration().client_connection
        self._options = Options(
            config=replace(config, client_connection=client), master=facts.master, manifests=facts.manifests
        )
        self._sources = open_sources(self._options, self._settings.node_name, self._deliver, ProxyMetrics())
        self._shadow = Shadow(grace)
        self._report = ShadowReport(since=_time(time.time()), grace_seconds=float(grace))
        self._zero = time.time() - time.monotonic()
        self._changed, self._compared, self._rested = 0.0, float("-inf"), 0.0  # in the time of time.monotonic()
        self._why_not = ""

    async def until(self, end: float) -> ShadowReport:
        """Compare until a time or a signal; return the summary. Raises SourceError if the source fails permanently."""
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        source = asyncio.ensure_future(self._sources.run())
        gc.disable()  # a comparison creates millions of values without cycles
        try:
            while not stop.is_set() and time.monotonic() < end:
                if source.done():
                    source.result()
                if self._is_up_to_date() and self._is_due(time.monotonic()):
                    await self._compare()
                    gc.collect()
                await wait_briefly(stop, 0.2)
        finally:
            source.cancel()
            await asyncio.gather(source, return_exceptions=True)
            await self._sources.close()
        self._report.until = _time(time.time())
        self._report.lasted = self._grouped_by_kind(self._shadow.lasted)
        self._report.transient, self._report.undecided = self._shadow.transient, self._shadow.undecided
        return self._report

    def _deliver(self, events: Sequence[Event]) -> None:
        self._planner.apply(events)
        self._changed = time.monotonic()

    def _is_up_to_date(self) -> bool:
        reach = self._sources.reach()
        age = max((each.stale for each in reach.watched), default=0.0) if reach is not None else 0.0
        trouble = f": cannot reach the API server at {reach.trouble}" if reach is not None and reach.trouble else ""
        if age > _OUTDATED:
            missing = f"objects are {age:.0f} s old" if self._planner.complete else "not all objects are listed yet"
            self._count_without_comparison(f"{missing}{trouble}; not compared")
        elif not age:
            self._why_not = ""
        return self._planner.complete and not age

    def _count_without_comparison(self, why: str) -> None:
        if not self._why_not:
            self._why_not = why
            self._report.not_compared += 1
            self._shadow.interrupt()
            self._say(why)

    def _is_due(self, now: float) -> bool:
        undecided = self._shadow.undecided
        if now < self._rested and not undecided:
            return False
        settled = self._changed > self._compared and now > self._changed + SETTLED
        return settled or now > self._compared + (self._grace / _LOOKS if undecided else EVERY)

    def _planner_for(self, settings: Settings, known: Planner) -> Planner:
        node = known.nodes.get(settings.node_name)
        cidrs = [cidr for cidrs in known.service_cidrs.values() for cidr in cidrs]
        local = host.packed_local_addresses(settings.families)
        planner = Planner(build(settings, Surroundings(node, cidrs, local, self._sources.route.places)))
        planner.adopt(known.services, known.slices)
        return planner

    async def _compare(self) -> None:
        """Compare once. If a difference outlasts the grace period, read the objects again, because a slow API server
        may send changes to the two proxies at different times."""
        self._compared, known = time.monotonic(), self._planner
        try:
            if self._shadow.decides(self._compared):
                known, _ = await read(self._options, self._settings)
            planner = self._planner_for(self._settings, known)
            found = await asyncio.to_thread(comparisons, self._config, planner)
        except (KubeProxyError, OSError) as error:
            self._count_without_comparison(f"{error}; not compared")
            return
        finally:
            self._rested = time.monotonic() + _REST * (time.monotonic() - self._compared)
        report = self._report
        report.comparisons += 1
        report.classes = {family.label: each.classes for family, each in found.items()}
        unknown = [f"{family.label}: {text}" for family, each in found.items() for text in each.unknown]
        report.unknown = tuple(dict.fromkeys((*report.unknown, *unknown)))
        different = [FamilyDifference(family, one) for family, each in found.items() for one in each.differences]
        news = self._shadow.compared(self._compared, different)
        await self._judge([each for each in news if not each.ended], known)
        if report.comparisons == 1:
            self._say(f"Compared {report.sizes}: {counted(self._shadow.undecided, 'difference')}")
        for one in self._grouped_by_kind(news):
            self._say(f"no longer: {_packets(one)}" if one.ended else _words(one))

    async def _judge(self, fresh: Sequence[Episode], known: Planner) -> None:
        strict = made_strict(self._config)
        witnesses = [(each.difference.family, each.difference.witness) for each in fresh]
        try:
            planner = self._planner_for(settings_of_compared(self._facts, strict), known)
            reasons = await asyncio.to_thread(on_purpose, strict, planner, witnesses) if fresh else ()
        except (KubeProxyError, OSError) as error:
            self._say(f"it is unknown which of the next differences are intended: {error}")
            return
        for episode, reason in zip(fresh, reasons, strict=True):
            episode.declared = reason

    def _grouped_by_kind(self, episodes: Iterable[Episode]) -> tuple[LastedDifference, ...]:
        groups: dict[tuple[object, ...], list[Episode]] = {}
        for each in episodes:
            family, witness = each.difference
            groups.setdefault((family, witness.text, each.declared, each.ended), []).append(each)
        return tuple(
            LastedDifference(
                family=family.label,
                classes=len(group),
                packet=str(witness.packet),
                now=outcome_words(witness.first, family),
                then=outcome_words(witness.second, family),
                declared=group[0].declared,
                first_seen=_time(self._zero + min(each.first for each in group)),
                last_seen=_time(self._zero + max(each.last for each in group)),
                ended=group[0].ended,
            )
            for group in groups.values()
            for family, witness in [group[0].difference]
        )

    def _say(self, text: str) -> None:
        if not self._quiet:
            output.say(f"{clock(time.time())}: {text}")
            sys.stdout.flush()


def _time(seconds: float) -> str:
    return timestamp(seconds)[:19] + "Z"


def _packets(one: LastedDifference) -> str:
    more = f", and {counted(one.classes - 1, 'more class')} of packets alike" if one.classes > 1 else ""
    return f"{one.family}: {one.packet}{more}"


def _words(one: LastedDifference) -> str:
    declared = f" (on purpose: {one.declared})" if one.declared else ""
    return f"{_packets(one)}: {'; '.join(one.now)}; here: {'; '.join(one.then)}{declared}"


def _print(report: ShadowReport) -> None:
    compared = f"{counted(report.comparisons, 'comparison')} from {report.since} to {report.until}"
    output.say(f"{compared}, at last {report.sizes}:")
    for one in report.lasted:
        output.marked(output.NOTE if one.declared else output.BAD, _words(one))
        output.say(
            f"       from {one.first_seen} to {one.last_seen}, {'then equal' if one.ended else 'still different'}"
        )
    grace = Duration(report.grace_seconds)
    if not report.lasted:
        output.marked(output.OK, f"no difference lasted longer than {grace}")
    if report.transient:
        output.marked(output.NOTE, f"{counted(report.transient, 'difference')} disappeared within {grace}")
    if report.undecided:
        output.marked(output.NOTE, f"{counted(report.undecided, 'difference')} at the end, younger than {grace}")
    if report.not_compared:
        output.marked(output.NOTE, f"the comparison was impossible {counted(report.not_compared, 'time')}")
    for text in report.unknown:
        output.marked("?", f"not supported, so packets that reach this rule were not compared: {text}")
