"""Two Services that ask for the same address and port: the older one has it, the other is told and takes over."""

from __future__ import annotations

from support.live import PORTS, Live

OLD, YOUNG = "2020-01-01T00:00:00Z", "2024-01-01T00:00:00Z"


def aged(live: Live, name: str, endpoints: str, external: str, created: str) -> None:
    """Create a Service that says it was made at a time."""
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
