"""Counts kube-proxy's rules and elements in the kernel, as `nft` lists them."""

from __future__ import annotations

import json
from dataclasses import dataclass

from lab.cluster import LabCluster


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers of chains, rules and elements in both tables."""

    chains: int = 0
    rules: int = 0
    elements: int = 0


async def kernel_sizes(cluster: LabCluster) -> Sizes:
    """Return the numbers that `nft list table` shows for IPv4 and IPv6. A missing table counts as empty."""
    counted = {"chain": 0, "rule": 0, "elem": 0}
    for family in ("ip", "ip6"):
        _, out, _ = await cluster.exec("node", ["nft", "-j", "list", "table", family, "kube-proxy"])
        for entry in json.loads(out or '{"nftables": []}')["nftables"]:
            ((kind, listed),) = entry.items()
            if kind in counted:
                counted[kind] += 1
            elif kind in {"map", "set"}:
                counted["elem"] += len(listed.get("elem", ()))
    return Sizes(counted["chain"], counted["rule"], counted["elem"])
