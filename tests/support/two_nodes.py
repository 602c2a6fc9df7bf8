"""The cluster of upstream's scenarios: both nodes run a proxy in one mode, and each has a client pod."""

from __future__ import annotations

import asyncio

from lab.cluster import LabCluster
from lab.proxyprocess import Proxy
from lab.topology import NODE_A, NODE_B
from support.live import TIMEOUT, Json, Live
from support.modes import MODES

CLIENTS = {"client-a": NODE_A, "client-b": NODE_B}
"""Client pods, which serve nothing, by node."""


class TwoNodes(Live):
    """The shared cluster of the scenarios; a scenario that stops proxies or changes Nodes must restore everything."""

    def __init__(self, cluster: LabCluster, mode: str) -> None:
        super().__init__(cluster, MODES[mode])

    @property
    def proxy(self) -> Proxy:
        """The proxy of node-a."""
        return self.proxies[0]

    async def up(self) -> None:
        """Start the clients and the proxies."""
        for name, node in CLIENTS.items():
            spec = {"nodeName": node.name, "containers": [{"name": "client"}]}
            self.cluster.create({"kind": "Pod", "metadata": {"name": name, "labels": {"role": "client"}}, "spec": spec})
        for pod in await self.cluster.pods_ready("role=client", len(CLIENTS), timeout=TIMEOUT):
            self.note_addresses(pod["metadata"]["name"], pod)
        for place in ("node", "neighbour"):
            await self.choose_variant(self.mode.variant, place)
        await self.start_proxies()

    async def start_proxies(self, overrides: Json | None = None) -> None:
        """Run a proxy on each node, and wait until both are ready."""
        config = {**self.mode.config, **(overrides or {})}
        starts = (self.cluster.start_proxy(config, node=node, ready_within=TIMEOUT) for node in CLIENTS.values())
        self.proxies += await asyncio.gather(*starts)

    async def stop_proxies(self) -> None:
        """End all proxies, and forget them."""
        await asyncio.gather(*(proxy.stop() for proxy in self.proxies))
        self.proxies.clear()

    def note_addresses(self, place: str, pod: Json) -> None:
        """Store a pod's addresses, for expected answers that contain the client's address."""
        v4, v6 = (entry["ip"] for entry in pod["status"]["podIPs"])
        self.ips[place] = {"IPv4": v4, "IPv6": v6}
