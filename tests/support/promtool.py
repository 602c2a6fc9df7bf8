"""Runs promtool: checks served metrics and the alert rules, and determines the alerts that fire on given metrics."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from support.places import ROOT
from support.programs import program

ALERTS = ROOT / "deploy/alerts"
RULES = ALERTS / "kube-proxy.rules.yaml"

_INTERVAL = 30  # seconds between two scrapes, and between two evaluations


def promtool(*arguments: str, stdin: str = "", folder: Path = ALERTS) -> tuple[int, list[str]]:
    """Run promtool; return its exit code, and the lines of its output."""
    command = [program("promtool"), *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, cwd=folder, check=False, timeout=60)
    return done.returncode, [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]


def lint(metrics: str) -> set[str]:
    """Return promtool's complaints about served metrics, "NAME: TEXT"."""
    code, lines = promtool("check", "metrics", stdin=metrics)
    assert code in {0, 3}, lines  # 3: there are complaints; 1: parse error
    return set(lines)


def expect_firing(metrics: str, names: Iterable[str], now: float, folder: Path, minutes: int = 10) -> None:
    """Check that exactly these alerts fire after the metrics have had their value at `now` for this number of minutes.

    A test of promtool begins with the epoch: times are moved so that `now` is the epoch.
    """
    series = [{"series": 'up{job="kube-proxy"}', "values": f"1x{60 * minutes // _INTERVAL}"}]
    for line in metrics.splitlines():
        if not line.startswith("kubeproxy_"):
            continue
        name, _, value = line.rpartition(" ")
        if "_timestamp_seconds" in name:
            value = str(float(value) - now)
        # Without an exponent, which promtool's notation of series does not support.
        series.append({"series": name, "values": f"{float(value):f}x{60 * minutes // _INTERVAL}"})
    expect_alerts(series, names, minutes, folder)


def expect_alerts(
    series: Sequence[Mapping[str, str]], names: Iterable[str], minutes: int, folder: Path, *, ever: bool = False
) -> None:
    """Check that exactly these alerts fire after this number of minutes of series, or (`ever`) fire at any time before.

    Series are as in promtool's tests: "series" and "values", a value each half minute.
    """
    firing = 'ALERTS{alertstate="firing"}'
    expression = f"max by (alertname) ({f'max_over_time({firing}[{minutes}m])' if ever else firing})"
    samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in names]
    tests = {
        "rule_files": [str(RULES)],
        "evaluation_interval": f"{_INTERVAL}s",
        "tests": [
            {
                "interval": f"{_INTERVAL}s",
                "input_series": series,
                "promql_expr_test": [{"expr": expression, "eval_time": f"{minutes}m", "exp_samples": samples}],
            }
        ],
    }
    file = folder / "served.test.yaml"
    file.write_text(json.dumps(tests), encoding="utf-8")  # JSON is YAML
    code, lines = promtool("test", "rules", str(file))
    assert code == 0, "\n".join(lines)
