"""Keys that move from one Service to another Service, whatever transactions the two Services are in."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.backends.nftables import backend as backend_module
from kubeproxy.errors import ApplyError
from kubeproxy.model.objects import ServicePort
from support.effort import examples
from support.nftables_ground import resync, sync, without_slots
from support.nftables_plans import WORLD, plans_of

NAMES = [("default", f"s{number}") for number in range(1, 5)]
ADDRESSES = [f"203.0.113.{number}" for number in range(1, 4)]
NODE_PORTS = [30001, 30002]
RANGES = ["172.16.0.0/12", "172.16.0.0/16", "172.16.1.0/24"]


@pytest.fixture(autouse=True)
def one_service_a_batch(monkeypatch):
    monkeypatch.setattr(backend_module, "BATCH", 1)


@st.composite
def states(draw):
    """The existing Services, the number of endpoints of each, and the owner of each contested key."""
    there = draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1, max_size=4))
    held = {key: draw(st.sampled_from([None, *there])) for key in [*ADDRESSES, *NODE_PORTS]}
    found = {}
    for name in there:
        node_ports = [port for port in NODE_PORTS if held[port] == name]
        ports = [ServicePort(port=80 + n, name=f"p{n}", node_port=port) for n, port in enumerate(node_ports or [None])]
        kind = draw(st.sampled_from(["external_ips", "ingress"]))
        found[name] = plans_of(
            name[1],
            NAMES.index(name) + 1,
            draw(st.sampled_from([0, 1, 3, 6])),
            ports=ports,
            load_balancer_source_ranges=draw(st.sampled_from([[], *([r] for r in RANGES)])),
            session_affinity=draw(st.sampled_from([None, "ClientIP"])),
            external_traffic_policy=draw(st.sampled_from(["Cluster", "Local"])),
            **{kind: [address for address in ADDRESSES if held[address] == name]},
        )
    return found


def changes(data, earlier, later):
    names = data.draw(st.permutations(sorted(earlier.keys() | later.keys())))
    return [(name, later.get(name, ())) for name in names if earlier.get(name) != later.get(name)]


@examples(20)
@given(st.lists(states(), min_size=2, max_size=5), st.data())
def test_keys_go_from_service_to_service_in_any_order(new_ground, history, data):
    with new_ground() as ground:
        backend = ground.start(WORLD)
        resync(backend, history[0])
        for earlier, later in itertools.pairwise(history):
            sync(backend, *changes(data, earlier, later))
            assert ground.difference(backend) is None
        ground.is_clean(backend, history[-1])


@examples(12)
@given(st.lists(states(), min_size=2, max_size=4), st.data())
def test_a_full_sync_repairs_the_effects_of_a_failed_batch(new_ground, history, data):
    with new_ground() as ground:
        backend = ground.start(WORLD)
        resync(backend, history[0])
        left = [0]

        def fail_later():
            if not left[0]:
                raise ApplyError("the kernel is in a bad mood")
            left[0] -= 1

        ground.before_commit = fail_later
        for earlier, later in itertools.pairwise(history):
            for work in (lambda: sync(backend, *changes(data, earlier, later)), lambda: resync(backend, later)):  # noqa: B023
                left[0] = data.draw(st.integers(0, 4))
                try:
                    work()
                except ApplyError:
                    continue
                break
            left[0] = 1_000_000
            resync(backend, later)
            assert ground.difference(backend) is None
        mended = ground.contents()
    with new_ground() as ground:
        backend = ground.start(WORLD)
        resync(backend, history[-1])
        assert without_slots(ground.contents()) == without_slots(mended)


def test_services_that_hand_keys_to_each_other_change_in_one_transaction(ground):
    backend = ground.start()
    one, two, three = NAMES[:3]
    first, second = ADDRESSES[:2]
    resync(
        backend,
        {
            one: plans_of("s1", 1, 2, external_ips=[first]),
            two: plans_of("s2", 2, 5, external_ips=[second]),
            three: plans_of("s3", 3, 1),
        },
    )
    before = ground.generation()
    after = {
        one: plans_of("s1", 1, 2, external_ips=[second]),
        three: plans_of("s3", 3, 2),
        two: plans_of("s2", 2, 5, external_ips=[first]),
    }
    sync(backend, *after.items())
    assert ground.generation() == before + 2  # the third Service owns none of them
    ground.is_clean(backend, after)
