"""docs/conformance.md, rendered from the result files: a row for each test, a column for each program and mode."""

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
    r"Internet": "the cluster has no Internet",
    r"source IP": "the test's client has an address of the nodes' network",
    r"iperf2": "the image lacks the iperf that the test expects",
    r"should only target nodes with endpoints": "asks an IPv6 health port of an IPv4 Service",
    r"using https": "the API server's proxy to pods has no certificate that pods take",
}
"""Why a test fails with every kube-proxy, by a pattern of its name: said only where the Go kube-proxy fails it too."""

_HEAD: Final = """# Upstream's end-to-end tests

Kubernetes' own tests of Services (`test/e2e/network`), run on a cluster of two nodes: kube-apiserver, kubelet and
containerd, in network namespaces of one machine, with stand-ins for cluster DNS and for a cloud's load balancer. The
Go kube-proxy of the same tree ran in the same environment. `python -m e2e page` wrote this page; `make e2e` gives its
input, and needs root and Go:

    make e2e KUBERNETES=/path/to/kubernetes                           # a source tree, or a folder of binaries
    make e2e KUBERNETES=DIR PROXY=go MODE=iptables
    make e2e KUBERNETES=DIR FOCUS=affinity                            # some tests; the page stays as it is

It says which Debian packages are missing, builds what a source tree lacks into `_output/e2e`, and removes the cluster
at the end, also after an error or Ctrl-C; logs and Ginkgo's reports of the last run stay in `/var/tmp/kpe2e-logs`.
Tests of SCTP, of network policies, of ingress, of host ports, and those that disrupt the cluster are left out.
"""


def render(results: Sequence[Result]) -> str:
    """Return the page; without results it says so."""
    by_column = {(each.proxy, each.mode): each for each in results}
    columns = [by_column[column] for column in COLUMNS if column in by_column]
    if not columns:
        return f"{_HEAD}\nNo run has been recorded.\n"
    return "\n".join([_HEAD, *_runs(columns), "", *_tests(columns), *_failures(columns)]) + "\n"


def _title(result: Result) -> str:
    return f"{_TITLES[result.proxy]} {result.mode}"


def _runs(columns: Sequence[Result]) -> Iterator[str]:
    yield "## Runs"
    yield ""
    yield "| kube-proxy | date | commit | versions | minutes | passed | failed | skipped |"
    yield "|---|---|---|---|---:|---:|---:|---:|"
    for each in columns:
        states = [verdict.state for verdict in each.tests.values()]
        counts = states.count("passed"), len(each.failed), states.count("skipped")
        known = ", ".join(f"{name} {version}" for name, version in each.versions.items() if version)
        cells = [_title(each), each.date, each.commit, known, f"{each.seconds / 60:.0f}", *map(str, counts)]
        yield f"| {' | '.join(cells)} |"


def _tests(columns: Sequence[Result]) -> Iterator[str]:
    names = sorted({name for each in columns for name in each.tests})
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
    """Return the area of a test: the first words after [sig-network], up to the first that is not one of a title."""
    rest = name.removeprefix("[sig-network] ")
    found = re.match(r"(?:\[[^\]]*\] ?)+|(?:[A-Z]\w*(?::\w+)?[ ]?)+", rest)
    return (found[0] if found else rest.split()[0]).strip()


def _word(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    return verdict.state if verdict.state in ("passed", "skipped") else f"**{verdict.state}**"


def _cell(text: str) -> str:
    return text.strip().replace("|", "\\|").replace("<", "&lt;")


def _failures(columns: Sequence[Result]) -> Iterator[str]:
    failed = sorted({name for each in columns for name in each.failed})
    if not failed:
        return
    yield "\n## Failures\n"
    yield "| test | fails with | reason |"
    yield "|---|---|---|"
    for name in failed:
        runs = [each for each in columns if name in each.failed]
        reason = explained(name) if any(each.proxy == "go" for each in runs) else ""
        cells = [
            name.removeprefix("[sig-network] "),
            ", ".join(map(_title, runs)),
            reason or runs[0].tests[name].reason,
        ]
        yield f"| {' | '.join(map(_cell, cells))} |"


def explained(name: str, reasons: Mapping[str, str] = ENVIRONMENT) -> str:
    """Return why this environment lets a test fail with any kube-proxy; "" where it is not known."""
    return next((reason for pattern, reason in reasons.items() if re.search(pattern, name)), "")
