"""Replays the inputs that failed once, and the initial inputs of fuzzing: see support/fuzz."""

from __future__ import annotations

import pytest

from support.fuzz.judge import judge, weigh
from support.fuzz.large import CASES, SIZE, made
from support.fuzz.targets import CORPUS, TARGETS, inputs

MOST = 300_000
"""Maximum bytes of all inputs together; other findings of fuzzing remain outside of the repository."""


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", TARGETS)
def test_every_input_that_is_kept_is_read_or_refused(name: str) -> None:
    read = TARGETS[name].read
    for data in inputs(name):
        judge(read, data)
        weigh(read, data)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", TARGETS)
def test_every_beginning_of_an_input_is_read_or_refused(name: str) -> None:
    for data in inputs(name):
        for end in range(0, len(data), 1 + len(data) // 40):
            judge(TARGETS[name].read, data[:end])


def test_each_target_has_inputs_and_no_other_has() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} == TARGETS.keys()


def test_the_inputs_are_small() -> None:
    assert sum(path.stat().st_size for path in CORPUS.rglob("*")) < MOST


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_large_inputs_are_read_in_time(case: tuple[str, str]) -> None:
    judge(TARGETS[case[0]].read, made(case, SIZE >> 4))
