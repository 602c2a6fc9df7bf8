"""kube-proxy companion: runs checks and counts connections for the page of a running proxy, in a separate process.

The proxy starts this process with the lowest priority. The process writes each result as a line of JSON to standard
output, until standard input ends. `problems` runs the checks of doctor for each input line; `flows` counts connections
every second; `question` answers the question in one input line, as why does."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from kubeproxy.ask.checks.doctor import answer, examine
from kubeproxy.ask.connection import tell
from kubeproxy.ask.flows.owners import COMPLETE, FollowedNode, Fronts, Owners, nodeport_addresses
from kubeproxy.ask.flows.sampling import Beginnings, ProcessorShare, Sampled
from kubeproxy.ask.source import knowing, source
from kubeproxy.backends.mode import FlowsEnd
from kubeproxy.commands import UNKNOWN, YES
from kubeproxy.errors import KubeProxyError
from kubeproxy.kernel.conntrack.tracked import BEGINNINGS, NOT_ANNOUNCED, Events, Wanted, announced
from kubeproxy.model.addresses import Family
from kubeproxy.setup import host, modes

PAGE: Final = ProcessorShare(0.01, 0.003)
"""The upper and lower bound of CPU use for following connections while a page is open (see ProcessorShare)."""
_EACH: Final = 1.0  # seconds between two lines of flows
_AGAIN: Final = 5.0  # seconds between two checks whether the kernel announces connections
_EXPENDABLE: Final = "500"
"""oom_score_adj of this process. With the value inherited from the proxy, the kernel would kill this process last."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("look", choices=("problems", "flows", "question"))


def run(given: argparse.Namespace) -> int:
    with contextlib.suppress(OSError):
        os.nice(10)
        Path("/proc/self/oom_score_adj").write_text(_EXPENDABLE)
    try:
        looks = {"problems": _problems, "flows": lambda _: _flows(_lines_of_input()), "question": _question}
        looks[given.look](given)
    except EOFError:
        return YES
    except KubeProxyError as error:
        _say({"error": str(error)})
        return UNKNOWN
    return YES


def _say(message: Any) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def _problems(given: argparse.Namespace) -> None:
    for _ in sys.stdin.buffer:
        spent = time.process_time()
        _say(answer(*examine(given)) | {"processorSeconds": time.process_time() - spent})


def _question(given: argparse.Namespace) -> None:
    asked = source(given)
    facts = knowing(asked)
    explained = asked.why(**msgspec.json.decode(sys.stdin.buffer.readline(), type=dict[str, str]))
    _say(tell(asked, facts, explained).fields())


Lines = Iterator[bytes | None]


def _lines_of_input() -> Lines:
    """Yield the lines of standard input; yield None while no complete line has arrived. Raises EOFError at the end."""
    os.set_blocking(0, False)
    rest = b""
    while True:
        try:
            data = os.read(0, 1 << 16)
        except BlockingIOError:
            yield None
            continue
        if not data:
            raise EOFError
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def _next(lines: Lines) -> bytes:
    """Wait for a line and return it. Raises EOFError at the end of the input."""
    while (line := next(lines)) is None:
        select.select([0], [], [])
    return line


def _flows(lines: Lines) -> None:
    node = msgspec.json.decode(_next(lines), type=FollowedNode)
    mode = modes.named(node.mode)
    asked = {Family(number): given for number, given in node.nodeports.items()}
    owners = Owners(nodeport_addresses(asked, host.packed_local_addresses(tuple(Family))))
    while (line := _next(lines)) != COMPLETE:
        _put(owners, line)
    while not announced():
        _say(_flow_message(error=f"nothing can be followed: {NOT_ANNOUNCED}"))
        end = time.monotonic() + _AGAIN
        while time.monotonic() < end:
            _hear(lines, owners)
            time.sleep(_EACH)
    counts = Beginnings(owners, endpoints=mode.flows_end is FlowsEnd.ENDPOINTS)
    with Events.listen(Wanted(mode.tracked_as, mode.tracked_as), (BEGINNINGS,)) as events:
        _follow(events, counts, lines, owners)


def _follow(events: Events, counts: Beginnings, lines: Lines, owners: Owners) -> None:
    """Write a line about new connections every second. Raises EOFError at the end of the input, or ApplyError."""
    sampled = Sampled(events, budget=PAGE)
    began = time.monotonic()
    while True:
        one_in, lost = events.one_in, sampled.lost
        for event, weight in sampled.for_a_while(began + _EACH):
            counts.add(event.entry, weight)
        _hear(lines, owners)
        if (now := time.monotonic()) >= began + _EACH:
            seconds, began = now - began, now
            _say(_flow_message(seconds, one_in, counts.take(seconds), lost=sampled.lost - lost))


def _flow_message(
    seconds: float = 0.0, one_in: int = 1, services: dict[str, Any] | None = None, *, lost: int = 0, error: str = ""
) -> dict[str, Any]:
    return {
        "at": time.time(),
        "seconds": round(seconds, 3),
        "sampled": 1 / one_in,
        "lost": lost,
        "services": services or {},
        "error": error,
    }


def _hear(lines: Lines, owners: Owners) -> None:
    for line in iter(partial(next, lines), None):
        _put(owners, line)


def _put(owners: Owners, line: bytes) -> None:
    told = msgspec.json.decode(line, type=Fronts)
    owners.put(told.service, told.ports)
