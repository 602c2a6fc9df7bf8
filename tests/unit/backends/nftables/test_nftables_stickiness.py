"""Clients with session affinity: each keeps its endpoint while the endpoint serves, whatever else changes.

This holds for all addresses of a service port. Only if policies split its endpoints, the node's endpoints have a
separate affinity.
"""

import random

from hypothesis import Phase, example, given
from hypothesis import strategies as st

from kubeproxy.model.objects import ClientIPConfig, EndpointPort, ServicePort, SessionAffinityConfig
from kubeproxy.model.plan import FrontendKind
from support.cluster_objects import HERE, NODE_IPS, THERE, address, endpoint, parsed, service
from support.compiled import compile_service
from support.effort import examples
from support.fake_nftables import packets
from support.nftables_ground import FakeGround, resync, sync
from support.nftables_plans import V4, WORLD

WEB = ("default", "web")
NODE = address(NODE_IPS[V4])
CLIENTS = [
    *(("outside", address(f"172.16.0.{n}")) for n in range(1, 6)),
    *(("pod", address(f"10.244.9.{n}")) for n in range(1, 4)),
    ("node", NODE),
]


def sticky(numbers, **policies):
    """Return endpoints of these numbers; the even ones are on this node; (3, 50) is endpoint 3 with weight 50."""
    weights = dict(entry if isinstance(entry, tuple) else (entry, 100) for entry in numbers)
    config = SessionAffinityConfig(ClientIPConfig(30))
    subject = service(
        ports=[ServicePort(port=80, node_port=30080)],
        external_ips=["203.0.113.1"],
        session_affinity="ClientIP",
        session_affinity_config=config,
        **policies,
    )
    slices = [
        parsed(endpoint(f"10.244.0.{n}", THERE if n % 2 else HERE), ports=[EndpointPort(port=8080)], weight=str(weight))
        for n, weight in weights.items()
    ]
    return compile_service(subject, slices, WORLD).plans


def frontends(plan):
    """Return the destinations of clients, with the port, and the pools that they reach by the client's place."""
    for frontend in plan.frontends:
        address = NODE if frontend.kind is FrontendKind.NODEPORT else frontend.address
        yield address, frontend.protocol, frontend.port, plan.traffic(frontend)


def everybody_stays(states, chance, **policies):
    last = {}
    with FakeGround.fresh() as ground:
        backend = ground.start()
        resync(backend, {})
        for numbers in states:
            (plan,) = plans = sticky(numbers, **policies)
            if chance.random() < 0.3:
                backend = ground.start()
                resync(backend, {WEB: plans})
            else:
                sync(backend, (WEB, plans))
            serving = {*plan.cluster, *plan.local}
            last = {client: endpoint for client, endpoint in last.items() if endpoint in serving}
            for destination, protocol, port, traffic in chance.sample(list(frontends(plan)), len(plan.frontends)):
                for origin, source in CLIENTS:
                    packet = packets.Packet(origin, source, destination, protocol, port, destination == NODE)
                    way = packets.send(ground.kernel, packet, chance)
                    if way.endpoint:
                        pool = getattr(traffic, origin).picks_local
                        assert way.endpoint == last.setdefault((source, pool), way.endpoint), packet
            ground.kernel.now += 1000


pools = st.lists(st.integers(1, 9), max_size=6, unique=True)
policy = st.sampled_from(["Cluster", "Local"])


@examples(60)
@given(st.lists(pools, min_size=2, max_size=6), st.randoms(use_true_random=False), policy, policy)
@example([[1, 2, 3, 4, 5, 6], [], [1, 9, 2], [], [7, 1, 2, 3], [3, 8, 7]], random.Random(1), "Cluster", "Cluster")
def test_clients_stay_with_their_endpoints_whatever_becomes_of_the_others(states, chance, internal, external):
    everybody_stays(states, chance, internal_traffic_policy=internal, external_traffic_policy=external)


weighed = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from([0, 50, 100])), max_size=3, unique_by=lambda entry: entry[0]
)


@examples(30, phases=[Phase.explicit, Phase.generate])
@given(st.lists(weighed, min_size=2, max_size=5), st.randoms(use_true_random=False))
@example([[(1, 100), (2, 50)], [(1, 50), (2, 100)], [(1, 100), (2, 25)]], random.Random(1))
def test_clients_stay_with_their_endpoints_whatever_weights_those_get(states, chance):
    """Except clients of drained endpoints, which move with the next connection."""
    everybody_stays(states, chance)


def test_a_client_of_a_moved_endpoint_does_not_follow_the_endpoint_that_replaced_it():
    """Endpoint 4 moves to the slot of 2 with its clients; 9 gets the slot of 4, and moves on to that of 1."""
    for seed in range(10):
        everybody_stays([[1, 2, 3, 4], [1, 3, 4], [1, 3, 4, 9], [3, 4, 9]], random.Random(seed))


def test_a_client_stays_when_the_local_pool_was_lost_while_no_proxy_ran():
    """The cluster IP's pool had only this node's endpoint 2; addresses of all endpoints must not use this pool."""
    for seed in range(10):
        everybody_stays([[2, 5], [5, 7]], random.Random(seed), internal_traffic_policy="Local")


def test_a_client_that_was_quiet_for_too_long_may_go_elsewhere():
    packet = packets.Packet("outside", address("172.16.0.1"), address("10.96.0.1"), 6, 80)
    with FakeGround.fresh() as ground:
        resync(ground.start(), {WEB: sticky([1, 2])})
        first = packets.send(ground.kernel, packet, random.Random(1)).endpoint
        ground.kernel.now += 29_999
        assert packets.fate(ground.kernel, packet).endpoints == (first,)
        ground.kernel.now += 1
        assert len(packets.fate(ground.kernel, packet).endpoints) == 2
