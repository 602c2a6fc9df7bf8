"""Renders docs/conformance.md from the result files: a row for each test, a column for each program and mode."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from e2e.results import Result, Verdict

PAGE: Final = Path(__file__).parent.parent / "docs/conformance.md"

COLUMNS: Final = (("ours", "nftables"), ("ours", "iptables"), ("go", "nftables"), ("go", "iptables"))
_TITLES: Final = {"ours": "ours", "go": "Go"}

ENVIRONMENT: Final = {
    r"should only target nodes with endpoints": "asks an IPv6 health port of an IPv4 Service",
}
"""Reasons for failures with every kube-proxy, by a pattern of the test's name, if the Go kube-proxy fails too."""

_HEAD: Final = """# Upstream's end-to-end tests

This page shows the results of Kubernetes' own tests of Services (`test/e2e/network`) on a cluster of two nodes. The
cluster has kube-apiserver, kubelet and containerd, in network namespaces of one machine, with substitutes for cluster
DNS and for a cloud's load balancer. The Go kube-proxy of the same source tree runs in the same environment. `python -m
e2e page` wrote this page from recorded results.

## How to repeat it

Run these commands as root, on Debian 12 or later. They need either Go and a source tree of Kubernetes, or a folder of
the programs of Kubernetes:

    make e2e KUBERNETES=/path/to/kubernetes                     # ours, nftables mode
    make e2e KUBERNETES=DIR PROXY=go MODE=iptables
    make e2e KUBERNETES=DIR FOCUS=affinity                      # some tests; the page does not change
    make e2e KUBERNETES=DIR RESUME=1                            # after an interruption, or a change of the program
    make e2e KUBERNETES=DIR WITH="--parallel 8 --minutes 20"    # 8 tests at a time, each for at most 20 minutes

- The command lists missing Debian packages, and builds missing programs of the source tree into `_output/e2e`.
- The command uses **etcd** from the folder of programs, otherwise from `PATH`. With an etcd 3.4 before 3.4.31 (Debian
  12 has 3.4.23), or an etcd 3.5 before 3.5.13, tests of rolling updates fail; the command prints a warning when it
  starts. Use a later release of etcd.
- Each test runs in a separate process. The command ends a test that hangs, and runs a failed test again later, when no
  other test runs in the cluster. The page shows the last attempt and mentions the first failure. Tests of rolling
  updates take 10 to 12 minutes.
- The command writes the result of each test at once. `RESUME=1` keeps the results of tests that passed, and runs the
  failed tests and the tests without a result.
- At its end, even after an error or Ctrl-C, the command removes the cluster. The last run's logs remain in
  `/var/tmp/kpe2e-logs`.
"""


def render(results: Sequence[Result]) -> str:
    """Return the page; it lists the programs and modes without a run."""
    by_column = {(each.proxy, each.mode): each for each in results}
    columns = [by_column[column] for column in COLUMNS if column in by_column]
    missing = [f"{_TITLES[proxy]} {mode}" for proxy, mode in COLUMNS if (proxy, mode) not in by_column]
    lines = [_HEAD]
    if columns:
        lines += [*_runs(columns), ""]
    if missing:
        lines += [f"No run has been recorded: {', '.join(missing)}.", ""]
    if columns:
        lines += [*_incomplete(columns), *_failures(columns), *_retried(columns), *_tests(columns), *_left_out(columns)]
    return "\n".join(lines).rstrip() + "\n"


def _title(result: Result) -> str:
    return f"{_TITLES[result.proxy]} {result.mode}"


def _runs(columns: Sequence[Result]) -> Iterator[str]:
    yield "## Runs\n"
    yield "| kube-proxy | date | commit | minutes | passed | failed | skipped | not run |"
    yield "|---|---|---|---:|---:|---:|---:|---:|"
    for each in columns:
        counts = each.count("passed"), len(each.failed), each.count("skipped"), len(each.pending)
        cells = [_title(each), ", ".join(each.dates), ", ".join(each.commits), f"{each.seconds / 60:.0f}"]
        yield f"| {' | '.join([*cells, *map(str, counts)])} |"
    yield ""
    for each in columns:
        known = ", ".join(f"{name} {version}" for name, version in each.versions.items() if version)
        yield f"- {_title(each)}: {known}"


def _incomplete(columns: Sequence[Result]) -> Iterator[str]:
    for each in columns:
        if each.pending:
            done = len(each.tests)
            yield f"**{_title(each)} was interrupted** after {done} of {done + len(each.pending)} tests.\n"


def _tests(columns: Sequence[Result]) -> Iterator[str]:
    names = sorted({name for each in columns for name in (*each.tests, *each.pending)})
    group = ""
    for name in names:
        first = _group(name)
        if first != group:
            group = first
            yield f"\n## {group}\n"
            yield f"| test | {' | '.join(map(_title, columns))} |"
            yield f"|---|{'---|' * len(columns)}"
        cells = [_word(each.tests.get(name)) for each in columns]
        yield f"| {_cell(name.partition(group)[2])} | {' | '.join(cells)} |"


def _group(name: str) -> str:
    """Return the area of a test: the words after [sig-network], up to the first word that is no part of a title."""
    rest = name.removeprefix("[sig-network] ")
    found = re.match(r"(?:\[[^\]]*\] ?)+|(?:[A-Z]\w*(?::\w+)?[ ]?)+", rest)
    return (found[0] if found else rest.split()[0]).strip()


def _word(verdict: Verdict | None) -> str:
    if verdict is None:
        return "not run"
    tried = f" ({verdict.tries} tries)" if verdict.tries > 1 else ""
    return (verdict.state if verdict.good else f"**{verdict.state}**") + tried


def _cell(text: str) -> str:
    return text.strip().replace("|", "\\|").replace("<", "&lt;")


def _short(name: str) -> str:
    return name.removeprefix("[sig-network] ")


def _failures(columns: Sequence[Result]) -> Iterator[str]:
    failed = sorted({name for each in columns for name in each.failed})
    if not failed:
        return
    yield "## Failures\n"
    yield "| test | fails with | reason |"
    yield "|---|---|---|"
    for name in failed:
        runs = [each for each in columns if name in each.failed]
        reason = explained(name) if any(each.proxy == "go" for each in runs) else ""
        cells = [_short(name), ", ".join(map(_title, runs)), reason or runs[0].tests[name].reason]
        yield f"| {' | '.join(map(_cell, cells))} |"
    yield ""


def _retried(columns: Sequence[Result]) -> Iterator[str]:
    rows = [
        (_short(name), _title(each), verdict.first)
        for each in columns
        for name, verdict in each.tests.items()
        if verdict.state == "passed" and verdict.tries > 1
    ]
    if rows:
        yield "## Passed alone, after a failure with parallel tests\n"
        yield "| test | kube-proxy | the first failure |"
        yield "|---|---|---|"
        yield from (f"| {' | '.join(map(_cell, row))} |" for row in sorted(rows))
        yield ""


def _left_out(columns: Sequence[Result]) -> Iterator[str]:
    reasons = {name: reason for each in columns for name, reason in each.left_out.items()}
    yield "\n## Tests that are left out\n"
    yield "| test | reason |"
    yield "|---|---|"
    yield from (f"| {_cell(_short(name))} | {reason} |" for name, reason in sorted(reasons.items()))


def explained(name: str, reasons: Mapping[str, str] = ENVIRONMENT) -> str:
    """Return the reason why a test fails in this environment with any kube-proxy; "" if it is not known."""
    return next((reason for pattern, reason in reasons.items() if re.search(pattern, name)), "")
