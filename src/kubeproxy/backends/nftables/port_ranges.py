"""Ranges of ports: the chains of ranges, the jumps from base chains to these chains, and the sets of ranges. Pure. A
table has these chains, jumps and sets only while a Service has a range. There is no base chain for ranges, because the
Go kube-proxy, when it takes over the table, empties only the base chains that it knows. In a map, the key of a range is
an interval, and the data is a pool's number. Endpoints are picked by numbers, as with session affinity."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kubeproxy.backends.nftables.layout import OF_RANGES, ChainName, Layout, SetId
from kubeproxy.model.plan import ServicePlan


def needed_sets(services: Iterable[Iterable[ServicePlan]]) -> tuple[SetId, ...]:
    """Return OF_RANGES if a plan has a range of ports, else no set."""
    return OF_RANGES if any(plan.port_ranges for plans in services for plan in plans) else ()


JUMPS: Final = (
    ("ct state new jump range-firewall-check",),
    ("jump ranges",),
    ("ct state new ct status & dnat == 0 jump range-endpoints-check",),
)
"""Rules of base chains: before translation, for translation, and after each rule that refuses service ports."""


def rules(layout: Layout, key: str, from_pods: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return the chains of ranges, except `range-cluster`, `range-external` and `range-sources`. `key` is the key of a
    frontend as an nft expression, `from_pods` are the rules for packets from pods to frontends with policy Local.

    The packet carries the pool's number, and then the endpoint's number, in place of its destination address. Before
    the translation, a rule writes the endpoint's address into the packet; the translation keeps the port. The
    translation therefore also works if the endpoint is the frontend itself."""
    ip = layout.ip
    source, destination = (f"{ip} {end} set ct original {ip} {end}" for end in ("saddr", "daddr"))

    def leading(set_id: SetId, chain: str) -> str:
        return f"{ip} daddr set {key} map @{set_id} goto {chain}"

    return {
        "ranges": (
            leading(SetId.CLUSTER_RANGES, "range-cluster"),
            leading(SetId.EXTERNAL_RANGES, "range-external"),
            leading(SetId.POLICY_LOCAL_RANGES, "range-policy-local"),
        ),
        "range-policy-local": (
            *from_pods,
            "fib saddr type local goto range-external",
            destination,
            leading(SetId.LOCAL_RANGES, "range-pick"),
        ),
        "range-pick": (f"{ip} daddr vmap @{SetId.RANGE_CHAINS}", "jump session-choose", "goto range-go"),
        "range-go": (_translated(ip), source, destination),
        "range-out": (source, f"dnat to {ip} daddr"),
        "range-firewall-check": (leading(SetId.FIREWALL_RANGES, "range-sources"),),
        "range-endpoints-check": (
            f"{key} @{SetId.NO_LOCAL_ENDPOINT_RANGES} drop",
            f"{key} @{SetId.NO_ENDPOINT_RANGES} goto refuse",
        ),
    }


def _translated(ip: str) -> str:
    return f"{ip} daddr set {ip} daddr map @{SetId.RANGE_ENDPOINTS} goto range-out"


def client_rules(ip: str, name: ChainName, known: str, forget: str, onwards: list[str]) -> list[str]:
    """Return the rules of session affinity that are different for ranges of ports: see affinity.client_rules."""
    if name.treatment == "range-pick":
        to_recall, to_remember = onwards
        return [f"{ip} saddr set {ip} daddr", f"{known} {to_recall}", to_remember]
    return [_translated(ip), f"{ip} daddr set {ip} saddr", forget, *onwards]


def of_ranges(set_id: SetId) -> SetId:
    """Given a set of service ports, return the set of ranges of ports with the same treatment."""
    return SetId(set_id.replace("services", "ranges"))
