"""The judges: a correct world has no complaint, and each deliberate fault in it has one."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kubeproxy.ask.facts import Objects
from kubeproxy.model.addresses import Family
from kubeproxy.model.endpoints import Slice
from lab.apiserver.store import Store
from prove import dumps, judges, launcher, meant, mutations, packets, truth
from prove.generate import Generator
from prove.mutating import MUTATIONS, SOURCE, broken
from prove.play import kind, play, played
from prove.steps import Step, copied
from prove.world import World

SERVICE = {
    "metadata": {"namespace": "default", "name": "s1", "uid": "u", "creationTimestamp": "2024-01-01T00:00:00Z"},
    "spec": {
        "type": "NodePort",
        "ipFamilies": ["IPv4"],
        "clusterIPs": ["10.96.200.1"],
        "clusterIP": "10.96.200.1",
        "externalIPs": ["198.51.100.1"],
        "ports": [{"name": "p", "port": 80, "protocol": "TCP", "targetPort": 3000, "nodePort": 31000}],
    },
    "status": {},
}
SLICE = {
    "metadata": {"namespace": "default", "name": "s1-1", "uid": "v", "labels": {"kubernetes.io/service-name": "s1"}},
    "addressType": "IPv4",
    "endpoints": [{"addresses": ["a1"], "conditions": {"ready": True}, "nodeName": "node-a"}],
    "ports": [{"name": "p", "port": 3000, "protocol": "TCP"}],
}
HISTORY: list[Step] = [
    ("put", "services", SERVICE),
    ("put", "endpointslices", SLICE),
    ("quiet",),
    ("backup",),
    ("away", True),
    ("remove", "services", "default", "s1"),
    ("kill",),
    ("back",),
    ("api", {"cut_watch": 2, "gone": 1}),
    ("rollback",),
    ("harm", "flush"),
    ("quiet",),
    ("zone", "zone-b"),
    ("again",),
    ("pause", 0.1),
    ("look",),
]


def test_a_slice_must_be_known_also_without_its_service():
    store = Store()
    version = str(store.put("endpointslices", copied(SLICE)).revision)
    assert truth.unknown(store, []) == [f"slice ('default', 's1-1'): version {version} expected, has None"]
    piece = Slice(Family.IPV4, (), (), (), version=version)
    known = Objects(name=("default", "s1"), service=None, slices={"s1-1": piece})
    assert truth.unknown(store, [known]) == []
    store.remove("endpointslices", ("default", "s1-1"))
    assert truth.unknown(store, [known]) == [f"slice ('default', 's1-1'): gone, but the proxy has version {version}"]


@asynccontextmanager
async def settled(world: World) -> AsyncIterator[judges.Scene]:
    scene = await judges.settled(world)
    try:
        yield scene
    finally:
        world.live.cluster.faults.update({"stall_watch": False})


async def met(world: World, scene: judges.Scene) -> list[str]:
    """Send packets until every frontend of the small world was checked; return the differences."""
    found = []
    for seed in range(4):
        found += await packets.foretold(world, scene.facts, scene.planner, random.Random(seed))
    return found


@pytest.mark.slow("a history in a cluster, as `make prove` plays them")
@pytest.mark.long(20)
async def test_a_correct_world_has_no_complaint_and_each_fault_has_one(monkeypatch) -> None:
    monkeypatch.setattr(judges, "TIMEOUT", 15.0)
    async with World("nftables") as world:
        assert await play(world, HISTORY) == []
        for step in HISTORY[:3]:
            await world.play(step) if step[0] != "quiet" else await judges.quiet(world, random.Random(1))
        async with settled(world) as scene:
            await the_model_is_another(world, scene)
            await the_kernel_is_another(world, scene)
            await an_object_is_not_heard_of(world)


async def the_model_is_another(world: World, scene: judges.Scene) -> None:
    """The packets, and the dump, do not fit another cluster's objects."""
    assert await met(world, scene) == []
    plans = truth.plans(scene.planner)
    del plans["default", "s1"]
    made = await asyncio.to_thread(dumps.fresh, "nftables", scene.facts, plans)
    there = await world.inside("node", lambda: dumps.dump("nftables", scene.facts))
    assert any("10.96.200.1" in one for one in dumps.differences(there, made))


async def the_kernel_is_another(world: World, scene: judges.Scene) -> None:
    """Without repairs, packets have other outcomes, and the meaning of the rules differs from the objects."""
    assert await world.inside("node", lambda: meant.different(world)) == []
    await world.stop_traffic()
    await world.live.proxy.kill()
    await world.live.nft("delete", "table", "ip", "kube-proxy")
    found = await met(world, scene)
    assert {kind(one) for one in found} == {"packet"}
    (missing,) = {one.partition(": [")[2] for one in await world.inside("node", lambda: meant.different(world))}
    assert missing.startswith("'passed'] instead of ['10.244."), missing
    await world.start()


async def an_object_is_not_heard_of(world: World) -> None:
    judges.TIMEOUT = 1.0
    await judges.settled(world)
    world.live.cluster.faults.update({"stall_watch": True})
    await world.play(("remove", "endpointslices", "default", "s1-1"))
    with pytest.raises(AssertionError, match="s1-1"):
        await judges.settled(world)


BALANCED = {
    "type": "LoadBalancer",
    "ipFamilies": ["IPv4"],
    "clusterIPs": ["10.96.200.1"],
    "clusterIP": "10.96.200.1",
    "externalTrafficPolicy": "Local",
    "healthCheckNodePort": 31200,
    "loadBalancerSourceRanges": ["192.168.100.0/24", "10.244.0.0/16"],
    "ports": [{"name": "p", "port": 80, "protocol": "UDP", "targetPort": 3000, "nodePort": 31000}],
}
STATUS = {"loadBalancer": {"ingress": [{"ip": "203.0.113.7"}]}}


def balanced(**spec: object) -> Step:
    return ("put", "services", SERVICE | {"spec": BALANCED | spec, "status": STATUS})


def endpoints(**ready: bool) -> Step:
    found = [
        {"addresses": [pod], "conditions": {"ready": is_ready}, "nodeName": "node-a"} for pod, is_ready in ready.items()
    ]
    ports = [{"name": "p", "port": 3000, "protocol": "UDP"}]
    return ("put", "endpointslices", SLICE | {"endpoints": found, "ports": ports})


@pytest.mark.slow("histories in clusters, as `make prove` plays them")
@pytest.mark.long(20)
@pytest.mark.parametrize(
    ("name", "step", "complaint"),
    [
        ("stale UDP flows stay", endpoints(a3=True), "stale flow"),
        ("a health check counts unready endpoints", endpoints(a1=True, a2=False), "health check 31200: 2 endpoints"),
        (
            "an unreadable source range opens a load balancer",
            balanced(loadBalancerSourceRanges=["10.0.0.0/99"]),
            "plans of",
        ),
    ],
)
async def test_a_broken_line_is_found(monkeypatch, name: str, step: Step, complaint: str) -> None:
    monkeypatch.setattr(judges, "TIMEOUT", 15.0)
    monkeypatch.setattr(packets, "SAMPLES", 16)
    monkeypatch.setenv(launcher.MUTATION, name)
    judged = ("settled", "stale flows"), ("quiet",)
    wrong = await played([balanced(), endpoints(a1=True), ("quiet",), ("quiet",), step, *judged], seed="1")
    assert any(complaint in one for one in wrong), wrong


@pytest.mark.slow("histories in clusters, as `make prove` plays them")
@pytest.mark.long(20)
@pytest.mark.parametrize(
    ("name", "sequence"),
    [
        ("stale UDP flows are searched once", Generator._late_flows),
        ("clients with session affinity stay in slots", Generator._clients),
        ("numbers of endpoints are reused after a restart", Generator._clients),
        ("keys that move between Services are not grouped", Generator._exchange),
        ("local addresses are read once", Generator._node_address),
        ("a health check counts unready endpoints", Generator._balancers),
    ],
)
async def test_an_aimed_sequence_finds_a_broken_line(monkeypatch, name: str, sequence) -> None:
    monkeypatch.setattr(judges, "TIMEOUT", 15.0)
    monkeypatch.setenv(launcher.MUTATION, name)
    generator = Generator("1", "nftables")
    for _ in range(3):  # a client gets a random endpoint, and a search for flows may be late
        sequence(generator)
    wrong = await played(generator.made, seed="1")
    assert any(re.search(MUTATIONS[name].complaint, one) for one in wrong), wrong


@pytest.mark.parametrize(
    ("said", "pattern", "complaint"),
    [
        ("", "", ""),
        (
            "FAILED: again\n  after step 1: other\n  after step 1: stale   flow: a\n",
            "stale +flow",
            "after step 1: stale flow: a",
        ),
        ("FAILED: again\n  after step 1: other\n", "stale flow", ""),
        ("FAILED: again\n  after step 1: other\n", "", "after step 1: other"),
        ("FAILED: a world ended\n", "", "FAILED: a world ended"),
    ],
)
def test_a_mutation_is_found_by_its_own_complaint(said: str, pattern: str, complaint: str) -> None:
    assert mutations._complaint(said, pattern) == complaint


@pytest.mark.parametrize("name", MUTATIONS)
def test_lines_that_mutations_break_are_there(name: str) -> None:
    mutation = MUTATIONS[name]
    text = broken((SOURCE / mutation.file).read_text(), mutation)
    compile(text, mutation.file, "exec")


@pytest.mark.parametrize(
    ("place", "label", "same"),
    [
        ("iptables nat KUBE-SEP-A", "default/web:http", True),
        ("iptables nat KUBE-SVC-A", "default/web:http -> 10.244.0.1:80", True),
        ("iptables nat KUBE-SVC-A", "default/web:http cluster IP", False),
        ("iptables nat KUBE-EXT-A", "default/web:http", False),
    ],
)
def test_rules_of_a_large_cluster_have_no_endpoint_comments(place, label, same):
    def rule(label: str, target: str = "KUBE-SEP-B") -> list[str]:
        said = f' -m comment --comment "{label}"' if label else ""
        return [f"-A {place.split()[2]}{said} -j {target}"]

    assert not dumps.differences({place: rule(label)}, {place: rule(label)})
    for one, other in ((rule(label), rule("")), (rule(""), rule(label))):
        assert bool(dumps.differences({place: one}, {place: other})) is not same
    assert dumps.differences({place: rule(label)}, {place: rule(label.replace("web", "other"))})
    assert dumps.differences({place: rule(label)}, {place: rule("", "KUBE-SEP-C")})
