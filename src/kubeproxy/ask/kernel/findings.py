"""Findings as people read them: in what the kernel or the proxy differs from what it should have."""

from __future__ import annotations

from typing import Final

from kubeproxy.backends.examination import Finding

REPAIR: Final = "the proxy repairs them by itself within its sync period; `kube-proxy verify` again shows it"


def text(finding: Finding) -> str:
    """Return a finding as a line."""
    whose = "/".join(finding.service) if finding.service is not None else "no Service's"
    more = [f"wanted: {finding.wanted}"] if finding.wanted else []
    more += [f"present: {finding.present}"] if finding.present else []
    values = f" ({'; '.join(more)})" if more else ""
    return f"{whose}: {finding.kind}: {finding.what}{values} [{finding.where}]"
