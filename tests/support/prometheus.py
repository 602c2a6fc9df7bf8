"""A real Prometheus in a network namespace, with a test's rules and targets; all durations are divided by 100.

The rules' expressions are unchanged except for shorter ranges, waiting times, and limits that are durations.
"""

from __future__ import annotations

import asyncio
import json
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lab.netns import run_in_async
from lab.probes import http_get
from support.programs import program

Json = dict[str, Any]
FASTER = 100
_MILLISECONDS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}
_PORT = 9090
_SCRAPED, _JUDGED = "500ms", "250ms"

LIMITS = {
    "_timestamp_seconds > 60": "_timestamp_seconds > 0.6",
    "_staleness_seconds) > 300": "_staleness_seconds) > 3",
    "kubeproxy_sync_errors_total[3000ms]": "kubeproxy_sync_errors_total[12s]",
    "_duration_seconds_bucket[6000ms]))) > 30": "_duration_seconds_bucket[6000ms]))) > 1.5",
}
"""The limits that are durations, and their replacements. The proxy itself is no faster: it retries after up to ten
seconds, and a waiting change takes seconds."""


def hastened(rules: str) -> Json:
    """Return the rules of a file, with durations divided by 100. Raises KeyError for an unknown limit."""
    made: Json = yaml.safe_load(rules)
    found = set()
    for rule in (rule for group in made["groups"] for rule in group["rules"]):
        expression = re.sub(r"\[(\w+)\]", lambda match: f"[{_shorter(match[1])}]", rule["expr"])
        for limit, shorter in LIMITS.items():
            if limit in expression:
                found.add(limit)
                expression = expression.replace(limit, shorter)
        rule["expr"] = expression
        if "for" in rule:
            rule["for"] = _shorter(rule["for"])
    if missing := LIMITS.keys() - found:
        raise KeyError(f"no rule has {missing}")
    return made


def _shorter(duration: str) -> str:
    whole = sum(int(n) * _MILLISECONDS[unit] for n, unit in re.findall(r"(\d+)(ms|[smh])", duration))
    return f"{whole // FASTER}ms"


class Prometheus:
    """One process; `folder` contains its files. Call start() first, and stop() at the end."""

    def __init__(self, namespace: str, folder: Path) -> None:
        self._namespace = namespace
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, rules: Json) -> None:
        """Start the process with these rules and no targets; it may take a second until it answers."""
        self._folder.mkdir()
        (self._folder / "rules.yaml").write_text(yaml.safe_dump(rules))
        self.watch({})
        job = {"job_name": "kube-proxy", "file_sd_configs": [{"files": ["targets.json"], "refresh_interval": "1s"}]}
        times = {"scrape_interval": _SCRAPED, "scrape_timeout": _SCRAPED, "evaluation_interval": _JUDGED}
        config = {
            "global": times,
            "rule_files": ["rules.yaml"],
            "scrape_configs": [job],
        }
        (self._folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        options = ["--config.file=prometheus.yaml", "--storage.tsdb.path=data", "--log.level=warn"]
        with (self._folder / "log").open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *["ip", "netns", "exec", self._namespace, program("prometheus"), *options],
                f"--web.listen-address=127.0.0.1:{_PORT}",
                cwd=self._folder,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def stop(self) -> None:
        """End the process."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def watch(self, targets: Mapping[str, str]) -> None:
        """Scrape these targets from now on: address and port by the value of `instance`."""
        entries = [{"targets": [address], "labels": {"instance": name}} for name, address in targets.items()]
        made = self._folder / "targets.new"
        made.write_text(json.dumps(entries))
        made.rename(self._folder / "targets.json")

    async def query(self, expression: str) -> list[Json]:
        """Return the present series of an expression. Raises AssertionError for an invalid expression."""
        found = await self._ask(f"/api/v1/query?query={urllib.parse.quote(expression)}")
        series: list[Json] = found["result"]
        return series

    async def firing(self) -> set[tuple[str, str]]:
        """Return the firing alerts, each with its instance, '' for none; no alerts until Prometheus answers."""
        try:
            found = await self._ask("/api/v1/alerts")
        except OSError:
            return set()
        alerts: Sequence[Json] = [alert for alert in found["alerts"] if alert["state"] == "firing"]
        return {(alert["labels"]["alertname"], alert["labels"].get("instance", "")) for alert in alerts}

    async def _ask(self, path: str) -> Json:
        _, body = await run_in_async(self._namespace, lambda: http_get("127.0.0.1", _PORT, path, 10.0))
        answer = json.loads(body)
        assert answer["status"] == "success", answer
        found: Json = answer["data"]
        return found

    def said(self) -> str:
        """Return the end of the log."""
        return (self._folder / "log").read_text(errors="replace")[-2000:]
