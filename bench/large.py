"""large: 100,000 Services with ten endpoints each, from the start of the proxy, measured as by restart; and the proxy's
own part, in one process without API server and kernel, from pages to packed transactions.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from bench import memory, objects, proxy, restart
from bench.figures import spreads
from bench.report import Report, Row
from bench.runs import Run
from kubeproxy.backends.nftables.backend import NftablesBackend
from kubeproxy.backends.nftables.table import KernelTable
from kubeproxy.engine.backlog import Backlog
from kubeproxy.model.addresses import Family
from kubeproxy.model.planner import Planner

SIZE = "100kx10"


class _Detached(KernelTable):
    """A table in the kernel; once it is detached, transactions succeed and do not reach the kernel."""

    is_detached = False

    def commit(self, messages: Sequence[bytes]) -> None:
        if not self.is_detached:
            super().commit(messages)


def alone(size: str) -> dict[str, float]:
    """Process lists and pack all transactions; CPU time in s, including the creation of pages, and memory in MB."""
    wanted = objects.parse_size(size)
    proxy.collect_as_the_proxy_does()
    table = _Detached.open(Family.IPV4)
    backend = NftablesBackend(table, proxy.world())
    for _ in backend.resync({}):
        pass
    table.is_detached = True
    planner, backlog = Planner(proxy.world()), Backlog(Family.IPV4)
    planner.apply(proxy.lists(wanted))
    backlog.add(planner.take())
    for _ in backend.sync(backlog.plans(backlog.changes.values())):
        pass
    now, most = memory.resident()
    return {"cpu": time.process_time(), "rss": now, "peak": most}


def run(with_: Run) -> Report:
    """Measure; this takes minutes, and some GB of memory for the API server."""
    own = with_.measure(f"{SIZE} in one process", alone, size=SIZE)
    rows = [Row(f"{SIZE}, without API server and kernel", dict(spreads([own]))), restart.row(with_, SIZE, 1)]
    title = "A million endpoints: a start, and a restart onto the existing rules"
    return Report("large", title, restart.COLUMNS, rows, restart.chart(rows), restart.NOTES)
