"""unfounded: an hour in which no endpoint that answers may be ejected; one minute with --quick.

One client's packets are dropped by the endpoints, as by a network policy. Endpoints accept late, are full for moments,
or are restarted. The network loses packets. A flood of SYNs from addresses that do not answer reaches the Service, and
the proxy is restarted. An ejection is unfounded if the endpoint neither refused nor dropped SYNs in the half second
before it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from bench import objects, proxy, unsteady
from bench.charts import Chart
from bench.companion import Companion
from bench.ejection import running
from bench.figures import spreads
from bench.network import CLIENT, Network, configure
from bench.pods import PORT
from bench.report import Column, Report, Row, panel_by_kind
from bench.runs import Run
from kubeproxy.features import EJECTION
from kubeproxy.model.addresses import unpack
from kubeproxy.model.ejection import Ejections
from kubeproxy.model.events import Event, Replaced
from kubeproxy.model.plan import ServiceName

ENDPOINTS: Final = objects.endpoints_of(0, 2 * len(unsteady.KINDS))
RATE: Final = 50  # connections per second of a client that no rule drops
RESTART: Final = 60.0  # seconds between two starts of the proxy
LOSS: Final = 100  # one packet in this number is lost, in each direction
BEFORE: Final = 0.5  # seconds before an ejection in which the endpoint failed
SETTINGS: Final = EJECTION.on(proxy.SETTINGS, "always")

COLUMNS = (
    Column("unfounded", "unfounded", 0),
    Column("ejections", "ejections", 0),
    Column("suspects", "suspects", 0),
    Column("outages", "outages", 0),
    Column("connections", "connections", 0),
    Column("failed", "failed", 0),
    Column("dropped client's", "dropped", 0),
    Column("flood's SYNs", "flood", 0),
    Column("starts", "starts", 0),
)

Ejected = list[tuple[bytes, str, float]]
"""Keys as in model.ejection, reasons, and times in seconds of the machine's monotonic clock."""


def measure(seconds: float) -> dict[str, Any]:
    """Run; return counts."""
    return asyncio.run(_measured(seconds))


async def _measured(seconds: float) -> dict[str, Any]:
    network, address = Network(), objects.cluster_ip(0)
    network.client.ask("configure", lines=[f"address add {unsteady.DROPPED}/24 dev eth0"])
    configure({"lines": [f"route add {unsteady.FLOOD} via {CLIENT}"]})  # one neighbour: all namespaces share the table
    network.pods.ask("nft", text=_drops())
    places = {"endpoints": (network.pods, ENDPOINTS), "dropped": (network.client, [address])}
    places["flood"] = places["dropped"]
    others = {role: Companion("bench.unsteady", str(at.pid), role, *more) for role, (at, more) in places.items()}
    ejected, counts, ends = Ejected(), Counter[str](), time.monotonic() + seconds
    try:
        while (left := ends - time.monotonic()) > 0:
            knock = partial(network.client.ask, "knock", address=address, port=80, rate=RATE, patience=5.0)
            await _proxy(partial(knock, limit=min(RESTART, left)), ejected, counts)
        await asyncio.sleep(5)  # an outage is counted when it ends
        outages: unsteady.Outages = others["endpoints"].ask("report")["outages"]
        counts.update({role: others[role].ask("report")["count"] for role in ("dropped", "flood")})
    finally:
        for one in others.values():
            one.close()
        network.close()
    unfounded = [text for one in ejected if (text := _unfounded(*one, outages))]
    counts.update(outages=len(outages), ejections=len(ejected), unfounded=len(unfounded))
    return {"texts": unfounded, **counts}


def _drops() -> str:
    """Return rules by which the first endpoint of each kind drops one client's packets, and the network drops some
    packets of all clients.
    """
    some = ", ".join(ENDPOINTS[: len(unsteady.KINDS)])
    rules = {"input": f"ip saddr {unsteady.DROPPED} ip daddr {{ {some} }} tcp dport {PORT} drop", "output": ""}
    text = "add table ip drops\n"
    for hook, rule in rules.items():
        text += f"add chain ip drops {hook} {{ type filter hook {hook} priority 0 ; }}\n"
        for each in (f"meta l4proto tcp numgen random mod {LOSS} 0 drop", rule):
            text += f"add rule ip drops {hook} {each}\n" if each else ""
    return text


async def _proxy(knock: Callable[[], dict[str, float]], ejected: Ejected, counts: Counter[str]) -> None:
    """Run a proxy while a client connects."""
    engine, backends = proxy.engine_of(SETTINGS, proxy.Listener())
    _record(engine.planner.ejections, ejected, counts)
    async with running(engine, backends):
        engine.arrive(_lists())
        await engine.ready.wait()
        found = await asyncio.to_thread(knock)
        counts.update(starts=1, connections=int(found["count"]), failed=int(found["failed"]))


def _record(ejections: Ejections, ejected: Ejected, counts: Counter[str]) -> None:
    """Record the results of connection attempts."""
    failed, answered = ejections.failed, ejections.answered

    def recorded(key: bytes, reason: str, now: float, epoch: float) -> Sequence[ServiceName]:
        if key not in ejections.failures:
            ejected.append((key, reason, time.monotonic()))
        return failed(key, reason, now, epoch)

    def counted(key: bytes, now: float) -> Sequence[ServiceName]:
        counts["suspects"] += key not in ejections.failures
        return answered(key, now)

    ejections.failed, ejections.answered = recorded, counted  # type: ignore[method-assign]


def _lists() -> list[Event]:
    service = proxy.decoded_object("services", objects.service(0))
    piece = proxy.decoded_object("endpointslices", objects.endpoint_slice(0, ENDPOINTS))
    return [Replaced("nodes", []), Replaced("services", [service]), Replaced("endpointslices", [piece])]


def _unfounded(key: bytes, reason: str, at: float, outages: unsteady.Outages) -> str:
    """Return the details of an unfounded ejection, '' if the endpoint failed shortly before."""
    address = unpack(key[:-3])
    mine = [(began, ended) for one, began, ended in outages if one == address]
    if any(began <= at and ended >= at - BEFORE for began, ended in mine):
        return ""
    last = max([at - ended for _, ended in mine if ended <= at], default=at)
    kind = unsteady.KINDS[ENDPOINTS.index(address) % len(unsteady.KINDS)].__name__
    return f"{address} ({kind}): {reason}; its last outage ended {last:.2f} s before"


def run(with_: Run) -> Report:
    """Run once."""
    seconds = 60.0 if with_.quick else 3600.0
    found = with_.measure(f"{seconds:.0f} s", measure, seconds=seconds)
    notes = (
        f"{RATE} connections a second, and {unsteady.KNOCKS} of the client that half of the {len(ENDPOINTS)} drop.",
        f"{unsteady.SYNS} SYNs a second from addresses that do not answer, half of them twice.",
        f"One packet of {LOSS} is lost in each direction.",
        f"unfounded: the endpoint neither refused nor dropped SYNs in the {BEFORE} s before its ejection.",
        *found.pop("texts"),
    )
    rows = [Row(f"{seconds / 60:.0f} min", dict(spreads([found])))]
    panel = panel_by_kind("Ejections", "", "run", rows, {"ejections": "all", "unfounded": "unfounded"})
    return Report(
        "unfounded",
        "Ejections of endpoints that are slow, full or restarted",
        COLUMNS,
        rows,
        Chart("Ejections", (panel,)),
        notes,
    )
