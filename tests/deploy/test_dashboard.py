"""Checks of the dashboard that need no Grafana: its form, and that Prometheus accepts its queries.

tests/scenarios/test_alerts_fire.py shows that a real proxy has data for each panel.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from support.dashboard import dashboard, filled, metrics_of, questions
from support.metric_names import metric_names
from support.promtool import promtool

Json = dict[str, Any]
PANELS: list[Json] = dashboard()["panels"]
TYPES = {"row", "stat", "timeseries", "state-timeline", "table"}
UNITS = {"short", "s", "ops", "reqps", "cps", "bytes", "percentunit"}
"""The used units of Grafana (its packages/grafana-data)."""
NOT_OF_THE_PROXY = {"up", "process_resident_memory_bytes", "process_cpu_seconds_total"}
"""Metrics of Prometheus itself, and names that the source composes."""


def test_the_import_lists_the_requirements_of_grafana() -> None:
    whole = dashboard()
    assert whole["schemaVersion"] >= 36  # the first version with data sources as objects
    assert (whole["id"], whole["uid"], whole["title"]) == (None, "kube-proxy-py", "kube-proxy")  # Grafana assigns it
    names = [variable["name"] for variable in whole["templating"]["list"]]
    assert names == ["datasource", "job", "node"]
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(whole)))
    assert used - {"__rate_interval", "__all"} == set(names)


NOT_IN_THE_MODELS = {"builtIn", "definition", "expr", "step", "titleFormat", "textFormat"}
"""Fields that Grafana adds to each dashboard, and fields of annotations that its Prometheus data source reads."""


def test_grafanas_own_models_keep_all_fields() -> None:
    """Fields that Grafana does not know are lost when it saves the dashboard."""
    plugins.register_default_plugins()
    kept = json.loads(json.dumps(Dashboard.from_json(dashboard()), cls=JSONEncoder))
    assert [path for path in lost(dashboard(), kept) if path.rpartition(".")[2] not in NOT_IN_THE_MODELS] == []
    broken = dashboard()
    broken["panels"][1]["options"]["colourMode"] = "value"
    kept = json.loads(json.dumps(Dashboard.from_json(broken), cls=JSONEncoder))
    assert ".panels[1].options.colourMode" in lost(broken, kept)


def lost(before: Any, after: Any, path: str = "") -> list[str]:
    """Return the paths of values that are missing or different afterwards; empty values may be missing."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            where for key, value in before.items() if value for where in lost(value, after.get(key), f"{path}.{key}")
        ]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [where for number, (one, other) in pairs for where in lost(one, other, f"{path}[{number}]")]
    return [] if before == after else [path]


def test_panels_have_numbers_of_their_own_and_a_place() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["x"] >= 0, panel["title"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        assert min(place["w"], place["h"]) >= 1
    for one, other in itertools.combinations(PANELS, 2):
        assert not overlap(one["gridPos"], other["gridPos"]), (one["title"], other["title"])
    ends = {panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in PANELS}
    assert {panel["gridPos"]["y"] for panel in PANELS} <= ends | {0}, "a hole between two panels"


def overlap(one: Json, other: Json) -> bool:
    across = one["x"] < other["x"] + other["w"] and other["x"] < one["x"] + one["w"]
    return across and one["y"] < other["y"] + other["h"] and other["y"] < one["y"] + one["h"]


def test_each_panel_has_a_known_type_and_a_description() -> None:
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in PANELS:
        assert panel["type"] in TYPES
        if panel["type"] == "row":
            assert panel["panels"] == []
            continue
        assert panel["description"].endswith((".", "flows NAMESPACE/NAME", "FILE", "conntrack", "verify", "doctor"))
        assert panel["datasource"] == source
        assert [target["datasource"] for target in panel["targets"]] == [source] * len(panel["targets"])
        letters = [target["refId"] for target in panel["targets"]]
        assert letters == ["A", "B", "C"][: len(letters)]
        assert panel["type"] == "state-timeline" or panel["fieldConfig"]["defaults"]["unit"] in UNITS
    titles = [panel["title"] for panel in PANELS]
    assert len(set(titles)) == len(titles)


def test_queries_select_the_chosen_nodes_and_existing_metrics() -> None:
    known = metric_names() | NOT_OF_THE_PROXY
    for panel, expression, _ in questions():
        selectors = re.findall(r"\{([^}]*)\}", expression)
        assert selectors, panel
        assert all(selector.startswith('job=~"$job", instance=~"$node"') for selector in selectors), panel
        assert metrics_of(expression), panel
        assert metrics_of(expression) - known == set(), panel
    for variable in dashboard()["templating"]["list"][1:]:
        assert set(re.findall(r"kubeproxy_\w+", variable["definition"])) <= known


def test_lines_are_distinguished() -> None:
    """The legend shows all labels that a sum keeps: otherwise two lines have the same name."""
    for panel, expression, legend in questions():
        for names in re.findall(r"\bby \(([^)]*)\)", expression):
            kept = {name.strip() for name in names.split(",")} - {"le", "git_version"}
            assert kept <= set(re.findall(r"\{\{(\w+)\}\}", legend)), panel


def test_prometheus_understands_it(tmp_path: Path) -> None:
    rules = [{"record": f"panel:number:{n}", "expr": filled(each.expression)} for n, each in enumerate(questions())]
    rules += [{"record": "note", "expr": filled(note["expr"])} for note in dashboard()["annotations"]["list"][1:]]
    file = tmp_path / "rules.yaml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    code, lines = promtool("check", "rules", str(file))
    assert (code, f"SUCCESS: {len(rules)} rules found" in lines[-1]) == (0, True), lines
