"""Two Services that claim the same address and port: the one the API server allocated it to gets it, else the older
one.

The other Service gets an event, and takes over later.
"""

from __future__ import annotations

from lab.topology import NODE_A
from support.live import PORTS, Front, Live
from support.modes import modes

OLD, YOUNG = "2020-01-01T00:00:00Z", "2024-01-01T00:00:00Z"


def aged(live: Live, name: str, endpoints: str, external: str, created: str) -> None:
    """Create a Service with this creationTimestamp."""
    live.service(name, endpoints, externalIPs=[external])
    record = live.cluster.store.get("services", ("default", name))
    assert record is not None
    service = record.decode()
    service["metadata"]["creationTimestamp"] = created
    live.cluster.store.put("services", service)


async def test_the_older_service_has_the_external_ip(live: Live) -> None:
    external = "198.51.100.200"
    aged(live, "younger", "b1", external, YOUNG)
    await live.expect(live.front("younger", "external"), {"outside": "b1", "pod": "b1"})
    aged(live, "older", "a1", external, OLD)
    front = live.front("older", "external")
    await live.expect(front, {"outside": "a1", "pod": "a1", "node": "a1"})
    await live.expect(live.front("younger"), {"pod": "b1 kept"})
    await live.until(lambda: live.events("younger"), "an event about the Service that loses")
    assert any("older Service default/older" in event and external in event for event in live.events("younger"))
    assert live.events("older") == []
    live.endpoints("younger", "b2")
    await live.expect(live.front("younger"), {"pod": "b2"})
    await live.expect(front, {"outside": "a1"})
    live.delete("older")
    await live.expect(front, {"outside": "b2", "pod": "b2"})
    live.delete("younger")
    await live.expect(front, {"pod": "timeout"}, "udp")


async def test_only_the_port_that_collides_is_lost(live: Live) -> None:
    external = "198.51.100.201"
    aged(live, "first", "a1", external, OLD)
    other = {"name": "other", "port": 81, "protocol": "TCP", "targetPort": 3000}
    live.service("second", ports=[*PORTS, other], externalIPs=[external])
    live.endpoints("second", "b1", [{"name": n, "port": 3000, "protocol": "TCP"} for n in ("tcp", "other")])
    await live.expect(live.front("second", "external", port=2), {"outside": "b1"}, "tcp")
    await live.expect(live.front("first", "external"), {"outside": "a1"})
    await live.expect(live.front("second"), {"outside": "b1"}, "tcp")
    live.cluster.patch("services", "first", {"spec": {"externalIPs": []}})
    await live.expect(live.front("second", "external"), {"outside": "b1"}, "tcp")


@modes("nftables", "iptables-nft", "userspace")
async def test_an_older_external_ip_takes_neither_a_cluster_ip_nor_a_nodeport(bare: Live) -> None:
    await bare.start()
    bare.service("web", "b1", type="NodePort")
    cluster, nodeport = bare.front("web"), bare.front("web", "nodeport")
    same_number = {"name": "tcp", "port": nodeport.port, "protocol": "TCP", "targetPort": 3000}
    aged(bare, "thief", "a1", cluster.address, OLD)
    await bare.until(lambda: bare.events("thief"), "an event about the cluster IP")
    assert any("is the cluster IP of Service default/web" in event for event in bare.events("thief"))
    await bare.expect(cluster, {"pod": "b1", "outside": "b1", "node": "b1"})
    elsewhere = "198.51.100.202"
    bare.service("second-thief", "a1", ports=[same_number], externalIPs=[NODE_A.ip, elsewhere])
    await bare.until(lambda: bare.events("second-thief"), "an event about the NodePort")
    assert any("is a NodePort of Service default/web" in event for event in bare.events("second-thief"))
    await bare.expect(nodeport, {"outside": "b1", "pod": "b1"}, "tcp")
    await bare.expect(Front(elsewhere, nodeport.port), {"outside": "a1"}, "tcp")
    bare.delete("web")
    await bare.expect(nodeport, {"outside": "a1"}, "tcp")
    await bare.expect(cluster, {"pod": "a1"})
