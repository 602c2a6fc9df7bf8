"""Other programs that damage our rules, and a failing nft: repaired, logged, reported by an event, and retried."""

from __future__ import annotations

import re

import pytest

from support.live import Live

QUICK = {"nftables": {"syncPeriod": "500ms", "minSyncPeriod": "0s"}}
FAILURES = 'kubeproxy_sync_proxy_rules_nftables_sync_failures_total{ip_family="IPv4"}'

HARM = {
    "flush-ruleset": ["flush ruleset"],
    "delete-table": ["delete table ip kube-proxy"],
    "flush-table": ["flush table ip kube-proxy"],
    "delete-chain": ["flush chain ip kube-proxy nat-prerouting", "delete chain ip kube-proxy nat-prerouting"],
    "insert-rule": ["insert rule ip kube-proxy services drop"],
    "flush-elements": ["flush map ip kube-proxy endpoints", "flush map ip kube-proxy cluster-services"],
    "dormant": ["add table ip kube-proxy { flags dormant ; }"],
    "what-no-rule-shows": [
        "add chain ip kube-proxy filter-forward { policy drop ; }",
        "add chain ip kube-proxy stray { type filter hook input priority 5 ; policy drop ; }",
        "delete element ip kube-proxy transports { tcp }",
        "delete map ip kube-proxy nodeport-session-pools",
    ],
    "other-table-of-that-name": ["flush ruleset", "add table ip kube-proxy", "add chain ip kube-proxy services"],
}


async def serving(bare: Live, config: dict[str, object] = QUICK) -> str:
    """A Service through a running proxy; returns the ruleset of its family."""
    bare.service("web", "a1 b1", type="NodePort", ipFamilyPolicy="RequireDualStack")
    await bare.start(config)
    await bare.expect(bare.front("web"), {"pod": "a1 b1", "outside": "a1 b1"})
    return await bare.nft("list", "table", "ip", "kube-proxy")


def words(ruleset: str) -> list[str]:
    """Return a ruleset without the order of its elements."""
    return sorted(re.split(r"[\s,]+", ruleset))


@pytest.mark.quick("insert-rule", "delete-table", "flush-elements")
@pytest.mark.parametrize("commands", HARM.values(), ids=HARM)
async def test_harm_is_repaired(bare: Live, commands: list[str]) -> None:
    before = await serving(bare)
    await bare.nft("add table ip bystander")
    for command in commands:
        await bare.nft(*command.split())

    async def whole() -> str:
        status, now, _ = await bare.cluster.exec("node", ["nft", "list", "table", "ip", "kube-proxy"])
        return "" if status == 0 and words(now) == words(before) else f"the table is not as it was:\n{now}"

    await bare.eventually(whole)
    for kind in ("cluster", "nodeport"):
        for family in ("IPv4", "IPv6"):
            await bare.expect(bare.front("web", kind, family), {"pod": "a1 b1", "outside": "a1 b1"}, "tcp")
    assert bare.logged("Repairing: .*changed by another program")
    await bare.until(lambda: any("RulesChangedByOthers" in e for e in bare.events("node-a")), "an event")
    if "flush ruleset" not in commands:
        assert "bystander" in await bare.nft("list", "tables")


async def test_single_elements_are_repaired_within_a_period(bare: Live) -> None:
    await serving(bare)
    front = bare.front("web")
    extra = f"{{ {front.address} . tcp . 81 . 0 : 192.0.2.1 . 1 }}"
    await bare.nft("add", "element", "ip", "kube-proxy", "endpoints", extra)
    await bare.nft("delete", "element", "ip", "kube-proxy", "endpoints", f"{{ {front.address} . tcp . 80 . 0 }}")
    await bare.programmed(front, "a1 b1")
    assert "192.0.2.1" not in await bare.nft("list", "map", "ip", "kube-proxy", "endpoints")


async def test_other_programs_tables_are_no_drift(bare: Live) -> None:
    await serving(bare)
    for n in range(3):
        await bare.nft("add", "table", "ip", f"other-{n}")
        await bare.nft("add", "chain", "ip", f"other-{n}", "services", "{ type filter hook input priority 5 ; }")
    bare.endpoints("web", "a2")
    await bare.expect(bare.front("web"), {"pod": "a2"})
    syncs = 'kubeproxy_sync_full_proxy_rules_duration_seconds_count{ip_family="IPv4"}'
    full = await bare.metric(syncs)
    await bare.nft("delete", "table", "ip", "other-0")
    await bare.nft("delete", "element", "ip", "kube-proxy", "cluster-ips", f"{{ {bare.front('web').address} }}")
    await bare.until(lambda: bare.logged("Repairing"), "the repair of what is ours")
    await bare.eventually(lambda: _more(bare, syncs, full))
    assert await bare.metric(syncs) == full + 1
    assert "other-1" in await bare.nft("list", "tables")


async def _more(live: Live, series: str, than: float) -> str:
    return "" if await live.metric(series) > than else f"{series} is still {than}"
