"""nftables mode on a real kernel: what the table holds after each way of getting there, and what is noticed.

Every test in a network namespace of its own. `nft` is asked for the contents, so that the reader under test is not
its own witness.
"""

import itertools
import json
import re
import subprocess
import time
from contextlib import closing

import pytest
from cluster_objects import HERE, THERE, endpoint, parsed, service, world
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from own_network import own_network
from random_plans import histories

from kubeproxy.backends.nftables.backend import NftablesBackend
from kubeproxy.backends.nftables.layout import VERDICT_MAPS, Layout, SetId, parse_chain_name
from kubeproxy.backends.nftables.render import Placed, render
from kubeproxy.backends.nftables.ruleset import Ruleset
from kubeproxy.backends.nftables.text import element_lines, interval_lines
from kubeproxy.kernel import nfnetlink, nft
from kubeproxy.model.addresses import Family
from kubeproxy.model.compile import compile_service
from kubeproxy.model.objects import ClientIPConfig, EndpointPort, ServicePort, SessionAffinityConfig
from kubeproxy.model.plan import Detector, FamilyGlobals, Globals

V4, V6 = Family.IPV4, Family.IPV6
WORLD = world(families=[V4])
PROTOCOLS = {6: "tcp", 17: "udp", 132: "sctp"}


# -- the table as nft sees it --------------------------------------------------------------------------------------


def listing(family=V4, *options):
    ip = "ip" if family is V4 else "ip6"
    command = ["nft", *options, "list", "table", ip, "kube-proxy"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def contents(family=V4):
    """Set name to its elements, as JSON texts.

    Read again while an element is repeated: then the kernel is resizing a hash table, and misses as many others.
    """
    deadline = time.monotonic() + 20
    while True:
        found = {}
        for entry in json.loads(listing(family, "-j"))["nftables"]:
            for kind in ("set", "map"):
                if kind in entry:
                    found[entry[kind]["name"]] = [json.dumps(element) for element in entry[kind].get("elem", ())]
        distinct = {name: set(elements) for name, elements in found.items()}
        if all(len(distinct[name]) == len(elements) for name, elements in found.items()):
            return distinct
        assert time.monotonic() < deadline, "nft repeats elements"
        time.sleep(0.01)


def readable(name, family=V4):
    """The elements of a set or map of ours as nft writes them: 'a . b', or 'a . b : c'."""

    def words(value):
        if isinstance(value, dict) and "goto" in value:
            return f"goto {value['goto']['target']}"
        return " . ".join(map(str, value["concat"])) if isinstance(value, dict) else str(value)

    found = map(json.loads, elements(name, family))
    return {" : ".join(map(words, e)) if isinstance(e, list) else words(e) for e in found}


def client_sets(family=V4):
    return {name for name in contents(family) if re.search(r"affinity-\d+$", name)}


def verdicts(family=V4):
    return sum(count(name, family) for name in VERDICT_MAPS)


def without_slots(found):
    """The same with endpoints in no order: their slots depend on history, which slots there are does not."""
    result = {}
    for name, elements in found.items():
        if not name.endswith("endpoints") or name == "hairpin-endpoints":
            result[name] = elements
            continue
        pools = {}
        for key, value in map(json.loads, elements):
            *frontend, slot = key["concat"]
            slots, destinations = pools.setdefault(json.dumps(frontend), (set(), []))
            slots.add(slot)
            destinations.append(json.dumps(value))
        result[name] = {frontend: (slots, sorted(found)) for frontend, (slots, found) in pools.items()}
    return {name: elements for name, elements in result.items() if not re.search(r"affinity-\d+$", name)}


def chains(family=V4):
    """Chain name to its rules, as text."""
    found = {}
    for name, body in re.findall(r"^\tchain (\S+) \{\n(.*?)^\t\}", listing(family), re.MULTILINE | re.DOTALL):
        found[name] = [line.strip() for line in body.splitlines()]
    return found


def elements(name, family=V4):
    return contents(family).get(name, set())


def count(name, family=V4):
    return len(elements(name, family))


# -- plans and backends --------------------------------------------------------------------------------------------


def plans_of(name, number, endpoints=3, globals_=WORLD, ports=None, local=HERE, **spec):
    (family,) = globals_.families
    cluster, pod = ("10.96.{}.{}", "10.244.{}.{}") if family is V4 else ("fd00:96::{:x}{:02x}", "fd00:244::{:x}{:02x}")
    ports = ports or [ServicePort(port=80)]
    found = [endpoint(pod.format(number >> 8, n), local) for n in range(1, endpoints + 1)]
    slice_ports = [EndpointPort(port=8000 + p.port, name=p.name, protocol=p.protocol) for p in ports]
    subject = service(name, cluster.format(number >> 8, number & 255), ports=ports, **spec)
    return compile_service(subject, [parsed(*found, family=family.label, ports=slice_ports)], globals_).plans


def cluster(*names, **more):
    return {("default", name): plans_of(name, number, **more) for number, name in enumerate(names, 1)}


@pytest.fixture
def start(netns):
    """Return a function that makes backends, which are closed at the end."""
    made = []

    def make(globals_=WORLD):
        (family,) = globals_.families
        backend = NftablesBackend(family, globals_)
        made.append(backend)
        return backend

    yield make
    for backend in made:
        backend.close()


def resync(backend, plans):
    return sum(backend.resync(plans))


def sync(backend, *changes):
    return sum(backend.sync(changes))


def is_clean(backend, plans):
    """Nothing was changed by others, and another look changes nothing."""
    assert not backend.touched()
    assert backend.drift() == ""
    assert backend.element_drift() == ""
    table = nfnetlink.table(backend.family, "kube-proxy")
    assert resync(backend, plans) == 0
    assert nfnetlink.table(backend.family, "kube-proxy") == table
    assert backend.element_drift() == ""


def generation():
    link = nfnetlink.Transactions()
    try:
        return link.generation()
    finally:
        link.close()


# -- from nothing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [V4, V6])
def test_the_first_sync_makes_the_table(start, family):
    globals_ = world(families=[family])
    backend = start(globals_)
    plans = cluster(
        "a", "b", globals_=globals_, ports=[ServicePort(port=80, node_port=0), ServicePort(port=81, name="x")]
    )
    resync(backend, plans)
    found = contents(family)
    assert len(found["endpoints"]) == 2 * 2 * 3
    assert len(found["cluster-services"]) == len(found["endpoints-4"]) == 2 * 2
    assert verdicts(family) == 0
    assert len(found["cluster-ips"]) == 2
    assert len(found["hairpin-endpoints"]) == 3
    assert len(found["nodeport-ips"]) == 1
    is_clean(backend, plans)


def test_an_empty_cluster_is_a_table_too(start):
    backend = start()
    resync(backend, {})
    assert {"nat-prerouting", "nat-output", "nat-postrouting", "filter-forward"} <= set(chains())
    is_clean(backend, {})


def test_elements_are_in_the_kernel_as_the_plan_says(start):
    ports = [ServicePort(port=80, node_port=30080)]
    backend = start()
    resync(backend, cluster("a", endpoints=2, ports=ports))
    assert readable("cluster-services") == readable("endpoints-4") == {"10.96.0.1 . tcp . 80"}
    assert readable("endpoints") == {
        "10.96.0.1 . tcp . 80 . 0 : 10.244.0.1 . 8080",
        "10.96.0.1 . tcp . 80 . 1 : 10.244.0.2 . 8080",
    }
    assert readable("external-nodeports") == readable("nodeport-endpoints-4") == {"tcp . 30080"}
    assert readable("nodeport-endpoints") == {
        "tcp . 30080 . 0 : 10.244.0.1 . 8080",
        "tcp . 30080 . 1 : 10.244.0.2 . 8080",
    }
    assert readable("hairpin-endpoints") == {"10.244.0.1 . 10.244.0.1", "10.244.0.2 . 10.244.0.2"}
    assert {name for name, found in contents().items() if found} == {
        *("cluster-services", "endpoints", "endpoints-4", "cluster-ips", "hairpin-endpoints"),
        *("external-nodeports", "nodeport-endpoints", "nodeport-endpoints-4", "nodeport-ips", "transports"),
    }


def test_verdicts_are_for_affinity_alone(start):
    more = {"ports": [ServicePort(port=80, node_port=30080)], "external_ips": ["203.0.113.1"]}
    backend = start()
    resync(backend, {("default", "a"): plans_of("a", 1, 2, external_traffic_policy="Local", **more)})
    assert verdicts() == 0
    sync(backend, (("default", "a"), sticky("a", 1, 2, external_traffic_policy="Local", **more)))
    assert readable("affinity-services") == {
        "10.96.0.1 . tcp . 80 : goto cluster-2-30s",
        "203.0.113.1 . tcp . 80 : goto policy-local-2-30s",
    }
    assert readable("local-affinity-services") == {"203.0.113.1 . tcp . 80 : goto local-pick-2-30s"}
    assert readable("affinity-nodeports") == {"tcp . 30080 : goto nodeport-policy-local-2-30s"}
    assert readable("local-affinity-nodeports") == {"tcp . 30080 : goto nodeport-local-pick-2-30s"}
    treated = ("cluster-services", "policy-local-services", "policy-local-nodeports", "endpoints-4")
    assert not any(count(name) for name in treated)
    sync(backend, (("default", "a"), plans_of("a", 1, 2, external_traffic_policy="Local", **more)))
    assert verdicts() == 0
    assert all(count(name) for name in treated)


DETECTORS = {
    "none": Detector(),
    "network": Detector("network", "10.244.0.0/16"),
    "bridge": Detector("bridge", "cni0"),
    "prefix": Detector("prefix", "veth"),
}


@pytest.mark.parametrize("masquerade_all", [False, True])
@pytest.mark.parametrize("detector", DETECTORS)
def test_every_kind_of_table_loads_and_is_known_again(start, detector, masquerade_all):
    globals_ = world(detector=DETECTORS[detector], masquerade_all=masquerade_all, families=[V4])
    globals_ = replace(globals_, ipv4=replace(globals_.ipv4, nodeport_ips=None)) if masquerade_all else globals_
    plans = cluster("a", globals_=globals_, external_traffic_policy="Local", external_ips=["203.0.113.1"])
    backend = start(globals_)
    resync(backend, plans)
    is_clean(backend, plans)
    assert resync(start(globals_), plans) == 0


# -- adopting ------------------------------------------------------------------------------------------------------

EVERYTHING = {
    "ports": [ServicePort(port=80, node_port=30080), ServicePort(port=53, name="dns", protocol="UDP")],
    "external_ips": ["203.0.113.1"],
    "ingress": ["198.51.100.1"],
    "load_balancer_source_ranges": ["172.16.0.0/24", "192.0.2.0/24"],
    "external_traffic_policy": "Local",
    "session_affinity": "ClientIP",
}


def test_a_restart_changes_nothing(start):
    plans = {**cluster("a", **EVERYTHING), ("default", "b"): plans_of("b", 2), ("default", "c"): plans_of("c", 3, 0)}
    resync(start(), plans)
    before, handle = contents(), nfnetlink.table(V4, "kube-proxy")
    assert resync(start(), plans) == 0
    assert contents() == before
    assert nfnetlink.table(V4, "kube-proxy") == handle


def test_a_restart_adopts_slots_as_they_are(start):
    backend = start()
    resync(backend, cluster("a", endpoints=5))
    shuffled = [endpoint(f"10.244.0.{n}", HERE) for n in (9, 5, 4, 2)]
    plans = compile_service(service("a"), [parsed(*shuffled, ports=[EndpointPort(port=8080)])], WORLD).plans
    sync(backend, (("default", "a"), plans))
    before = contents()
    again = start()
    assert resync(again, {("default", "a"): plans}) == 0
    assert contents() == before
    is_clean(again, {("default", "a"): plans})


def disturb(*lines):
    nft.run("\n".join(lines) + "\n")


DISTURBANCES = {
    "missing endpoint": ["delete element ip kube-proxy endpoints { 10.96.0.1 . tcp . 80 . 1 }"],
    "missing service": ["delete element ip kube-proxy cluster-services { 10.96.0.1 . tcp . 80 }"],
    "missing class": ["delete element ip kube-proxy endpoints-4 { 10.96.0.1 . tcp . 80 }"],
    "missing verdict": ["delete element ip kube-proxy affinity-services { 10.96.0.4 . tcp . 80 }"],
    "missing cluster IP": ["delete element ip kube-proxy cluster-ips { 10.96.0.1 }"],
    "missing hairpin": ["delete element ip kube-proxy hairpin-endpoints { 10.244.0.1 . 10.244.0.1 }"],
    "missing node address": ["delete element ip kube-proxy nodeport-ips { 192.0.2.1 }"],
    "missing range": [
        "delete element ip kube-proxy firewall-allow { 198.51.100.1 . tcp . 80 . 172.16.0.0-172.16.0.255 }"
    ],
    "stray endpoint": ["add element ip kube-proxy endpoints { 10.96.0.1 . tcp . 80 . 3 : 10.9.9.9 . 99 }"],
    "stray service": ["add element ip kube-proxy cluster-services { 10.96.9.9 . tcp . 80 }"],
    "stray class": ["add element ip kube-proxy endpoints-1 { 10.96.0.1 . tcp . 80 }"],
    "stray treatment": ["add element ip kube-proxy external-services { 10.96.0.1 . tcp . 80 }"],
    "stray verdict": ["add element ip kube-proxy affinity-services { 10.96.9.9 . tcp . 80 : goto cluster-2-30s }"],
    "stray cluster IP": ["add element ip kube-proxy cluster-ips { 10.96.9.9 }"],
    "stray refusal": ["add element ip kube-proxy unserved-services { 10.96.0.1 . tcp . 80 }"],
    "stray node address": ["add element ip kube-proxy nodeport-ips { 192.0.2.99 }"],
    "stray range": ["add element ip kube-proxy firewall-allow { 198.51.100.1 . tcp . 80 . 10.0.0.0-10.255.255.255 }"],
    "stray service CIDR": ["add element ip kube-proxy service-cidrs { 10.1.0.0/16 }"],
    "changed endpoint": [
        "delete element ip kube-proxy endpoints { 10.96.0.1 . tcp . 80 . 1 }",
        "add element ip kube-proxy endpoints { 10.96.0.1 . tcp . 80 . 1 : 10.9.9.9 . 99 }",
    ],
    "changed verdict": [
        "delete element ip kube-proxy affinity-services { 10.96.0.4 . tcp . 80 }",
        "add element ip kube-proxy affinity-services { 10.96.0.4 . tcp . 80 : goto pick-2-30s }",
    ],
    "another class": [
        "delete element ip kube-proxy endpoints-4 { 10.96.0.1 . tcp . 80 }",
        "add element ip kube-proxy endpoints-16 { 10.96.0.1 . tcp . 80 }",
    ],
    "another treatment": [
        "delete element ip kube-proxy external-services { 198.51.100.1 . tcp . 80 }",
        "add element ip kube-proxy policy-local-services { 198.51.100.1 . tcp . 80 }",
    ],
    "wider range": [
        "delete element ip kube-proxy firewall-allow { 198.51.100.1 . tcp . 80 . 172.16.0.0-172.16.0.255 }",
        "add element ip kube-proxy firewall-allow { 198.51.100.1 . tcp . 80 . 172.16.0.0-172.16.255.255 }",
    ],
    "narrower range": [
        "delete element ip kube-proxy firewall-allow { 198.51.100.1 . tcp . 80 . 172.16.0.0-172.16.0.255 }",
        "add element ip kube-proxy firewall-allow { 198.51.100.1 . tcp . 80 . 172.16.0.1-172.16.0.2 }",
    ],
    "everything emptied": [f"flush {shape.keyword} ip kube-proxy {name}" for name, shape in Layout(V4).shapes.items()],
}


def disturbed(start):
    """A table with some of everything in it, and the plans that it was made of."""
    more = {"ingress": ["198.51.100.1"], "load_balancer_source_ranges": ["172.16.0.0/24"]}
    plans = {**cluster("a", **more), ("default", "b"): plans_of("b", 2), ("default", "c"): plans_of("c", 3, 0)}
    plans["default", "d"] = sticky("d", 4, 2)
    backend = start()
    resync(backend, plans)
    return backend, plans


@pytest.mark.parametrize("case", DISTURBANCES)
def test_a_restart_repairs_elements_and_touches_nothing_else(start, case):
    _, plans = disturbed(start)
    before, handle = contents(), nfnetlink.table(V4, "kube-proxy")
    disturb(*DISTURBANCES[case])
    assert contents() != before
    again = start()
    resync(again, plans)
    assert contents() == before
    assert nfnetlink.table(V4, "kube-proxy") == handle
    is_clean(again, plans)


def test_a_restart_makes_up_for_what_changed_meanwhile(start):
    resync(start(), cluster("a", "b", "c", external_ips=[]))
    plans = {("default", "b"): plans_of("b", 2, 7), ("default", "d"): plans_of("d", 9, 21)}
    again = start()
    resync(again, plans)
    assert count("cluster-ips") == 2
    assert count("endpoints") == 7 + 21
    assert count("hairpin-endpoints") == 21
    assert readable("endpoints-16") == {"10.96.0.2 . tcp . 80"}
    assert readable("endpoints-64") == {"10.96.0.9 . tcp . 80"}
    assert count("endpoints-4") == 0
    is_clean(again, plans)


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        (["172.16.0.0/24"], ["172.16.0.0/16"]),
        (["172.16.0.0/16"], ["172.16.0.0/24"]),
        (["172.16.0.0/24", "172.16.4.0/24"], ["172.16.0.0/20"]),
        (["172.16.0.0/24"], ["10.0.0.0/8"]),
        (["172.16.0.0/24"], []),
        ([], ["172.16.0.0/24"]),
        (["172.16.0.0/24"], ["nonsense"]),
    ],
)
@pytest.mark.parametrize("how", ["restart", "sync"])
def test_source_ranges_change(start, earlier, later, how):
    def plans(ranges):
        return cluster("a", ingress=["198.51.100.1"], load_balancer_source_ranges=ranges)

    backend = start()
    resync(backend, plans(earlier))
    if how == "restart":
        backend = start()
        resync(backend, plans(later))
    else:
        sync(backend, *plans(later).items())
    assert count("firewalled-services") == bool(later)
    assert count("firewall-allow") == len([r for r in later if r != "nonsense"])
    is_clean(backend, plans(later))


# -- taking over ---------------------------------------------------------------------------------------------------

FOREIGN = {
    "empty": ["add table ip kube-proxy"],
    "the Go kube-proxy's": [
        'add table ip kube-proxy { comment "rules for kube-proxy" ; }',
        "add set ip kube-proxy cluster-ips { type ipv4_addr ; }",
        "add map ip kube-proxy service-ips { type ipv4_addr . inet_proto . inet_service : verdict ; }",
        "add map ip kube-proxy firewall-ips { type ipv4_addr . inet_proto . inet_service : verdict ; }",
        "add chain ip kube-proxy services",
        "add chain ip kube-proxy nat-prerouting { type nat hook prerouting priority dstnat ; }",
        "add rule ip kube-proxy nat-prerouting jump services",
        "add chain ip kube-proxy service-ABC-default/a/tcp/",
        "add chain ip kube-proxy endpoint-DEF-default/a/tcp/__10.244.0.1/8080",
        "add rule ip kube-proxy endpoint-DEF-default/a/tcp/__10.244.0.1/8080 meta l4proto tcp dnat to 10.244.0.1:8080",
        "add rule ip kube-proxy service-ABC-default/a/tcp/ goto endpoint-DEF-default/a/tcp/__10.244.0.1/8080",
        "add rule ip kube-proxy services ip daddr . meta l4proto . th dport vmap @service-ips",
        "add element ip kube-proxy service-ips { 10.96.0.1 . tcp . 80 : goto service-ABC-default/a/tcp/ }",
        "add element ip kube-proxy cluster-ips { 10.96.0.1, 10.96.0.99 }",
    ],
    "somebody's, with names of ours": [
        "add table ip kube-proxy",
        "add map ip kube-proxy cluster-ips { type ipv4_addr : ipv4_addr ; }",
        "add set ip kube-proxy endpoints { type inet_service ; flags interval ; }",
        "add set ip kube-proxy endpoints-4 { type inet_service ; }",
        "add chain ip kube-proxy cluster { type filter hook input priority 5 ; policy accept ; }",
        "add chain ip kube-proxy slot-0",
        "add chain ip kube-proxy services",
    ],
}


@pytest.mark.parametrize("whose", FOREIGN)
def test_another_programs_table_is_replaced_in_one_transaction(start, whose):
    disturb(*FOREIGN[whose])
    plans = {**cluster("a", **EVERYTHING), ("default", "b"): plans_of("b", 2, 19)}
    backend = start()
    before = generation()
    resync(backend, plans)
    assert generation() == before + 1
    assert "10.96.0.99" not in listing()
    replaced = contents()
    is_clean(backend, plans)
    disturb("delete table ip kube-proxy")
    resync(backend, plans)
    assert contents() == replaced


def test_a_table_of_other_globals_is_replaced_in_one_transaction(start):
    resync(start(), cluster("a"))
    globals_ = world(masquerade_all=True, families=[V4])
    backend = start(globals_)
    before = generation()
    plans = cluster("a", globals_=globals_)
    resync(backend, plans)
    assert generation() == before + 1
    is_clean(backend, plans)


def test_tables_of_other_names_and_families_are_left_alone(start):
    disturb("add table ip mine", "add table ip6 kube-proxy", "add chain ip6 kube-proxy c", "add table inet kube-proxy")
    resync(start(), cluster("a"))
    resync(start(), {})
    tables = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True).stdout.split("\n")
    assert sorted(filter(None, tables)) == [
        "table inet kube-proxy",
        "table ip kube-proxy",
        "table ip mine",
        "table ip6 kube-proxy",
    ]


# -- drift ---------------------------------------------------------------------------------------------------------

RULE_DRIFTS = {
    "flush ruleset": ["flush ruleset"],
    "delete table": ["delete table ip kube-proxy"],
    "flush table": ["flush table ip kube-proxy"],
    "flush chain": ["flush chain ip kube-proxy services"],
    "add rule": ["add rule ip kube-proxy filter-forward drop"],
    "insert rule": ["insert rule ip kube-proxy nat-prerouting accept"],
    "table made again": ["delete table ip kube-proxy", "add table ip kube-proxy"],
    "table switched off": ["add table ip kube-proxy { flags dormant ; }"],
}


@pytest.mark.parametrize("case", RULE_DRIFTS)
def test_changed_rules_are_noticed_and_repaired(start, case):
    backend, plans = disturbed(start)
    before, rules = contents(), chains()
    disturb(*RULE_DRIFTS[case])
    assert backend.touched()
    assert "chains or rules" in backend.drift()
    resync(backend, plans)
    assert (contents(), chains()) == (before, rules)
    assert "dormant" not in listing()
    is_clean(backend, plans)


@pytest.mark.parametrize("case", DISTURBANCES)
def test_changed_elements_are_noticed_and_repaired(start, case):
    backend, plans = disturbed(start)
    before = contents()
    disturb(*DISTURBANCES[case])
    assert backend.touched()
    assert backend.drift() == ""
    assert "elements of" in backend.element_drift()
    assert backend.touched()  # until it is repaired
    resync(backend, plans)
    assert contents() == before
    is_clean(backend, plans)


def test_what_others_do_to_their_own_tables_is_no_drift(start):
    backend, plans = disturbed(start)
    disturb("add table ip mine", "add chain ip mine c", "add rule ip mine c drop")
    assert backend.touched()
    assert backend.drift() == ""
    assert backend.element_drift() == ""
    assert not backend.touched()
    is_clean(backend, plans)


def test_our_own_transactions_are_no_drift(start):
    backend, plans = disturbed(start)
    changes = [
        plans_of("a", 1, 5),
        plans_of("a", 1, 25),
        plans_of("a", 1, 4, session_affinity="ClientIP"),
        plans_of("a", 1, 2, session_affinity="ClientIP"),
        (),
    ]
    for change in changes:
        sync(backend, (("default", "a"), change))
        assert not backend.touched()
        assert backend.drift() == ""
        assert backend.element_drift() == ""
    del plans["default", "a"]
    is_clean(backend, plans)


# -- incremental ---------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(histories(min_size=2, max_size=4), st.data())
def test_incremental_equals_resync(history, data):
    globals_, states = history
    (family,) = globals_.families
    with own_network(), closing(NftablesBackend(family, globals_)) as backend:
        resync(backend, states[0])
        for earlier, later in itertools.pairwise(states):
            names = data.draw(st.permutations(sorted(earlier.keys() | later.keys())))
            changes = [(name, later.get(name, ())) for name in names if earlier.get(name) != later.get(name)]
            sync(backend, *changes)
        incremental = contents(family)
        is_clean(backend, states[-1])
    with own_network(), closing(NftablesBackend(family, globals_)) as backend:
        resync(backend, states[-1])
        assert without_slots(contents(family)) == without_slots(incremental)


def test_a_sync_without_changes_writes_nothing(start):
    backend, _ = disturbed(start)
    before = generation()
    assert sync(backend) == 0
    assert sync(backend, (("default", "nobody"), ())) == 0
    assert generation() == before


def test_one_changed_endpoint_is_one_transaction_of_one_element_replaced(start):
    backend = start()
    plans = compile_service(service(), [parsed(*[endpoint(f"10.244.1.{n}") for n in range(1, 11)])], WORLD).plans
    resync(backend, {("default", "web"): plans})
    changed = [endpoint(f"10.244.1.{n}") for n in (1, 2, 3, 4, 99, 6, 7, 8, 9, 10)]
    before = generation()
    plans = compile_service(service(), [parsed(*changed)], WORLD).plans
    assert sync(backend, (("default", "web"), plans)) == 2
    assert generation() == before + 1
    assert "10.96.0.1 . tcp . 80 . 4 : 10.244.1.99 . 8080" in listing()


def test_a_failed_sync_leaves_the_kernel_as_it_was_and_a_resync_mends_it(start):
    backend, plans = disturbed(start)
    disturb("delete element ip kube-proxy endpoints { 10.96.0.1 . tcp . 80 . 1 }")
    before = contents()
    del plans["default", "a"]
    plans["default", "new"] = plans_of("new", 7)
    with pytest.raises(nfnetlink.NetlinkError):
        sync(backend, (("default", "a"), ()), (("default", "new"), plans["default", "new"]))
    assert contents() == before
    resync(backend, plans)
    is_clean(backend, plans)


def test_services_without_affinity_need_no_chains_of_their_own(start):
    backend = start()
    resync(backend, {})
    before, handles = chains(), nfnetlink.rule_handles(V4, "kube-proxy")
    more = {"ports": [ServicePort(port=80, node_port=30080)], "external_ips": ["203.0.113.1"]}
    for many in (1, 250):
        plans = {("default", "a"): plans_of("a", 1, many, external_traffic_policy="Local", **more)}
        sync(backend, *plans.items())
        assert count("endpoints") == 2 * many
        assert count("local-nodeport-endpoints") == many
    assert chains() == before
    assert nfnetlink.rule_handles(V4, "kube-proxy") == handles
    assert len({name for name, found in contents().items() if name.endswith("-256") and found}) == 4
    is_clean(backend, plans)
    assert resync(start(), plans) == 0


def test_chains_of_affinity_are_made_on_demand_for_counts_and_timeouts(start):
    more = {"ports": [ServicePort(port=80, node_port=30080)], "external_ips": ["203.0.113.1"]}
    plans = {("default", "a"): sticky("a", 1, 2, external_traffic_policy="Local", **more)}
    backend = start()
    resync(backend, {})
    before = set(chains())
    sync(backend, *plans.items())
    frontends = {
        f"{prefix}{kind}-2-30s"
        for prefix, kinds in (
            ("", ("cluster", "external", "policy-local", "pick", "local-pick")),
            ("nodeport-", ("external", "policy-local", "pick", "local-pick")),
        )
        for kind in kinds
    }
    prefixes = ("", "local-", "nodeport-", "nodeport-local-")
    clients = {f"{p}affinity-{slot}-30s" for p in prefixes for slot in (0, 1)}
    slots = {f"{p}slot-{slot}" for p in prefixes for slot in (0, 1)}
    assert set(chains()) - before == frontends | clients | slots
    before = set(chains())
    plans["default", "b"] = sticky("b", 2, 2)
    sync(backend, *plans.items())
    assert set(chains()) == before
    is_clean(backend, plans)
    assert resync(start(), plans) == 0


def test_chains_made_on_demand_do_what_those_loaded_as_text_do(start):
    """Those of slots are cloned in the kernel; those of a table that is replaced are nft's."""
    backend = start()
    plans = cluster("a", endpoints=4, **EVERYTHING)
    resync(backend, {})
    sync(backend, *plans.items())
    cloned = chains()
    assert {f"slot-{slot}" for slot in range(4)} <= set(cloned)
    with own_network():
        disturb("add table ip kube-proxy")  # so that all is loaded as text
        other = start()
        resync(other, plans)
        assert chains() == cloned


# -- classes -------------------------------------------------------------------------------------------------------


def class_of_count(endpoints):
    return next(size for size in (1, 4, 16, 64) if endpoints <= size)


@pytest.mark.parametrize("family", [V4, V6])
def test_a_count_that_changes_is_one_transaction_of_few_elements(start, family):
    globals_ = world(families=[family])
    name = ("default", "a")
    backend = start(globals_)
    # The hairpin elements belong to the endpoints of this node: there are none.
    more = {"globals_": globals_, "local": THERE}
    resync(backend, {name: plans_of("a", 1, 1, **more)})
    rules = chains(family)
    for earlier, later in itertools.pairwise((1, 2, 3, 4, 5, 6, 5, 4, 3, 2, 1, 4, 16, 17, 18, 17, 16, 5, 1, 17, 4)):
        before = generation()
        moves = 2 * (class_of_count(earlier) != class_of_count(later))
        assert sync(backend, (name, plans_of("a", 1, later, **more))) == abs(later - earlier) + moves
        assert generation() == before + 1
        found = contents(family)
        sizes = [found_name for found_name, keys in found.items() if re.search(r"endpoints-\d+$", found_name) and keys]
        assert sizes == [f"endpoints-{class_of_count(later)}"]
        assert len(found["endpoints"]) == later
        assert verdicts(family) == 0
    assert chains(family) == rules
    is_clean(backend, {name: plans_of("a", 1, 4, **more)})


def test_a_service_without_endpoints_has_no_class(start):
    name = ("default", "a")
    backend = start()
    resync(backend, {name: plans_of("a", 1, 5)})
    for endpoints in (0, 5, 0):
        sync(backend, (name, plans_of("a", 1, endpoints)))
        sizes = {set_name for set_name, keys in contents().items() if re.search(r"endpoints-\d+$", set_name) and keys}
        assert sizes == ({"endpoints-16"} if endpoints else set())
        assert count("cluster-services") == bool(endpoints)
        assert count("unserved-services") == (not endpoints)
    is_clean(backend, {name: plans_of("a", 1, 0)})


def shared(number, endpoints, **more):
    return plans_of(f"s{number}", number, endpoints, **more)


def test_what_two_ports_share_stays_until_the_last_one_goes(start):
    two = [ServicePort(port=80, name="a"), ServicePort(port=81, name="b")]
    backend = start()
    resync(backend, {})
    web = ("default", "s1")
    sync(backend, (web, shared(1, 2, ports=two)))
    assert (count("cluster-ips"), count("hairpin-endpoints")) == (1, 2)
    sync(backend, (web, shared(1, 2, ports=two[:1])))
    assert (count("cluster-ips"), count("hairpin-endpoints")) == (1, 2)
    sync(backend, (web, shared(1, 1, ports=two)))
    assert (count("cluster-ips"), count("hairpin-endpoints")) == (1, 1)
    sync(backend, (web, ()))
    assert (count("cluster-ips"), count("hairpin-endpoints")) == (0, 0)
    is_clean(backend, {})


@pytest.mark.parametrize("how", ["resync", "sync", "restart", "take-over"])
def test_what_many_services_share_stays_until_the_last_one_goes(start, how):
    two = [ServicePort(port=80, name="a"), ServicePort(port=81, name="b")]
    plans = {("default", f"s{n}"): shared(n, 3, ports=two) for n in range(1, 6)}
    if how == "take-over":
        disturb("add table ip kube-proxy")
    if how == "restart":
        resync(start(), plans)
    backend = start()
    resync(backend, {} if how == "sync" else plans)
    if how == "sync":
        sync(backend, *plans.items())
    names = sorted(plans)
    for left, name in zip(range(4, -1, -1), names, strict=True):
        sync(backend, (name, ()))
        assert count("cluster-ips") == left
        assert count("hairpin-endpoints") == (3 if left else 0)
        del plans[name]
    is_clean(backend, {})


def test_a_shared_element_goes_from_one_service_to_another_in_one_sync(start):
    backend = start()
    one, two = ("default", "s1"), ("default", "s2")
    resync(backend, {one: shared(1, 3)})
    for changes in ([(one, ()), (two, shared(2, 3))], [(one, shared(1, 3)), (two, ())]):
        sync(backend, *changes)
        assert (count("cluster-ips"), count("hairpin-endpoints")) == (1, 3)
        assert backend.element_drift() == ""


def test_a_key_goes_from_one_service_to_another_in_one_sync(start):
    backend = start()
    one, two = ("default", "s1"), ("default", "s2")
    with_ip = {"external_ips": ["203.0.113.1"]}
    resync(backend, {one: shared(1, 2, **with_ip), two: shared(2, 5)})
    for order in ([one, two], [two, one]):
        state = {one: shared(1, 2), two: shared(2, 5, **with_ip)}
        sync(backend, *[(name, state[name]) for name in order])
        assert readable("external-services") == {"203.0.113.1 . tcp . 80"}
        assert readable("endpoints-16") == {"203.0.113.1 . tcp . 80", "10.96.0.2 . tcp . 80"}
        sync(backend, (two, shared(2, 5)), (one, shared(1, 2, **with_ip)))
        assert readable("external-services") == {"203.0.113.1 . tcp . 80"}
        assert readable("endpoints-4") == {"203.0.113.1 . tcp . 80", "10.96.0.1 . tcp . 80"}
        assert backend.element_drift() == ""


# -- affinity ------------------------------------------------------------------------------------------------------


def sticky(name, number, endpoints, seconds=30, **more):
    config = SessionAffinityConfig(ClientIPConfig(seconds))
    return plans_of(name, number, endpoints, session_affinity="ClientIP", session_affinity_config=config, **more)


def test_affinity_has_a_set_of_clients_for_each_slot(start):
    backend = start()
    plans = {("default", "a"): sticky("a", 1, 3), ("default", "b"): sticky("b", 2, 2, seconds=10800)}
    resync(backend, {})
    sync(backend, *plans.items())
    assert client_sets() == {"affinity-0", "affinity-1", "affinity-2"}
    rules = chains()
    assert "goto pick-3-30s" in rules["cluster-3-30s"]
    assert len(rules["pick-3-30s"]) == 4
    assert len(rules["pick-2-10800s"]) == 3
    is_clean(backend, plans)
    assert resync(start(), plans) == 0


def test_clients_stay_with_their_endpoint_when_it_moves_to_another_slot(start):
    backend = start()
    resync(backend, {})
    name = ("default", "a")
    sync(backend, (name, sticky("a", 1, 3, seconds=3000)))
    disturb(
        "add element ip kube-proxy affinity-2 { 172.16.0.1 . 10.96.0.1 . tcp . 80 timeout 3000s expires 2000s }",
        "add element ip kube-proxy affinity-2 { 172.16.0.2 . 10.96.0.9 . tcp . 80 timeout 3000s expires 2000s }",
    )
    kept = [endpoint(f"10.244.0.{n}", HERE) for n in (2, 3)]
    config = SessionAffinityConfig(ClientIPConfig(3000))
    subject = service("a", session_affinity="ClientIP", session_affinity_config=config)
    plans = compile_service(subject, [parsed(*kept, ports=[EndpointPort(port=8080)])], WORLD).plans
    sync(backend, (name, plans))
    assert "10.96.0.1 . tcp . 80 . 0 : 10.244.0.3 . 8080" in listing()
    (client,) = nfnetlink.elements(V4, "kube-proxy", "affinity-0")
    assert client.key.startswith(bytes([172, 16, 0, 1]))
    assert 1_900_000 < client.expires <= 2_000_000
    assert backend.element_drift() == ""
    is_clean(backend, {name: plans})


def test_affinity_of_every_kind_of_frontend_loads(start):
    plans = {("default", "a"): sticky("a", 1, 2, **{k: v for k, v in EVERYTHING.items() if k != "session_affinity"})}
    backend = start()
    resync(backend, {})
    sync(backend, *plans.items())
    assert client_sets() == {
        f"{prefix}affinity-{slot}" for prefix in ("", "local-", "nodeport-", "nodeport-local-") for slot in (0, 1)
    }
    is_clean(backend, plans)


# -- the node's own sets -------------------------------------------------------------------------------------------


def node_world(nodeport_ips=(), cidrs=()):
    ours = FamilyGlobals(detector=WORLD.ipv4.detector, nodeport_ips=nodeport_ips, service_cidrs=cidrs)
    return Globals(HERE, ipv4=ours, ipv6=None)


ONE, TWO = bytes([192, 0, 2, 1]), bytes([192, 0, 2, 2])
CIDR = (bytes([10, 96, 0, 0]), bytes([10, 96, 255, 255]))
NEXT = (bytes([10, 98, 0, 0]), bytes([10, 98, 0, 3]))


def test_node_addresses_and_service_cidrs_change_by_a_sync(start):
    backend = start(node_world((ONE,), (CIDR,)))
    resync(backend, {})
    for nodeport_ips, cidrs in [((ONE, TWO), (CIDR,)), ((TWO,), (CIDR, NEXT)), ((), ()), ((ONE,), (NEXT,))]:
        assert backend.set_world(node_world(nodeport_ips, cidrs)) is False
        sync(backend)
        assert count("nodeport-ips") == len(nodeport_ips)
        assert count("service-cidrs") == len(cidrs)
        is_clean(backend, {})
    assert resync(start(node_world((ONE,), (NEXT,))), {}) == 0


def test_node_addresses_change_while_nobody_looks(start):
    resync(start(node_world((ONE,), (CIDR,))), {})
    backend = start(node_world((TWO,), (NEXT,)))
    resync(backend, {})
    assert (elements("nodeport-ips"), count("service-cidrs")) == ({'"192.0.2.2"'}, 1)
    is_clean(backend, {})


def test_a_world_with_other_rules_asks_for_a_resync(start):
    backend = start(node_world((ONE,)))
    resync(backend, cluster("a"))
    changed = world(detector=False, families=[V4])
    assert backend.set_world(changed) is True
    plans = cluster("a", globals_=changed)
    resync(backend, plans)
    assert chains()["cluster"] == ["goto pick"]
    is_clean(backend, plans)


# -- the shape of the table ----------------------------------------------------------------------------------------


def test_chains_and_rules_do_not_grow_with_services(start):
    more = {**EVERYTHING, "session_affinity": None}

    def many(number):
        return {
            ("default", f"s{n}"): plans_of(
                f"s{n}",
                n,
                3,
                **{
                    **more,
                    "ports": [ServicePort(port=80, node_port=30000 + n)],
                    "external_ips": [],
                    "ingress": [f"198.51.{100 + (n >> 8)}.{n & 255}"],
                },
            )
            for n in range(1, number + 1)
        }

    backend = start()
    resync(backend, many(10))
    before = chains()
    handles = nfnetlink.rule_handles(V4, "kube-proxy")
    sync(backend, *list(many(500).items())[10:])
    assert (count("cluster-services"), count("policy-local-services"), count("policy-local-nodeports")) == (500,) * 3
    assert verdicts() == 0
    assert chains() == before
    assert nfnetlink.rule_handles(V4, "kube-proxy") == handles


@pytest.mark.parametrize("family", [V4, V6])
def test_the_listing_loads_again_elsewhere(start, family):
    globals_ = world(families=[family])
    plans = {
        ("default", "a"): plans_of("a", 1, globals_=globals_),
        ("default", "b"): sticky("b", 2, 2, globals_=globals_),
    }
    resync(start(globals_), plans)
    text = listing(family)
    before, rules = contents(family), chains(family)
    with own_network():
        nft.run(text)
        assert (contents(family), chains(family)) == (before, rules)


@settings(max_examples=10, deadline=None)
@given(histories(max_size=1))
def test_elements_as_text_are_the_elements_as_packed(history):
    globals_, (plans,) = history
    (family,) = globals_.families
    with own_network(), closing(NftablesBackend(family, globals_)) as backend:
        resync(backend, plans)
        packed = contents(family)
    ruleset = Ruleset(family, globals_)
    total = render(Placed.fresh(p) for found in plans.values() for p in found)
    ours = globals_.of(family)
    total[SetId.NODEPORT_IPS] = dict.fromkeys(ours.nodeport_ips, b"")
    with own_network(), closing(NftablesBackend(family, globals_)) as backend:
        names = {parse_chain_name(d.decode()) for set_id in VERDICT_MAPS for d in total.get(set_id, {}).values()}
        nft.run(
            "\n".join(
                [
                    ruleset.skeleton(names),
                    *element_lines(ruleset.layout, ruleset.name, total),
                    *interval_lines(ruleset.name, "service-cidrs", ours.service_cidrs),
                ]
            )
            + "\n"
        )
        assert contents(family) == packed
        assert resync(backend, plans) == 0
