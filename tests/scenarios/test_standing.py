"""/debug/state and the metrics while the kernel lacks accepted changes: they never report them as programmed."""

from __future__ import annotations

import json
import re
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from lab.proxyprocess import METRICS_PORT
from support.live import Live
from support.owned import owned_table
from support.promtool import expect_firing

Json = dict[str, Any]
SLOW = {"nftables": {"syncPeriod": "1h", "minSyncPeriod": "0s"}}


async def state(live: Live, query: str) -> Json:
    status, body = await live.page(f"/debug/state?{query}", METRICS_PORT)
    assert status == 200, body
    return json.loads(body)


async def becomes(live: Live, wanted: str) -> Json:
    """Wait until the Service is in a state; return the page."""
    page: Json = {}

    async def check() -> str:
        page.update(await state(live, "namespace=default&name=web"))
        found = page["services"][0]["state"]
        return "" if found == wanted else f"{wanted} expected: {page}"

    await live.eventually(check)
    return page


async def test_a_table_that_another_program_owns_is_not_called_programmed(bare: Live, tmp_path: Path) -> None:
    bare.service("web", "a1 b1", ipFamilyPolicy="RequireDualStack")
    bare.service("six", "a1", ipFamilies=["IPv6"], ipFamilyPolicy="SingleStack")
    await bare.start(SLOW)
    whole = (await becomes(bare, "programmed"))["families"]["IPv4"]
    with owned_table(bare.proxy.namespace):
        page = await becomes(bare, "refused")
        reason = page["services"][0]["reason"]
        assert re.match(r"IPv4: the table kube-proxy of IPv4 belongs to the program with .* process id \d+ ", reason)
        family = page["families"]["IPv4"]
        assert (family["state"], family["wholeSince"]) == ("refused", None)
        assert whole["wholeSince"] <= family["lastSeenWhole"]
        assert page["families"]["IPv6"]["state"] == "whole"
        assert (await state(bare, "namespace=default&name=six"))["services"][0]["state"] == "programmed"
        text = (await bare.page("/debug/state?format=text", METRICS_PORT))[1]
        assert "\nIPv4: refused, last seen whole 2" in text
        # Only the repair is queued; the same holds after a further change.
        for change in (lambda: None, lambda: bare.endpoints("web", "a2")):
            change()
            served = (await bare.page("/metrics", METRICS_PORT))[1]
            expect_firing(served, ["KubeProxyChangesWait", "KubeProxyNotReady"], time.time(), tmp_path)
    page = await becomes(bare, "programmed")
    assert page["families"]["IPv4"]["wholeSince"] > whole["wholeSince"]
    await bare.programmed(bare.front("web"), "a2")
    served = (await bare.page("/metrics", METRICS_PORT))[1]
    expect_firing(served, [], time.time(), tmp_path)
    assert await bare.metric("kubeproxy_repairs_total") >= 1


async def test_an_element_that_is_missing_is_known_when_it_was_last_seen(bare: Live) -> None:
    """The time of the last complete inspection is never later than that of the damage, until the repair."""
    bare.service("web", "a1 b1")
    await bare.start({"nftables": {"syncPeriod": "4s", "minSyncPeriod": "0s"}})
    await becomes(bare, "programmed")
    front = bare.front("web")
    element, looks = f"{{ {front.address} . tcp . 80 . 0 }}", 0
    for _ in range(10):  # on a busy machine a repair may come before the second inspection
        before = int(await bare.run("date", "+%s%N")) / 1e9
        await bare.nft("delete", "element", "ip", "kube-proxy", "endpoints", element)
        harmed = int(await bare.run("date", "+%s%N")) / 1e9
        while await bare.destinations(front) != {"a1:3000", "b1:3000"}:
            family = (await state(bare, "namespace=default&name=web"))["families"]["IPv4"]
            if family["state"] == "whole" and await bare.destinations(front) != {"a1:3000", "b1:3000"}:
                assert seconds(family["lastSeenWhole"]) <= harmed
                looks += 1
        if looks > 1:
            break
    assert looks > 1
    family = (await becomes(bare, "programmed"))["families"]["IPv4"]
    assert seconds(family["wholeSince"]) >= before


def seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


async def test_found_and_named(bare: Live) -> None:
    bare.service("web", "a1 b1", type="NodePort", ipFamilyPolicy="SingleStack")
    bare.service("none", clusterIP="None")
    await bare.start()
    await becomes(bare, "programmed")
    port = bare.front("web", "nodeport").port
    for query in (f"port={port}", f"address={bare.ips['a1']['IPv4']}", f"address={bare.front('web').address}&port=80"):
        assert [found["name"] for found in (await state(bare, query))["services"]] == ["web"], query
    status, text = await bare.page("/debug/state?namespace=default&name=none", METRICS_PORT)
    assert (status, "headless" in text) == (404, True)
    assert (await bare.page("/debug/state?address=web", METRICS_PORT))[0] == 400
