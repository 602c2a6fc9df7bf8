"""Simulated data of a busy cluster for the page: Services, their endpoints, traffic, changes. Pure, by a seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import Any

Json = dict[str, Any]
Row = list[Any]

NAMESPACES = (
    "shop",
    "payments",
    "search",
    "identity",
    "media",
    "ml",
    "monitoring",
    "ingress",
    "logistics",
    "kube-system",
)
WORDS = ("api", "web", "cache", "db", "queue", "worker", "gateway", "index", "mail", "auth", "feed", "images", "report")
NODES = tuple(f"node-{letter}" for letter in "abcdef")
HTTP = "http/TCP/IPv4"
HERE = NODES[0]
LONG_AGO = 86_400 * 3


_numbers = itertools.count(1)


def changed(at: float, service: str, what: str, ms: float | None, kind: str = "change") -> Json:
    """Return an entry of the journal, with the next number."""
    return {"number": next(_numbers), "at": at, "kind": kind, "service": service, "what": what, "ms": ms}


def past(at: float) -> Json:
    """Return the journal of the 15 minutes before a time: changes, among them a list, a problem with its end, and a
    busy minute."""
    away = "the API server cannot be reached at 192.0.2.1:6443: timed out"
    told = [
        changed(at - 800, "", "10,000 Services, by a list of objects or a change of the node", None),
        changed(at - 700, "shop/web", "endpoints -1, 3 now", 1.25),
        changed(at - 300, "", away, None, "problem"),
        changed(at - 239, "", f"after 61.0 s: {away}", None, "end"),
        changed(at - 230, "shop/api", "endpoints +2 -1, 4 now", 140.5),
        changed(at - 2, "shop/web", "endpoints +1, 4 now", 0.75),
    ]
    seconds = []
    for back in range(900, 0, -1):
        busy = 200 < back < 260
        spread = (0.4, 1.5, 9.0) if busy or back % 7 == 0 else (None, None, None)
        figures = dict(zip(("p50", "p99", "max"), spread, strict=True))
        entries = 20_000 + 10 * (900 - back)
        seconds.append({"t": int(at) - back, "changes": 30 if busy else back % 3, "conntrack": entries} | figures)
    return {"changes": told, "seconds": seconds}


class Scene:
    """Services and their changes; `at` is the time of its beginning, in seconds since the epoch."""

    def __init__(self, count: int, at: float, seed: int = 1) -> None:
        self._random = random.Random(seed)
        self.at = at
        self.revision = 1
        self.rows: dict[str, Row] = {}
        for number, name in zip(range(count), _names(), strict=False):
            self.rows[name] = self._row(name, number)
        self.still: set[str] = set()  # Services that never change
        self.busy = self._random.sample(sorted(self.rows), min(60, count)) if count else []

    def _row(self, name: str, number: int) -> Row:
        some = self._random.random()
        total = 1 + int(self._random.paretovariate(1.1)) % 40
        ready = 0 if some < 0.002 else total - (some > 0.96) * min(total - 1, 1)
        kind = "LoadBalancer" if number % 37 == 3 else "NodePort" if number % 23 == 5 else "ClusterIP"
        addresses = [f"10.{96 + number // 65536}.{number // 256 % 256}.{number % 256}:{80 + number % 3}/tcp"]
        if number % 5 == 0:
            addresses.append(f"[fd00:10:96::{number:x}]:{80 + number % 3}/tcp")
        if kind == "LoadBalancer":
            addresses.append(f"203.0.113.{number % 250}:{80 + number % 3}/tcp")
        if kind != "ClusterIP":
            addresses.append(f"*:{30000 + number % 2700}/tcp")
        flags = ("L" if kind == "LoadBalancer" and number % 2 else "") + ("A" if number % 41 == 7 else "")
        changed = self.at - (self._random.random() * 200 if number % 97 == 1 else LONG_AGO + number)
        return [name, "programmed", ready, total, kind, flags, addresses, changed, []]

    def answer(self) -> Json:
        """Return /services."""
        return {"revision": self.revision, "services": list(self.rows.values())}

    # changes over time

    def about(self, count: float) -> int:
        """Return a random number of changes with this average."""
        return round(count * self._random.lognormvariate(-0.2, 0.6))

    def change(self, at: float, count: int) -> Json:
        """Return a `now` with some changes: added and removed endpoints."""
        self.revision += count
        changes, rows, lags = [], {}, []
        names = sorted(self.rows.keys() - self.still)
        for name in self._random.sample(names, min(count, len(names))):
            row = self.rows[name]
            up = row[2] < row[3]
            if row[2]:
                row[2] += 1 if up else -1 if row[2] > 1 else 0
            row[7] = at
            took = self._random.lognormvariate(0.1, 0.55) + (self._random.random() > 0.997) * 12
            what = "endpoint added" if up else "endpoint gone"
            changes.append(changed(at, name, what, round(took, 2)))
            rows[name] = row
            lags.append(took)
        return self.now(at, changes, list(rows.values()), lags)

    def now(self, at: float, changes: list[Json], rows: list[Row], lags: Iterable[float] = (), **more: Any) -> Json:
        """Return a `now` of these changes; `more` replaces its fields."""
        by_size = sorted(lags)
        lag = None
        if by_size:
            lag = {"p50": by_size[len(by_size) // 2], "p99": by_size[-1 - len(by_size) // 100], "max": by_size[-1]}
        return {
            "at": at,
            "queued": 0,
            "changes": changes[-20:],
            "left": max(0, len(changes) - 20),
            "perSecond": 4.0 * len(changes),
            "lagMs": lag,
            "rows": rows[:200],
            "gone": [],
            "revision": self.revision,
            "conntrack": {"count": 31_000 + int(900 * self._random.random()), "max": 262_144},
            "families": [sound("IPv4", self.at - 7_300), sound("IPv6", self.at - 7_300)],
        } | more

    def flows(self, at: float) -> Json:
        """Return the new connections of a second: few Services have most of them, and some endpoints have more than
        others."""
        seen = {}
        for place, name in enumerate(self.busy):
            new = max(0.0, self._random.gauss(900 / (1 + place), 120 / (1 + place)))
            ends = [one["address"] for one in self.detail(name)["endpoints"] if one["ready"]]
            if new < 0.5 or not ends:
                continue
            weights = [
                1 + 0.3 * self._random.random() + (number == 1) * (place % 4 == 0) * 2 for number in range(len(ends))
            ]
            seen[name] = {
                "new": round(new, 1),
                "endpoints": {HTTP: {end: weight / sum(weights) for end, weight in zip(ends, weights, strict=True)}},
            }
        return {"at": at, "seconds": 1.0, "sampled": 1, "services": seen, "error": ""}

    # one Service

    def detail(self, name: str) -> Json:
        """Return /service of a row."""
        row = self.rows[name]
        namespace, short = name.split("/")
        frontends = [_frontend(text, local="L" in row[5]) for text in row[6] if not text.startswith("[")]
        six = [_frontend(text, local="L" in row[5]) for text in row[6] if text.startswith("[")]
        targets = [_target(row, number, short) for number in range(row[3])]
        ports = [_port(frontends, "IPv4", targets, affinity="A" in row[5])]
        if six:
            ports.append(_port(six, "IPv6", (), affinity=False))
        return {
            "namespace": namespace,
            "name": short,
            "state": row[1],
            "resourceVersion": str(4000 + row[3]),
            "slices": {f"{short}-x7k2p": "4012"},
            "ports": ports,
            "endpoints": targets,
        }

    def why(self, source: str, target: str) -> Json:
        """Return an answer of `why` for the first Service that has the address."""
        name = next((name for name, row in self.rows.items() if any(text.startswith(target) for text in row[6])), "")
        ends = [one for one in self.detail(name)["endpoints"] if one["ready"]] if name else []
        steps = [
            {"passes": True, "text": f"{target} is the cluster IP of {name}", "field": "spec.clusterIPs"},
            {
                "passes": bool(ends),
                "text": f"policy Cluster: {len(ends)} endpoints",
                "field": "spec.internalTrafficPolicy",
            },
        ]
        heading = f"{'this node' if source == 'node' else source} -> {target}: "
        return {
            "heading": heading + ("kube-proxy forwards it" if ends else "rejected, the client sees connection refused"),
            "answer": "yes" if ends else "no",
            "why": {
                "source": "this node" if source == "node" else source,
                "destination": target,
                "outcome": "forwarded" if ends else "rejected",
                "clientSees": "an answer" if ends else "connection refused",
                "service": name,
                "steps": steps,
                "endpoints": [
                    {
                        "address": one["address"],
                        "share": 1 / len(ends),
                        "masqueraded": True,
                        "node": one["node"],
                        "returns": True,
                    }
                    for one in ends
                ],
                "missing": [],
                "fixes": [],
            },
            "findings": [
                {
                    "severity": "fine",
                    "about": "kernel",
                    "what": f"the kernel has {len(ends)} of {len(ends)} endpoints (read now)",
                    "why": "",
                    "fix": "",
                }
            ],
            "fixes": [] if ends else ["start an endpoint"],
            "next": f"kube-proxy trace {source} {target}" if ends else "",
        }


def sound(family: str, since: float | None, **more: Any) -> Json:
    """Return the state of a family in which every change is committed; `since` is the time of the last one."""
    return {"family": family, "refusal": None, "difference": None, "sound_since": since, "queued": 0} | more


def facts(at: float, pid: int = 812, **more: Any) -> Json:
    """Return the facts of a proxy that has run for two hours."""
    return {
        "node": HERE,
        "version": "0.1.0",
        "mode": "nftables",
        "pid": pid,
        "started": at - 7_380,
        "services": 0,
        "endpointSlices": 0,
        "ready": True,
        "unready": {},
        "connectionCounters": True,
        "nodePortAddresses": {"IPv4": ["192.0.2.11"], "IPv6": ["2001:db8::11"]},
    } | more


def finding(severity: str, what: str, detail: str, fix: str) -> Json:
    """Return the findings of doctor."""
    return {"severity": severity, "about": "node", "what": what, "why": detail, "fix": fix}


def _names() -> Iterable[str]:
    for number in itertools.count():
        for word, namespace in itertools.product(WORDS, NAMESPACES):
            yield f"{namespace}/{word}" if not number else f"{namespace}/{word}-{number}"


def _frontend(text: str, *, local: bool) -> Json:
    address = text.rpartition("/")[0]
    kind = "nodeport" if text.startswith("*") else "loadbalancer" if text.startswith("203.") else "cluster"
    outside = "local endpoints" if local else "endpoints, masqueraded"
    found = {"kind": kind, "address": address, "fromPods": "endpoints", "fromNode": "endpoints, masqueraded"}
    found["fromOutside"] = "endpoints, masqueraded" if kind == "cluster" else outside
    if kind == "loadbalancer":
        return found | {"sources": ["198.51.100.0/24"]}
    return found


def _target(row: Row, number: int, short: str) -> Json:
    node = NODES[number % len(NODES)]
    ready = number < row[2]
    return {
        "port": "http",
        "protocol": "TCP",
        "address": f"10.244.{number % len(NODES)}.{20 + number}:8080",
        "node": node,
        "zone": f"zone-{1 + number % 3}",
        "ready": ready,
        "serving": ready,
        "terminating": False,
        "slice": f"{short}-x7k2p",
        "forZones": [],
        "forNodes": [],
    }


def _port(frontends: list[Json], family: str, targets: Iterable[Json], *, affinity: bool) -> Json:
    inside = [one for one in targets if one["ready"]]
    found: Json = {
        "name": "http",
        "protocol": "TCP",
        "family": family,
        "frontends": frontends,
        "endpoints": [one["address"] for one in inside],
        "localEndpoints": [one["address"] for one in inside if one["node"] == HERE],
    }
    return found | ({"affinitySeconds": 10_800} if affinity else {})
