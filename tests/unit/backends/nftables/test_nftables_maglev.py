"""Consistent hashing in the table: chains that exist while a Service needs them, and slots that change one by one."""

import pytest

from kubeproxy.backends.state import Kind
from kubeproxy.model.objects import Annotations, EndpointPort, ServicePort
from support import nftables_packets
from support.cluster_objects import HERE, THERE, endpoint, parsed, service
from support.compiled import compile_service
from support.nftables_ground import FakeGround, resync, sync
from support.nftables_plans import V4, WORLD, sticky
from unit.backends.nftables.test_nftables_examine import everything, some

A = ("default", "a")


def hashed(numbers, algorithm="maglev-251", affinity=None, policy="Cluster"):
    """Return a Service with endpoints of these numbers; the even ones are on this node."""
    subject = service(
        "a",
        ports=[ServicePort(port=80, node_port=30080)],
        ingress=["198.51.100.1"],
        annotations=Annotations(algorithm=algorithm),
        session_affinity=affinity,
        external_traffic_policy=policy,
    )
    members = [endpoint(f"10.244.0.{n}", THERE if n % 2 else HERE) for n in numbers]
    return compile_service(subject, [parsed(*members, ports=[EndpointPort(port=8080)])], WORLD).plans


def chains(ground):
    return sorted(name for name in ground.chains(V4) if "maglev" in name)


@pytest.mark.parametrize("policy", ["Cluster", "Local"])
@pytest.mark.parametrize("affinity", [None, "ClientIP"])
def test_packets_have_the_predicted_outcome(affinity, policy):
    with FakeGround.fresh() as ground:
        backend = ground.start()
        resync(backend, {})
        for numbers in ([1, 2, 3, 4], [1, 2, 4], []):
            plans = hashed(numbers, affinity=affinity, policy=policy)
            sync(backend, (A, plans))
            nftables_packets.check(ground.kernel, WORLD, V4, plans)
        ground.is_clean(backend, {A: plans})


def test_chains_are_made_when_they_are_needed_and_a_restart_takes_them_over(ground):
    backend = ground.start()
    resync(backend, {A: hashed([1, 2, 3], None)})
    assert chains(ground) == []
    before = ground.rule_handles()
    sync(backend, (A, hashed([1, 2, 3])))
    made = ["cluster-maglev-251", "external-maglev-251", "maglev-251"]
    assert chains(ground) == sorted([*made, "nodeport-external-maglev-251", "nodeport-maglev-251"])
    assert set(before) < set(ground.rule_handles())
    assert not ground.is_touched(backend)
    again = ground.start()
    assert resync(again, {A: hashed([1, 2, 3])}) == 0
    # One endpoint is removed: a third of the slots of each of the three addresses changes, and a few more.
    assert sync(again, (A, hashed([1, 3]))) < 2 * 3 * 251 * 0.5
    ground.is_clean(again, {A: hashed([1, 3])})
    sync(again, (A, hashed([1, 3], None)))
    again._prune_at = 0
    plans = {A: hashed([1, 3], None), ("default", "b"): sticky("b", 2, 2)}
    sync(again, *plans.items())
    assert chains(ground) == []
    ground.is_clean(again, plans)


def test_a_changed_table_while_no_proxy_runs_is_written_where_it_differs(ground):
    resync(ground.start(), {A: hashed([1, 2, 3, 4])})
    again = ground.start()
    assert 0 < resync(again, {A: hashed([1, 2, 3, 5])}) < 2 * 3 * 251 * 0.5
    ground.is_clean(again, {A: hashed([1, 2, 3, 5])})


def test_an_examination_looks_at_each_slot(ground):
    plans = {A: hashed([1, 2])}
    backend = ground.start()
    resync(backend, plans)
    assert everything(ground, plans) == some(ground, plans) == []
    slots = backend._placed[A][0].cluster
    one, other = slots.index(plans[A][0].cluster[0]), slots.index(plans[A][0].cluster[1])
    at = "10.96.0.1 . tcp . 80 . "
    ground.disturb(*(f"delete element ip kube-proxy endpoints {{ {at}{slot} }}" for slot in (one, other)))
    swapped = f"{at}{one} : 10.244.0.2 . 8080, {at}{other} : 10.244.0.1 . 8080"
    ground.disturb(f"add element ip kube-proxy endpoints {{ {swapped} }}")
    for found in (everything(ground, plans), some(ground, plans)):
        (finding,) = found
        assert (finding.service, finding.kind) == (A, Kind.DIFFERENT)
        assert finding.what == "2 of 251 slots of the table of 10.96.0.1:80/tcp"
    resync(backend, plans)
    assert everything(ground, plans) == []
