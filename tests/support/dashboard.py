"""Reads deploy/dashboards/kube-proxy.json like Grafana: its panels, and their queries to Prometheus."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from support.places import ROOT

Json = dict[str, Any]
VARIABLES = {"$job": ".*", "$node": ".*", "$__rate_interval": "2m"}
"""The values of the variables in expressions: all jobs and nodes, and the duration of a test."""


class Question(NamedTuple):
    """A query of a panel."""

    panel: str
    expression: str
    legend: str


def dashboard() -> Json:
    """Return the decoded file."""
    found: Json = json.loads((ROOT / "deploy/dashboards/kube-proxy.json").read_text(encoding="utf-8"))
    return found


def questions() -> Iterator[Question]:
    """Yield the expressions of the panels, as written."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield Question(panel["title"], target["expr"], target["legendFormat"])


def filled(expression: str) -> str:
    """Return an expression in the form that Grafana sends."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, expression
    return expression


def metrics_of(expression: str) -> set[str]:
    """Return the names of the metrics in an expression (the words before a brace); a histogram's name has no suffix."""
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\b([a-z]\w+)\{", expression)}
