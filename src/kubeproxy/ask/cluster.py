"""Commands use this module to ask the API server, with the proxy's credentials, for names of pods and for the newest
versions of objects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from kubeproxy.api.http import HttpClient
from kubeproxy.api.kubeconfig import load_cluster
from kubeproxy.api.lists import Versions, pod_names, versions
from kubeproxy.ask.checks import contact
from kubeproxy.ask.facts import Facts, ProgrammedService
from kubeproxy.ask.kernel.looks import Ask
from kubeproxy.backends.mode import FlowsEnd
from kubeproxy.backends.state import Finding, Kind
from kubeproxy.errors import KubeProxyError, NoAnswerError
from kubeproxy.features import PROXY_NAME
from kubeproxy.model.plan import ServiceName
from kubeproxy.setup import modes

T = TypeVar("T")

TIMEOUT = 10.0  # seconds to wait for the API server
PODS_TIMEOUT = 5.0  # seconds to wait for the names of pods
TRIES = 5
PAUSE = 0.2  # seconds between two comparisons; an event reaches the proxy in milliseconds
_PLACE = "the API server"


def ask(facts: Facts, question: Callable[[HttpClient], Awaitable[T]], timeout: float) -> T:
    """Return the API server's answer to a request. Raises NoAnswerError after `timeout` seconds."""
    kubeconfig = facts.configuration().client_connection.kubeconfig

    async def answer() -> T:
        client = HttpClient(load_cluster(kubeconfig, facts.master))
        try:
            async with asyncio.timeout(timeout):
                return await question(client)
        finally:
            await client.close()

    try:
        return asyncio.run(answer())
    except TimeoutError:
        raise NoAnswerError(f"the API server did not answer within {timeout:.0f} s") from None
    except (KubeProxyError, OSError) as error:
        raise NoAnswerError(f"the API server could not be asked: {error}") from error


def pods(facts: Facts, service: ServiceName | None) -> tuple[Mapping[bytes, str], str]:
    """Return the names of a Service's pods, or of all pods, by packed address, and the reason why names are unknown."""
    if facts.manifests:
        return {}, "the objects come from files"
    try:
        return ask(facts, partial(pod_names, service=service), PODS_TIMEOUT), ""
    except NoAnswerError as error:
        return {}, str(error)


def behind(held_by: Ask, facts: Facts, names: Sequence[ServiceName]) -> list[Finding]:
    """Return the objects of these Services, or of all Services, that are outdated in the proxy. Raises NoAnswerError.
    An object is outdated if TRIES comparisons with the API server, PAUSE seconds apart, find the same difference."""
    before: list[Finding] = []
    for attempt in range(TRIES):
        if attempt:
            time.sleep(PAUSE)
        read: dict[ServiceName, Versions] = {}
        for name in names or (None,):
            read |= ask(facts, partial(versions, service=name, proxy_name=PROXY_NAME.value(facts.world)), TIMEOUT)
        held = {one.name: one for one in held_by(names)}
        now = list(_differences(read, held, _staleness(facts)))
        before = [finding for finding in now if finding in before] if attempt else now
        if not before:
            return []
    return before


def late(facts: Facts) -> str:
    """Return the fix for objects that are outdated in the proxy."""
    for finding in contact.reached(facts.reach, quiet=contact.SILENT) if facts.reach is not None else ():
        return f"{finding.what}: {finding.fix}"
    relayed = ", but those that it relays end" if modes.named(facts.mode).flows_end is FlowsEnd.PROXY else ""
    return (
        "if `kube-proxy changes` shows that the object cannot be used, correct the object; else restart the proxy, "
        f"which reads all objects again: its rules stay in the kernel, and established connections continue{relayed}"
    )


def _staleness(facts: Facts) -> str:
    watched = facts.reach.watched if facts.reach is not None else ()
    stale = [f"{one.resource} for {one.stale:.0f} s" for one in watched if one.stale >= 1]
    return f"; its watches received nothing about {', '.join(stale)}" if stale else ""


def _differences(
    read: Mapping[ServiceName, Versions], held: Mapping[ServiceName, ProgrammedService], stale: str
) -> Iterator[Finding]:
    for name in sorted(read.keys() | {n for n, one in held.items() if one.version is not None}):
        there, ours = read.get(name), held.get(name)
        if there is None:
            yield Finding(
                name,
                Kind.EXTRA,
                "the Service, which is deleted but still exists in the proxy",
                _PLACE,
                present=f"deleted{stale}",
            )
        elif ours is None or ours.version is None:
            yield Finding(name, Kind.MISSING, "the Service, which is missing in the proxy", _PLACE, present=stale[2:])
        else:
            known: dict[str, tuple[str | None, str | None]] = {"the Service": (there.service, ours.version)}
            for piece in sorted(there.slices.keys() | ours.slices.keys()):
                known[f"EndpointSlice {piece}"] = (there.slices.get(piece), ours.slices.get(piece))
            for what, (newest, present) in known.items():
                if newest != present:
                    wanted, has = (f"resourceVersion {v}" if v is not None else "none" for v in (newest, present))
                    yield Finding(name, Kind.DIFFERENT, f"{what} as the proxy has it", _PLACE, wanted, f"{has}{stale}")
