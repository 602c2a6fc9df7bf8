"""Questions in a row from one place to one front, and who answered them. Knows no rich and no expectations."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass

from lab.cluster import LabCluster
from lab.netns import run_in_async
from lab.probes import Answer, NoAnswer, ask

TIMEOUT = 1.0
"""Seconds after which a question counts as unanswered; answers take well under a millisecond."""


@dataclass(frozen=True, slots=True)
class Tally:
    """The answers to some questions. `failure` is why the last one was not answered; no more were asked after it."""

    answers: tuple[Answer, ...]
    failure: NoAnswer | None

    @property
    def asked(self) -> int:
        """How many questions there were."""
        return len(self.answers) + (self.failure is not None)

    @property
    def counts(self) -> Counter[str]:
        """How often each pod answered."""
        return Counter(a.pod for a in self.answers)

    @property
    def pods(self) -> set[str]:
        """Who answered."""
        return {a.pod for a in self.answers}

    @property
    def clients(self) -> set[str]:
        """The source addresses that the pods saw."""
        return {a.client for a in self.answers}


def ask_until_wrong(proto: str, address: str, port: int, count: int, patience: float, source: str | None) -> Tally:
    """Up to `count` questions from the thread's namespace; the first without an answer is the last."""
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
    """Ask `count` times from a place of the cluster, from the address `source` of it where one is given."""
    work = functools.partial(ask_until_wrong, proto, address, port, count, patience, source)
    return await run_in_async(cluster.namespace_of(place), work)
