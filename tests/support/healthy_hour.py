"""The metrics of a healthy proxy in each half minute of an hour, as recorded in tests/recordings/metrics.

Recorded once, and again after relevant changes of metrics or alerts: `python -m support.healthy_hour SECONDS`, as root.
The recorded hour contains usual events: endpoints change, the proxy is replaced, the API server is upgraded, an
operator once deletes the table. Series with equal values share one entry, from the first scrape on; times are seconds
since then; "_" is a scrape without the series, and "3x4" is 3, repeated four times more.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import NamedTuple

from lab.cluster import ClusterConfig, LabCluster
from lab.proxyprocess import METRICS_PORT
from support.live import PODS, Live, slice_of
from support.places import ROOT
from support.promtool import RULES

FILE = ROOT / "tests/recordings/metrics/healthy-hour"
INTERVAL = 30
UP = 'up{job="kube-proxy"}'
SERVICES = 20


class Scrape(NamedTuple):
    """One scrape of /metrics: seconds since the epoch, and the text; '' without an answer."""

    at: float
    text: str


def series() -> Mapping[str, str]:
    """The recorded values of each series, in promtool's notation."""
    found: dict[str, str] = {}
    values = ""
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("  "):
            found[line.strip()] = values
        else:
            values = line
    return found


def written(scrapes: Sequence[Scrape]) -> str:
    """Return the text of a recording: the series that the alerts query."""
    asked = set(re.findall(r"kubeproxy_\w+", RULES.read_text(encoding="utf-8")))
    tables = [dict(_samples(scrape.text, asked, scrapes[0].at)) for scrape in scrapes]
    for scrape, table in zip(scrapes, tables, strict=True):
        table[UP] = "1" if scrape.text else "0"
    names = sorted({name for table in tables for name in table})
    by_values: dict[str, list[str]] = {}
    for name in names:
        by_values.setdefault(_runs(table.get(name, "_") for table in tables), []).append(name)
    lines = (line for values, names in by_values.items() for line in (values, *(f"  {name}" for name in names)))
    return "".join(f"{line}\n" for line in lines)


def _samples(text: str, asked: set[str], start: float) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.partition("{")[0] in asked and not line.startswith("#"):
            number = float(value) - start * ("_timestamp_seconds" in name)
            yield name, f"{number:.3f}".rstrip("0").rstrip(".")


def _runs(values: Iterable[str]) -> str:
    """Return values with repetitions in promtool's notation: 1x2 is 1 and two repetitions, but _x2 is two."""
    runs = [(value, sum(1 for _ in same)) for value, same in itertools.groupby(values)]
    return " ".join(value if count == 1 else f"{value}x{count if value == '_' else count - 1}" for value, count in runs)


# the recording


async def record(seconds: float) -> None:
    """Run the hour in a lab, and write the file."""
    async with LabCluster(ClusterConfig(tls=True, certificate_days=365)) as cluster:
        live = Live(cluster)
        await live.add_pods()
        for number in range(SERVICES):
            live.service(f"s{number}", " ".join(random.sample(PODS, 3)), ipFamilyPolicy="RequireDualStack")
        await live.start()
        tasks = [asyncio.create_task(task) for task in (_churn(live), _traffic(live), _events(live, seconds))]
        scrapes = [scrape async for scrape in _scrapes(live, seconds)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    FILE.write_text(written(scrapes), encoding="utf-8")


async def _scrapes(live: Live, seconds: float) -> AsyncIterator[Scrape]:
    start = time.monotonic()
    for number in range(int(seconds) // INTERVAL + 1):
        await asyncio.sleep(max(0.0, start + number * INTERVAL - time.monotonic()))
        at, text = time.time(), ""
        with suppress(OSError):
            _, text = await live.page("/metrics", METRICS_PORT)
        yield Scrape(at, text)


async def _churn(live: Live) -> None:
    while True:
        name = f"s{random.randrange(SERVICES)}"
        for family in ("IPv4", "IPv6"):
            ends = [{"addresses": [live.ips[pod][family]]} for pod in random.sample(PODS, random.randint(1, 5))]
            changed = slice_of(name, family, ends)
            now = datetime.now(UTC).isoformat()
            changed["metadata"]["annotations"] = {"endpoints.kubernetes.io/last-change-trigger-time": now}
            live.cluster.store.put("endpointslices", changed)
        await asyncio.sleep(random.choice([1, 2, 5, 10, 20, 60]))


async def _traffic(live: Live) -> None:
    while True:
        await live.cluster.probes("pod", "tcp", *live.front(f"s{random.randrange(SERVICES)}"), 10)
        await asyncio.sleep(2)


async def _events(live: Live, seconds: float) -> None:
    """Make the occasional changes of each node."""
    await asyncio.sleep(seconds * 0.25)
    await live.proxy.stop()
    await live.start()
    await asyncio.sleep(seconds * 0.2)
    await live.cluster.server.refuse()
    await asyncio.sleep(min(40, seconds * 0.1))
    await live.cluster.server.listen()
    await asyncio.sleep(seconds * 0.15)
    await live.nft("delete", "table", "ip", "kube-proxy")
    await asyncio.sleep(seconds * 0.1)
    live.service("extra", "a1")
    await asyncio.sleep(seconds * 0.02)
    live.delete("extra")


if __name__ == "__main__":
    asyncio.run(record(float(sys.argv[1])))
