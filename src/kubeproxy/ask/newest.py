"""Whether the proxy has the newest versions of objects that the API server has, and if not, how far it is behind."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from kubeproxy.api.versions import Versions, versions
from kubeproxy.ask import api
from kubeproxy.ask.facts import Facts, ProgrammedService
from kubeproxy.ask.kernel.looks import Ask
from kubeproxy.backends.examination import Finding, Kind
from kubeproxy.errors import KubeProxyError
from kubeproxy.model.plan import ServiceName

PATIENCE = 10.0
"""Seconds to wait for the API server."""
TRIES = 5
PAUSE = 0.2
"""Seconds between two tries: an event takes milliseconds to the proxy."""

_PLACE = "the API server"

Read = Mapping[ServiceName, Versions]


class Unreachable(Exception):  # noqa: N818 - not an error of ours; the message says why
    """The API server could not be asked."""


def behind(ask: Ask, facts: Facts, names: Sequence[ServiceName]) -> list[Finding]:
    """Return in what the proxy is behind the API server, of these Services or of all. Raises Unreachable.

    Only what it is still behind in after a second, with the same version at the server, counts.
    """
    before: list[Finding] = []
    for attempt in range(TRIES):
        if attempt:
            time.sleep(PAUSE)
        read: dict[ServiceName, Versions] = {}
        for name in names or (None,):
            read |= _read(facts, name)
        held = {one.name: one for one in ask(names)}
        now = list(_differences(read, held, _staleness(facts)))
        before = [finding for finding in now if finding in before] if attempt else now
        if not before:
            return []
    return before


def _read(facts: Facts, name: ServiceName | None) -> Read:
    try:
        return api.ask(facts, partial(versions, service=name), PATIENCE)
    except api.NotInTimeError as error:
        raise Unreachable(str(error)) from None
    except (KubeProxyError, OSError) as error:
        raise Unreachable(f"the API server could not be asked: {error}") from error


def _staleness(facts: Facts) -> str:
    """Return how the proxy's watches stand, in words."""
    watched = facts.reach.watched if facts.reach is not None else ()
    stale = [f"{one.resource} for {one.stale:.0f} s" for one in watched if one.stale >= 1]
    return f"; its watches heard nothing of {', '.join(stale)}" if stale else ""


def _differences(read: Read, held: Mapping[ServiceName, ProgrammedService], stale: str) -> Iterator[Finding]:
    for name in sorted(read.keys() | {n for n, one in held.items() if one.version is not None}):
        there, ours = read.get(name), held.get(name)
        if there is None:
            yield Finding(name, Kind.EXTRA, "the Service, which the proxy still has", _PLACE, present=f"deleted{stale}")
        elif ours is None or ours.version is None:
            yield Finding(name, Kind.MISSING, "the Service, which the proxy does not have", _PLACE, present=stale[2:])
        else:
            known: dict[str, tuple[str | None, str | None]] = {"the Service": (there.service, ours.version)}
            for piece in sorted(there.slices.keys() | ours.slices.keys()):
                known[f"EndpointSlice {piece}"] = (there.slices.get(piece), ours.slices.get(piece))
            for what, (newest, present) in known.items():
                if newest != present:
                    wanted, has = (f"resourceVersion {v}" if v is not None else "none" for v in (newest, present))
                    yield Finding(name, Kind.DIFFERENT, f"{what} as the proxy has it", _PLACE, wanted, f"{has}{stale}")
