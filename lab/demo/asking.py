"""Sends several requests from one place to one Service address, and records which pods answer."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass

from lab.cluster import LabCluster
from lab.netns import run_in_async
from lab.probes import Answer, NoAnswer, ask

TIMEOUT = 1.0
"""Seconds after which a request counts as unanswered; answers take well under a millisecond."""


@dataclass(frozen=True, slots=True)
class Tally:
    """The answers to several requests. `failure` is the reason why the last request failed, if it failed."""

    answers: tuple[Answer, ...]
    failure: NoAnswer | None

    @property
    def asked(self) -> int:
        """The number of requests."""
        return len(self.answers) + (self.failure is not None)

    @property
    def counts(self) -> Counter[str]:
        """The number of answers of each pod."""
        return Counter(a.pod for a in self.answers)

    @property
    def pods(self) -> set[str]:
        """The names of the pods that answered."""
        return {a.pod for a in self.answers}

    @property
    def clients(self) -> set[str]:
        """The source addresses that the pods reported."""
        return {a.client for a in self.answers}


def ask_until_wrong(proto: str, address: str, port: int, count: int, patience: float, source: str | None) -> Tally:
    """Send up to `count` requests from the thread's namespace; stop after the first request without an answer."""
    answers: list[Answer] = []
    for _ in range(count):
        said = ask(proto, address, port, patience, source)
        if not isinstance(said, Answer):
            return Tally(tuple(answers), said)
        answers.append(said)
    return Tally(tuple(answers), None)


async def tally(
    cluster: LabCluster,
    place: str,
    proto: str,
    address: str,
    port: int,
    count: int,
    patience: float = TIMEOUT,
    source: str | None = None,
) -> Tally:
    """Send `count` requests from a place of the cluster, from the address `source` if it is not empty."""
    work = functools.partial(ask_until_wrong, proto, address, port, count, patience, source)
    return await run_in_async(cluster.namespace_of(place), work)
