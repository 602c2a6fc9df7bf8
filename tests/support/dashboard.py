"""deploy/dashboards/kube-proxy.json as Grafana would use it: its panels, and what they ask Prometheus."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from support.places import ROOT

Json = dict[str, Any]
VARIABLES = {"$job": ".*", "$node": ".*", "$__rate_interval": "2m"}
"""What stands in an expression for what is chosen above the panels: all jobs and nodes, and as long as a test takes."""


class Question(NamedTuple):
    """What a panel asks."""

    panel: str
    expression: str
    legend: str


def dashboard() -> Json:
    """The whole file."""
    return json.loads((ROOT / "deploy/dashboards/kube-proxy.json").read_text(encoding="utf-8"))


def questions() -> Iterator[Question]:
    """Yield what the panels ask, as it is written."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield Question(panel["title"], target["expr"], target["legendFormat"])


def filled(expression: str) -> str:
    """An expression as Grafana sends it."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, expression
    return expression


def metrics_of(expression: str) -> set[str]:
    """The metrics that an expression asks for, a histogram's by its own name: what stands before a brace."""
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\b([a-z]\w+)\{", expression)}
