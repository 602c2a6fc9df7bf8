"""The Go kube-proxy's first transactions on our table: the kernel accepts them, and afterwards no rule of ours has an
effect.

The lines are those of setupNFTables and syncProxyRules in pkg/proxy/nftables/proxier.go of v1.36.
"""

import pytest
from msgspec.structs import replace

from kubeproxy.features import CONNECTION_COUNTERS, RESETS
from kubeproxy.model.objects import Annotations
from support.cluster_objects import world
from support.nftables_ground import list_table, resync
from support.nftables_plans import EVERYTHING, V4, plans_of, sticky
from unit.backends.nftables.test_way_back import BASE_CHAINS, DELETED_SETS, EMPTIED

NAME = "ip kube-proxy"
MAPS = {
    "no-endpoint-services": "ipv4_addr . inet_proto . inet_service : verdict",
    "no-endpoint-nodeports": "inet_proto . inet_service : verdict",
    "firewall-ips": "ipv4_addr . inet_proto . inet_service : verdict",
    "service-ips": "ipv4_addr . inet_proto . inet_service : verdict",
    "service-nodeports": "inet_proto . inet_service : verdict",
}


def first_transaction(sets):
    """Yield the lines that take over a table with these sets; NodePorts answer on all addresses."""
    yield f'add table {NAME} {{ comment "rules for kube-proxy" ; }}'
    for chain, hook in BASE_CHAINS.items():
        yield f"add chain {NAME} {chain}"
        yield f"delete chain {NAME} {chain}"
        yield f"add chain {NAME} {chain} {{ {hook} ; }}"
    for chain in sorted(EMPTIED):
        yield f"add chain {NAME} {chain}"
        yield f"flush chain {NAME} {chain}"
    yield f"add set {NAME} hairpin-connections {{ type ipv4_addr . ipv4_addr . inet_proto . inet_service ; }}"
    for name in ("cluster-ips", "nodeport-ips"):
        yield f"add set {NAME} {name} {{ type ipv4_addr ; }}"
    yield f"delete set {NAME} nodeport-ips"
    yield from (f"add map {NAME} {name} {{ type {kind} ; }}" for name, kind in MAPS.items())
    yield from (f"delete set {NAME} {name}" for name in sets if DELETED_SETS.match(name) and name != "nodeport-ips")


@pytest.mark.parametrize("reset", [False, True])
def test_the_go_kube_proxy_takes_our_table_over(ground, reset):
    everything = {key: value for key, value in EVERYTHING.items() if key != "session_affinity"}
    globals_ = replace(RESETS.on(CONNECTION_COUNTERS.on(world(families=[V4]), True), reset), ejects=reset)
    plans = {
        ("default", "a"): sticky("a", 1, 3, **everything),
        ("default", "b"): plans_of("b", 2, 2, annotations=Annotations(port_ranges="10000-20000/udp")),
    }
    backend = ground.start(globals_)
    resync(backend, plans)
    sets = ground.contents()
    assert sets["session-chains"]
    ground.disturb(*first_transaction(sets))
    rules = {name: lines for name, lines in ground.chains().items() if name in EMPTIED}
    assert all(not [line for line in lines if not line.startswith("type ")] for lines in rules.values())
    ground.disturb(f"flush map {NAME} service-ips")  # of a later version
    again = ground.start(globals_)
    resync(again, plans)
    ground.is_clean(again, plans)
    assert "service-ips" not in list_table(V4)


def test_a_table_with_chains_of_the_go_kube_proxy_is_replaced(ground):
    """A comparison would take longer than writing the table: seconds at 5,000 Services."""
    plans = {("default", "a"): plans_of("a", 2, 2), ("default", "b"): sticky("b", 1, 3)}
    resync(ground.start(), plans)
    ours = ground.contents()
    ground.disturb(*first_transaction(ours), f"add chain {NAME} service-ABC-default/a/tcp/")
    again = ground.start()
    before = ground.generation()
    ground.calls.clear()
    resync(again, plans)
    assert "contents" not in ground.calls, "it is compared before it is replaced"
    assert ground.generation() == before + 1
    assert ground.contents() == ours
    ground.is_clean(again, plans)
