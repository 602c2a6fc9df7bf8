"""The alerts of deploy/alerts: Prometheus accepts them, they fire in the right situations, and each is demonstrated."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import yaml

from kubeproxy.commands import COMMANDS
from support import healthy_hour
from support.documents import document
from support.metric_names import metric_names
from support.promtool import ALERTS, RULES, expect_alerts, promtool

HAPPENED = {
    "kubeproxy_repairs_total": "1x",
    'kubeproxy_network_programming_duration_seconds_bucket{ip_family="IPv4",le="+Inf"}': " _ ",
    'kubeproxy_source_staleness_seconds{resource="services"}': r"\b[1-9]\d\.",
}
"""Events in the recording: a repair, counters that restart, and an API server that did not answer."""
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


def test_each_alert_has_a_severity_and_a_remedy() -> None:
    for rule in rules():
        assert rule["labels"] in ({"severity": "critical"}, {"severity": "warning"}), rule
        assert rule["annotations"].keys() == {"summary", "description", "runbook", "runbook_url"}, rule
        commands = re.findall(r"`([^`]+)`", rule["annotations"]["runbook"])
        assert commands, rule
        for command in commands:
            program, *words = command.split()
            assert program in {"kube-proxy", "kubectl", "nft"} or command.startswith("--"), rule
            assert program != "kube-proxy" or words[0] in COMMANDS, rule


def test_they_ask_for_metrics_that_there_are() -> None:
    for rule in rules():
        if "up{" in str(rule["expr"]):  # Prometheus' own metric, for each target
            continue
        asked = {name.removesuffix("_bucket") for name in re.findall(r"kubeproxy_\w+", str(rule["expr"]))}
        assert asked, rule
        assert asked - metric_names() == set(), rule


def test_none_fires_in_a_healthy_hour(tmp_path: Path) -> None:
    """With a replaced proxy, an API server that was away for a while, and a table that was deleted once."""
    recorded = healthy_hour.series()
    asked = set(re.findall(r"kubeproxy_\w+", RULES.read_text()))
    assert asked == {name.partition("{")[0] for name in recorded if name != healthy_hour.UP}
    for name, happened in HAPPENED.items():
        assert re.search(happened, recorded[name]), name
    hour = [{"series": name, "values": values} for name, values in recorded.items()]
    expect_alerts(hour, [], 60, tmp_path, ever=True)
    # The check can fail: if the proxy is not ready for ten minutes, its alert fires.
    worse = [one for one in hour if "kubeproxy_ready" not in one["series"]]
    worse.append({"series": "kubeproxy_ready", "values": "1x60 0x20 1x60"})
    expect_alerts(worse, ["KubeProxyNotReady"], 60, tmp_path, ever=True)


def test_prometheus_takes_the_scrape_configuration_of_the_page(tmp_path: Path) -> None:
    lines = [line.text for line in document("docs/monitoring.md").commands]
    begin = lines.index("    scrape_configs:")
    block = itertools.takewhile(lambda line: line.startswith("      "), lines[begin + 1 :])
    file = tmp_path / "prometheus.yaml"
    file.write_text("\n".join(["scrape_configs:", *block]))
    code, said = promtool("check", "config", str(file))
    assert code == 0, said
