"""Recognises the intended differences of ipvs mode from iptables mode in the failures that run.py prints.

docs/modes.md lists the same differences. The expectations are recordings of the Go kube-proxy in iptables mode.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

# Addresses of the endpoints on the node under test: its pods, and the node itself (topology.py of the conformance
# cases).
LOCAL = re.compile(r"(10\.244\.0\.\d+|192\.168\.100\.2|fd00:244::[0-9a-f]+|fd00:100::2)\|")

_PROBE = re.compile(r"  seed (\d+) step (\d+): (\S+) (\S+):(\S*) from (\S+) to (\S+) (\S+):(\d+)$")
_EXPECTED = re.compile(r"      expected (.*)$")
_SAW = re.compile(r"      saw      (.*)$")
_CASE = re.compile(r"(FAIL|ok  ) (\S+\.json) (\d+) probes")
_TROUBLE = re.compile(r"  seed \d+: ")
_SUM = re.compile(r"\S+: \d+/\d+ cases hold")


class Difference(NamedTuple):
    """A probe whose answer differs from the recorded one; the answers are those of run.py's output."""

    case: Mapping[str, Any]
    step: int
    what: str
    service: str
    origin: str
    address: str
    expected: Any
    saw: Any


def explain(difference: Difference) -> str:
    """Return the reason why a difference is intended, '' if it is not."""
    return next((reason for reason, applies in REASONS.items() if applies(difference)), "")


def _loopback(d: Difference) -> bool:
    return d.what == "nodeport-lo" and d.saw in ("refused", "dropped")


def _one_pool(d: Difference) -> bool:
    expected, saw = (each.get("endpoints") if isinstance(each, dict) else None for each in (d.expected, d.saw))
    services = {each["metadata"]["name"]: each["spec"] for each in d.case["steps"][d.step]["objects"]["services"]}
    if services[d.service].get("externalTrafficPolicy") != "Local" or d.what == "cluster" or d.origin.startswith("ext"):
        return False
    if not expected or not saw:
        return False
    return all(LOCAL.match(endpoint) and expected.get(endpoint) == sources for endpoint, sources in saw.items())


def _nobody(d: Difference) -> bool:
    if (d.expected, d.saw) != ("dropped", "refused"):
        return False
    kind = "IPv6" if ":" in d.address else "IPv4"
    slices = [
        each
        for each in d.case["steps"][d.step]["objects"]["endpointslices"]
        if each.get("addressType") == kind
        and each["metadata"].get("labels", {}).get("kubernetes.io/service-name") == d.service
    ]
    conditions = [endpoint.get("conditions") or {} for each in slices for endpoint in each["endpoints"]]
    return not any(
        one.get("ready") is not False or (one.get("serving") and one.get("terminating")) for one in conditions
    )


def _not_offered(d: Difference) -> bool:
    chosen = d.case["config"].get("nodePortAddresses")
    return bool(chosen) and d.what.startswith("nodeport") and (d.expected, d.saw) == ("dropped", "refused")


REASONS = {
    "NodePorts do not answer on loopback addresses": _loopback,
    "under policy Local pods and the node get this node's endpoints": _one_pool,
    "a Service without endpoints refuses everybody on every front": _nobody,
    "a NodePort on an address that nodePortAddresses leaves out is a closed port": _not_offered,
}


TURNS = "rr takes turns over all clients: some that ask at the same time meet few of the endpoints"


class Partial(NamedTuple):
    """A probe that reached only some of the endpoints. It is a failure if all clients of an address reach only few."""

    step: int
    front: tuple[str, str, int]
    report: str


def is_partial(expected: Any, saw: Any) -> bool:
    """Return whether only some of the expected endpoints answered, and saw the expected sources."""
    wanted, met = (each.get("endpoints") if isinstance(each, dict) else None for each in (expected, saw))
    return bool(wanted and met and all(wanted.get(endpoint) == sources for endpoint, sources in met.items()))


def askers(case: Mapping[str, Any], step: int, front: tuple[str, str, int]) -> int:
    """Return the number of probes of a step to an address with several expected endpoints."""
    played = case["steps"][step]
    return sum(
        (probe.get("proto"), probe["dst"], probe["port"]) == front
        and isinstance(answer, dict)
        and len(answer.get("endpoints", ())) > 1
        for probe, answer in zip(played["probes"], played["expected"]["iptables"], strict=True)
    )


class Judge:
    """Reads run.py's output line by line and returns the lines to print. `held` are the names of successful cases."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._probe: re.Match[str] | None = None
        self._expected = ""
        self._wrong_of_case = self._explained_of_case = 0
        self._partial: list[Partial] = []
        self.held: list[str] = []
        self.reasons: Counter[str] = Counter()

    def read(self, line: str) -> str:
        """Return the text to print for a line, '' for nothing."""
        line = line.rstrip("\n")
        if probe := _PROBE.match(line):
            self._probe = probe
        elif expected := _EXPECTED.match(line):
            self._expected = expected[1]
        elif (saw := _SAW.match(line)) and self._probe is not None:
            return self._judge(self._probe, self._expected, saw[1])
        elif case := _CASE.match(line):
            return self._close(case)
        elif not _SUM.match(line):
            if _TROUBLE.match(line):
                self._wrong_of_case += 1
            return f"{line}\n"
        return ""

    def _judge(self, probe: re.Match[str], expected: str, saw: str) -> str:
        case = _load(self._folder / f"{int(probe[1]):04d}.json")
        answers = json.loads(expected), json.loads(saw)
        reason = explain(Difference(case, int(probe[2]), probe[3], probe[4], probe[6], probe[8], *answers))
        if reason:
            self.reasons[reason] += 1
            self._explained_of_case += 1
            return ""
        report = f"{probe[0]}\n      expected {expected}\n      saw      {saw}\n"
        if is_partial(*answers):
            self._partial.append(Partial(int(probe[2]), (probe[7], probe[8], int(probe[9])), report))
            return ""
        self._wrong_of_case += 1
        return report

    def _settle_partial(self, case: Mapping[str, Any]) -> str:
        """Distinguish round robin from endpoints that no client reaches; return the reports of the latter."""
        counts = Counter((each.step, each.front) for each in self._partial)
        missing = [
            each for each in self._partial if counts[each.step, each.front] >= askers(case, each.step, each.front)
        ]
        self._wrong_of_case += len(missing)
        self._explained_of_case += len(self._partial) - len(missing)
        self.reasons[TURNS] += len(self._partial) - len(missing)
        self._partial = []
        return "".join(each.report for each in missing)

    def _close(self, case: re.Match[str]) -> str:
        missing = self._settle_partial(_load(self._folder / case[2])) if self._partial else ""
        word, counts = ("FAIL" if self._wrong_of_case else "ok  "), (self._wrong_of_case, self._explained_of_case)
        if not self._wrong_of_case:
            self.held.append(case[2])
        self._wrong_of_case = self._explained_of_case = 0
        return f"{missing}{word} {case[2]} {case[3]} probes, {counts[0]} wrong, {counts[1]} differ on purpose\n"


def summary(judges: Sequence[Judge], mode: str, cases: int) -> tuple[str, bool]:
    """Return the summary of all cases, and whether all of them hold."""
    held = sum(len(judge.held) for judge in judges)
    reasons = sum((judge.reasons for judge in judges), Counter[str]())
    lines = [f"{mode}: {held}/{cases} cases hold, {reasons.total()} probes differ on purpose:"]
    lines += [f"  {count:4} {reason}" for reason, count in reasons.most_common()]
    return "\n".join(lines), held == cases


@lru_cache
def _load(path: Path) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(path.read_text())
    return found
