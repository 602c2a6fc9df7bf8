"""Checks of the kernel's state: the state that the proxy reports, and the existence of the mode's rules."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

from kubeproxy.ask.finding import MISLEADS, STOPS, Diagnosis, Severity, duration
from kubeproxy.backends.mode import Trace
from kubeproxy.engine.backlog import FamilyStanding
from kubeproxy.model.addresses import Family
from kubeproxy.release import SAME_BUILD
from kubeproxy.wording import counted

_REFUSED: Final = "correct the cause that the message names; the proxy tries again by itself, at the latest after 10 s"

_KEPT: Final = "rules that the kernel accepted before stay"


def standing(
    standings: Iterable[FamilyStanding], began: Mapping[str, float] = {}, bare: Collection[Family] = ()
) -> Iterator[Diagnosis]:
    """Check the state that the proxy reports for each family's rules; `began` is Facts.began, and `bare` are families
    without rules in the kernel."""
    for one in standings:
        label = one.family.label
        if one.refusal is not None:
            kept = f"no Service answers at its {label} addresses on this node" if one.family in bare else _KEPT
            why = f"{counted(one.queued, 'Service', 'waits')}; {kept}"
            fix = _REFUSED
            yield Diagnosis(Severity.BROKEN, "kernel", one.problem, why, fix, MISLEADS, began.get(label, 0.0))
        elif one.difference is not None:
            why = "connections may fail until the proxy has repaired its rules; the repair is under way"
            fix = "find the program; `kube-proxy verify` prints the present differences"
            yield Diagnosis(Severity.DEGRADED, "kernel", one.problem, why, fix, since=began.get(label, 0.0))
        elif one.sound_since is None:
            what = f"the proxy has never confirmed that the kernel has all {label} rules"
            why = counted(one.queued, "Service", "waits")
            fix = "if the proxy has just started, wait a moment; else read the reason in the proxy's log"
            yield Diagnosis(Severity.DEGRADED, "kernel", what, why, fix)


def unready(reasons: Mapping[str, str]) -> Iterator[Diagnosis]:
    """Report the reasons why the proxy is not ready, except reasons that other checks report."""
    for reason in reasons.values():
        what = f"the proxy is not ready: {reason}"
        why = "load balancers may stop using this node, and its rules may be outdated"
        fix = "see `journalctl -u kube-proxy`, or `kubectl -n kube-system logs` of its pod"
        yield Diagnosis(Severity.BROKEN, "ready", what, why, fix)


def there(
    traces: Iterable[Trace], families: Iterable[Family], mode: str, refusals: Mapping[Family, str] = {}
) -> Iterator[Diagnosis]:
    """Check whether the kernel has rules of the running mode in each family. `refusals` contains the kernel's
    error for each family with refused changes."""
    known = {trace.family for trace in traces}
    for family in families:
        if family not in known and None not in known:
            what = f"nothing of {mode} mode is in the kernel for {family.label}"
            why = f"no Service answers at its {family.label} addresses on this node"
            fix = (
                "the proxy restores the rules within seconds; if the rules remain missing, read the proxy's log. "
                "Find the cause: "
                "a firewall that flushes all rules, as `nft flush ruleset` does, must keep to its own tables"
            )
            if refusal := refusals.get(family):
                what, fix = f"{what}: the kernel refuses the proxy's changes: {refusal}", _REFUSED
            yield Diagnosis(Severity.BROKEN, "kernel", what, why, fix, STOPS)


def absent(traces: Iterable[Trace]) -> Iterator[Diagnosis]:
    """Check whether the kernel has rules of any kube-proxy, on a node without a running kube-proxy."""
    if not any(True for _ in traces):
        yield Diagnosis(
            severity=Severity.BROKEN,
            about="kernel",
            what="no kube-proxy runs on this node, and the kernel has no rules of a kube-proxy",
            why="no Service answers on this node",
            fix="start kube-proxy on this node; `systemctl status kube-proxy` or `kubectl -n kube-system get pods` "
            "shows why the kube-proxy does not run",
        )


def versions(running: str, ours: str, started: float, now: float) -> Iterator[Diagnosis]:
    """Check whether the running proxy has the installed version."""
    if running != ours:
        what = f"the proxy runs version {running} for {duration(now - started)}, this command is {ours}"
        why = "answers of commands may be wrong"
        fix = SAME_BUILD
        yield Diagnosis(Severity.NOTE, "version", what, why, fix)


def able(lack: str, severity: Severity, why: str) -> Iterator[Diagnosis]:
    """Report a requirement of the mode that this node lacks; `lack` is the text of Unsupported, or '' if the node lacks
    nothing."""
    if lack:
        what, _, fix = lack.partition(": ")
        yield Diagnosis(severity=severity, about="node", what=what, why=why, fix=fix or lack)
