"""The parts of a soak: a proxy, the lab's API server, endpoints and clients, each in a separate place; and the changes.

All parts end with the process that started them.
"""

from __future__ import annotations

import datetime as dt
import re
import subprocess
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from bench import objects
from bench.apiserver import ApiProcess
from bench.companion import Companion
from bench.contestant import OURS, Contestant
from bench.e2e import Probed, awaited, move
from bench.figures import median
from bench.network import Network
from bench.report import ROOT
from prove.soak import samples
from prove.soak.cluster import Cluster, Write
from prove.soak.samples import Sample
from prove.world import hint

MOVES = 5
"""Changes of a separate Service whose first packets are timed, for a sample."""

_COMPLAINT = re.compile(r"E\d{4} |Traceback")
_SETTLED = 10.0  # seconds until all changes are in the kernel, in the slowest mode
_LOADED = 600.0  # seconds until the proxy is ready


class Churn:
    """Makes the changes, in a thread: `made` is their number so far, `late` the delay behind the rate, in seconds."""

    def __init__(self, api: ApiProcess, cluster: Cluster, rate: float) -> None:
        self.made = 0
        self.late = 0.0
        self.error: BaseException | None = None
        self._api, self._cluster, self._rate = api, cluster, rate
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._guard, name="churn")

    def start(self) -> None:
        """Start."""
        self._thread.start()

    def stop(self) -> None:
        """Stop."""
        self._over.set()
        self._thread.join()

    def _guard(self) -> None:
        try:
            self._change()
        except BaseException as error:  # the thread that takes samples raises it
            self.error = error

    def _change(self) -> None:
        began = time.monotonic()
        while not self._over.is_set():
            now = dt.datetime.now(dt.UTC).isoformat(timespec="microseconds")
            for write in self._cluster.change(now):
                put(self._api, write)
            self.made += 1
            left = began + self.made / self._rate - time.monotonic()
            self.late = max(0.0, -left)
            if left > 0:
                time.sleep(left)


def put(api: ApiProcess, write: Write) -> None:
    """Do one write."""
    if write.body:
        api.put(write.resource, write.body)
    else:
        api.remove(write.resource, write.key)


class Ground:
    """A context manager. It must be created in a new network namespace, which becomes the node's."""

    def __init__(self, mode: str, size: objects.Size, rate: float, seed: int) -> None:
        self.mode, self.rate = mode, rate
        self.cluster = Cluster(size, seed)
        self._seed = seed
        self._probed = Probed(2 * size.services, "TCP", (objects.spare(1), objects.spare(2)))
        self._turn = 0
        self._ending = ExitStack()
        self._count = 0

    def __enter__(self) -> Self:
        with ExitStack() as ending:
            self.network, self.api = Network(), ApiProcess()
            ending.callback(self.network.close)
            ending.callback(self.api.close)
            self._far = Companion("prove.soak.far", str(self.network.pods.pid))
            ending.callback(self._far.close)
            self.clients = Companion("prove.soak.traffic", str(self.network.client.pid))
            ending.callback(self.clients.close)
            self.network.pods.ask("answer", addresses=list(self._probed.addresses))
            for write in self.cluster.beginning():
                put(self.api, write)
            self.api.put("services", objects.service(self._probed.number))
            self.api.put("endpointslices", self._probed.slice(0, 1))
            self._choose_variant()
            folder = ending.enter_context(tempfile.TemporaryDirectory(prefix="kube-proxy-soak-"))
            self._control = str(Path(folder, "control"))
            self.proxy = Contestant(
                f"{OURS} --control-socket {self._control}", self.mode.partition("-")[0], self.api.url
            )
            ending.callback(self.proxy.close)
            awaited(self.network, self.proxy, self._probed)
            self.proxy.wait("/readyz", _LOADED)
            self.churn = Churn(self.api, self.cluster, self.rate)
            self.churn.start()
            ending.callback(self.churn.stop)
            self.clients.ask("begin", services=self.cluster.steady, seed=self._seed)
            self._ending = ending.pop_all()
        self._began = time.monotonic()
        self._before = self._totals()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.close()

    def _choose_variant(self) -> None:
        _, _, variant = self.mode.partition("-")
        if variant:
            subprocess.run(hint(variant), check=True)

    def _totals(self) -> tuple[float, float, int, float, float]:
        late, programmed = samples.lateness()
        return self.proxy.cpu_seconds(), samples.cpu_seconds(self.api.pid), self.churn.made, late, programmed

    def report(self) -> dict[str, Any]:
        """Return the clients' requests and failures."""
        return self.clients.ask("report")

    def sample(self) -> Sample:
        """Take a sample. Raises RuntimeError if the proxy or the changes have ended."""
        if self.churn.error is not None or not self.proxy.running:
            raise RuntimeError(f"ended early: {self.churn.error!r}\n{self.proxy.said()}")
        totals = self._totals()
        own, api, made, late, programmed = (now - then for now, then in zip(totals, self._before, strict=True))
        self._before = totals
        found = {"at": time.monotonic() - self._began, "behind": self.churn.late}
        found |= samples.process(self.proxy.pid) | samples.machine()
        if made:
            found |= {"cpu": own / made * 1e3, "api": api / made * 1e3}
        if programmed:
            found["lag"] = late / programmed * 1e3
        name, count = samples.COUNTED[self.mode]
        if not self._count % (6 if name == "rules" else 1):
            found["parts"] = count()
        self._count += 1
        found["services"], found["endpoints"] = map(float, self.cluster.counts)
        found["landing"] = median(self._move() for _ in range(MOVES))
        asked = self.report()
        found |= {"open": float(asked["open"]), "failures": float(sum(asked["failures"].values()))}
        return found

    def _move(self) -> float:
        self._turn += 1
        return move(self.network, self.api, self.proxy, self._probed, self._turn)

    def wrong(self) -> list[str]:
        """Return unexpected lines of the proxy's log, and the differences of its plans from the kernel."""
        self.churn.stop()
        time.sleep(_SETTLED)
        complaints = [line for line in self.proxy.logged().splitlines() if _COMPLAINT.match(line)]
        asked = subprocess.run(
            [str(ROOT / ".venv" / "bin" / "kube-proxy"), "verify", "--control-socket", self._control],
            capture_output=True,
            text=True,
            check=False,
        )
        if asked.returncode:
            complaints.append(f"verify: {asked.returncode} {asked.stdout[-1000:]}{asked.stderr[-1000:]}")
        return complaints[:10]
