"""Changes of recorded rules of the Go kube-proxy are found, unless they change no packet's outcome."""

from __future__ import annotations

import random
import re

import pytest

from kubeproxy.meaning import nftables
from kubeproxy.meaning.rules import CompiledRules
from kubeproxy.meaning.shapes import Shapes
from support import recorded_rules
from support.effort import stride
from support.listed_rules import table
from support.places import ROOT
from support.recorded_rules import HARMLESS, MUTATIONS, PROGRAMS, Line, written
from support.rulesets import NODE, PLACE, compared, iptables_rules

RECORDINGS = sorted((ROOT / "tests/recordings/iptables-save").glob("*.4"))
TO_ENDPOINT = re.compile(r"-A KUBE-SEP-\S+ .*-j DNAT --to-destination")


@pytest.mark.parametrize("file", RECORDINGS, ids=lambda file: file.name)
def test_a_ruleset_equals_itself(file) -> None:
    rules = iptables_rules(file.read_text())
    found = compared(rules, rules)
    assert (found.causes, found.unknown) == ((), ())
    assert found.classes > 1


@pytest.mark.parametrize("file", RECORDINGS[:4], ids=lambda file: file.name)
def test_each_endpoint_that_goes_is_found(file) -> None:
    lines = file.read_text().splitlines()
    before = iptables_rules("\n".join(lines))
    jumps = {line.rpartition(" -j ")[2] for line in lines if "-j KUBE-SEP-" in line and not line.startswith(":")}
    used = [n for n, line in enumerate(lines) if TO_ENDPOINT.match(line) and line.split()[1] in jumps]
    assert used
    for number in used[:: stride(1)]:
        after = iptables_rules("\n".join([*lines[:number], *lines[number + 1 :]]))
        assert compared(before, after).causes, lines[number]


def _mutated(lines: list[str], draw: random.Random) -> list[str]:
    """Delete a rule of kube-proxy, change an address or a port in it, or exchange it with the previous rule."""
    at = draw.choice([number for number, line in enumerate(lines) if line.startswith("-A KUBE-")])
    kind = draw.randrange(4)
    if kind == 0:
        return [*lines[:at], *lines[at + 1 :]]
    if kind == 1:
        return [*lines[: at - 1], lines[at], lines[at - 1], *lines[at + 1 :]]
    pattern = r"()(10\.\d+\.\d+\.\d+)" if kind == 2 else r"(dport |:)(\d+)"
    others = sorted({found[1] for found in re.findall(pattern, "\n".join(lines))})
    return [*lines[:at], re.sub(pattern, lambda found: found[1] + draw.choice(others), lines[at]), *lines[at + 1 :]]


@pytest.mark.parametrize("seed", range(12)[:: stride(1)])
def test_the_result_is_that_of_all_units_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    lines = draw.choice(RECORDINGS).read_text().splitlines()
    rules = [iptables_rules("\n".join(each)) for each in (_mutated(lines, draw), _mutated(lines, draw))]

    def result() -> tuple[object, ...]:
        found = compared(*rules)
        return found.classes, sorted((cause.witness.text, cause.classes) for cause in found.causes), found.unknown

    by_shape = result()
    monkeypatch.setattr(Shapes, "shape", lambda _, unit: unit)
    assert result() == by_shape


def test_a_share_that_changes_is_found() -> None:
    text = (ROOT / "tests/recordings/iptables-save/0001-0.4").read_text()
    changed = text.replace("--probability 0.50000000000", "--probability 0.40000000000")
    assert compared(iptables_rules(text), iptables_rules(changed)).causes


def recorded(program: str, lines: list[Line]) -> CompiledRules:
    """Return recorded rules of a node with the address in PLACE."""
    text = written(lines).replace("192.168.100.2", NODE)
    return CompiledRules(nftables.compiled(table(text), PLACE)) if program == "nftables" else iptables_rules(text)


@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_random_mutation_is_found_unless_it_is_harmless(program: str, part: int) -> None:
    before = recorded(program, recorded_rules.lines(program))
    whole = list(recorded_rules.mutations(program))
    for number in range(part * len(whole) // 5, (part + 1) * len(whole) // 5)[:: stride(1)]:
        kind, at, lines = whole[number]
        found = compared(before, recorded(program, lines))
        assert not found.unknown
        assert bool(found.causes) is (number not in HARMLESS[program]), (number, kind, at)


def test_of_all_mutations_200_are_found() -> None:
    assert sum(MUTATIONS - len(HARMLESS[program]) for program in PROGRAMS) >= 200


STICKY = {
    "nftables": r"\s*ip saddr @affinity-\S+ goto .*",
    "iptables": r"-A .* -m recent --rcheck .*",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_lookup_of_a_client_that_goes_is_found(program: str) -> None:
    lines = recorded_rules.lines(program)
    before = recorded(program, lines)
    lookups = [number for number, line in enumerate(lines) if re.fullmatch(STICKY[program], line.text)]
    places = [lines[number].place for number in lookups]
    lookups = [number for number in lookups if places.count(lines[number].place) > 1]  # if there are several candidates
    assert len(lookups) == 10
    for number in lookups[:: stride(1)]:
        causes = compared(before, recorded(program, [*lines[:number], *lines[number + 1 :]])).causes
        assert causes
        assert all("remembered" in cause.witness.text for cause in causes)
