"""The alerts of deploy/alerts: Prometheus takes them, they fire when they should, and each is shown to."""

from __future__ import annotations

import re

import yaml

from kubeproxy.commands import COMMANDS
from support.metric_names import metric_names
from support.promtool import ALERTS, RULES, promtool

TESTS = ALERTS / "kube-proxy.rules.test.yaml"


def rules() -> list[dict[str, object]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return group["rules"]


def test_prometheus_takes_them() -> None:
    code, lines = promtool("check", "rules", str(RULES))
    assert (code, f"SUCCESS: {len(rules())} rules found" in lines[-1]) == (0, True), lines


def test_they_fire_when_they_should_and_only_then() -> None:
    code, lines = promtool("test", "rules", str(TESTS))
    assert code == 0, lines


def test_each_is_shown_to_fire() -> None:
    text = TESTS.read_text()
    assert [rule["alert"] for rule in rules() if str(rule["alert"]) not in text] == []


def test_each_says_how_bad_it_is_and_what_to_do() -> None:
    for rule in rules():
        assert rule["labels"] in ({"severity": "critical"}, {"severity": "warning"}), rule
        assert rule["annotations"].keys() == {"summary", "description", "runbook"}, rule
        commands = re.findall(r"`([^`]+)`", rule["annotations"]["runbook"])
        assert commands, rule
        for command in commands:
            program, *words = command.split()
            assert program in {"kube-proxy", "kubectl", "nft"} or command.startswith("--"), rule
            assert program != "kube-proxy" or words[0] in COMMANDS, rule


def test_they_ask_for_metrics_that_there_are() -> None:
    for rule in rules():
        if "up{" in str(rule["expr"]):  # Prometheus' own, of each target
            continue
        asked = {name.removesuffix("_bucket") for name in re.findall(r"kubeproxy_\w+", str(rule["expr"]))}
        assert asked, rule
        assert asked - metric_names() == set(), rule
