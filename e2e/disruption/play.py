"""Causes one disruption after the other while clients send requests, and reports the time span of each."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from e2e import controlplane, nodes
from e2e.cluster import say
from e2e.controlplane import kubectl
from e2e.disruption.programs import Program
from e2e.disruption.results import Count, Row
from e2e.disruption.traffic import DRAIN, ROLLED
from e2e.errors import E2EError
from e2e.layout import FOLDER, NODES
from e2e.processes import Processes
from prove.asking import KINDS, LOST, Crowd

SETTLE: Final = 8.0
"""Seconds of traffic after the end of a disruption that are attributed to it."""

AWAY: Final = 120.0
"""Seconds without an API server."""

DOWN: Final = 3.0
"""Seconds between the kill of a program and its next start."""

CONTROL_PLANE: Final = ("controller-manager", "scheduler", "apiserver")


class Step(NamedTuple):
    """A disruption: its title and the function that causes it and returns when it is over."""

    title: str
    disrupt: Callable[[], None]


class Window(NamedTuple):
    """The time span of a step, in seconds of the monotonic clock: it ends where the next one begins."""

    title: str
    begin: float
    end: float


class Stage:
    """A cluster, and its possible disruptions."""

    def __init__(self, programs: Path, processes: Processes, own: Program) -> None:
        self._programs = programs
        self._processes = processes
        self._own = own

    def replace(self, *programs: Program, number: signal.Signals = signal.SIGTERM, pause: float = 0) -> None:
        """For each program end the kube-proxy of each node, then start the program on both, until it is healthy."""
        for program in programs:
            for node in NODES:
                self._processes.stop(f"kube-proxy-{node.name}", number)
            time.sleep(pause)
            nodes.start_proxies(program.command, program.mode, FOLDER, self._processes, program.flags)

    def stop_control_plane(self) -> None:
        """Stop the API server for AWAY seconds, and the controllers, which would mark the nodes as not ready."""
        for name in CONTROL_PLANE:
            self._processes.stop(name)
        time.sleep(AWAY)
        for name in reversed(CONTROL_PLANE):
            self._processes.resume(name)
            if name == "apiserver":
                controlplane.wait(self._programs, FOLDER, self._processes)

    def restart_kubelet(self) -> None:
        """Restart the kubelet of the first node, and wait for probes of its pods."""
        name = f"kubelet-{NODES[0].name}"
        self._processes.stop(name)
        time.sleep(DOWN)
        self._processes.resume(name)
        time.sleep(2 * SETTLE)

    def roll(self) -> None:
        """Replace all pods of ROLLED by a rolling update, and wait until the old pods are deleted."""
        for verb in (("restart",), ("status", "--timeout=180s")):
            kubectl(self._programs, FOLDER, "rollout", verb[0], f"deployment/{ROLLED}", *verb[1:])
        time.sleep(DRAIN)

    def journey(self, *way: Program) -> Iterator[Step]:
        """Yield the replacement of the first program by these programs, one after the other, and the way back."""
        for begin, programs in ((self._own, way), (way[-1], (*way[-2::-1], self._own))):
            yield Step(f"{begin} to {', then '.join(map(str, programs))}", partial(self.replace, *programs))

    def disruptions(self, ways: Mapping[str, Sequence[Program]]) -> dict[str, Sequence[Step]]:
        """Return the disruptions by name; the last one shows that changes are still served.

        `ways` are the programs that replace the first one, by the name of the disruption.
        """
        replaced = {name: tuple(self.journey(*way)) for name, way in ways.items()}
        kill = partial(self.replace, self._own, number=signal.SIGKILL, pause=DOWN)
        return {
            "baseline": (Step("nothing happens", lambda: time.sleep(SETTLE)),),
            **replaced,
            "kill": (Step(f"kill -9, start after {DOWN:.0f} s", kill),),
            "apiserver": (Step(f"the API server is away for {AWAY:.0f} s", self.stop_control_plane),),
            "kubelet": (Step("a kubelet restarts", self.restart_kubelet),),
            "rollout": (Step("rolling update of a Deployment", self.roll),),
        }

    def check(self) -> None:
        """Raise E2EError if a program of the cluster has ended unexpectedly."""
        self._processes.check()


def chosen(disruptions: Mapping[str, Sequence[Step]], focus: str) -> list[Step]:
    """Return the steps of the disruptions in whose names a regular expression is found. Raises E2EError for none."""
    names = [name for name in disruptions if re.search(focus, name)]
    if not names:
        raise E2EError(f"FOCUS={focus}: no such disruption; there are {', '.join(disruptions)}")
    return [step for name in names for step in disruptions[name]]


def play(stage: Stage, steps: Sequence[Step], crowd: Crowd, note: Callable[[Window], None]) -> None:
    """Cause the disruptions while a crowd of clients sends requests, and pass the time span of each to `note`.

    Raises E2EError.
    """
    with crowd:
        time.sleep(SETTLE)
        for step in steps:
            say(step.title)
            begin = time.monotonic()
            step.disrupt()
            time.sleep(SETTLE)
            stage.check()
            note(Window(step.title, begin, time.monotonic()))
        time.sleep(LOST)  # until the last requests have an answer or a timeout


def rows(crowd: Crowd, windows: Sequence[Window]) -> Iterator[Row]:
    """Yield a row for each time span. Raises E2EError if a client sent no request in one."""
    for title, begin, end in windows:
        for client, asked in crowd.asked.items():
            if not any(begin <= each.at < end for each in asked):
                raise E2EError(f"{title}: {client} asked nothing")
        counts = {}
        for kind in KINDS:
            found = crowd.figures(kind, begin, end)
            counts[kind] = Count(found.asked, found.failed, round(1000 * found.gap))
        yield Row(title, round(end - begin), counts, crowd.failures(begin, end))
