"""The text of the table: its dependencies, its independence of everything else, and names that can be parsed again."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kubeproxy.backends.nftables.layout import (
    CLASS_MAPS,
    HASHED,
    TREATMENTS,
    VERDICT_MAPS,
    ChainName,
    Packing,
    SetId,
    class_of,
    parse_chain_name,
    service_key,
    slot_bytes,
)
from kubeproxy.backends.nftables.render import render
from kubeproxy.backends.nftables.ruleset import Ruleset
from kubeproxy.features import REFUSAL_RESETS
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import Detector, FamilyGlobals, Globals, Loopback
from support.cluster_objects import world
from support.nft_text import skeleton
from support.nftables_plans import placed
from support.random_plans import histories

V4, V6 = Family.IPV4, Family.IPV6
BASE = world()
NOBODY = FamilyGlobals()


def changed(**more) -> Globals:
    """Return the base world with one part of its IPv4 half changed."""
    return replace(BASE, ipv4=replace(BASE.ipv4, **more))


# -- dependencies of the text --------------------------------------------------------------------------------------

STATIC = {
    "base": BASE,
    "masqueradeAll": replace(BASE, masquerade_all=True),
    "another mark": replace(BASE, masquerade_mark=0x8000),
    "no detector": changed(detector=Detector()),
    "another network": changed(detector=Detector("network", "10.0.0.0/8")),
    "a bridge": changed(detector=Detector("bridge", "cni0")),
    "a prefix": changed(detector=Detector("prefix", "cni0")),
    "NodePorts everywhere": changed(nodeport_ips=None),
    "refusals by ICMP errors": REFUSAL_RESETS.on(BASE, value=False),
}
DYNAMIC = {
    "node name": replace(BASE, node_name="other"),
    "zone": replace(BASE, zone="z9"),
    "node addresses": changed(node_ips=(b"\x0a\0\0\x09",)),
    "NodePort addresses": changed(nodeport_ips=(b"\x0a\0\0\x09", b"\x0a\0\0\x0a")),
    "no NodePort addresses": changed(nodeport_ips=()),
    "service CIDRs": changed(service_cidrs=((b"\x0a\0\0\0", b"\x0a\0\0\xff"),)),
    "the other family": replace(BASE, ipv6=None),
    "the other family's detector": replace(BASE, ipv6=replace(BASE.ipv6, detector=Detector())),
}


def test_every_static_fact_distinguishes_tables():
    texts = [Ruleset(V4, globals_).texts() for globals_ in STATIC.values()]
    assert all(one != two for one, two in itertools.combinations(texts, 2))


@pytest.mark.parametrize("fact", DYNAMIC)
def test_other_facts_leave_the_table_as_it_is(fact):
    one, two = Ruleset(V4, BASE), Ruleset(V4, DYNAMIC[fact])
    assert one.texts() == two.texts()
    assert one.definition([]) == two.definition([])


@pytest.mark.parametrize("fact", STATIC)
def test_the_table_changes_exactly_with_its_distinguishing_texts(fact):
    base, other = Ruleset(V4, BASE), Ruleset(V4, STATIC[fact])
    assert (base.definition([]) == other.definition([])) is (base.texts() == other.texts())


# -- independence of the text --------------------------------------------------------------------------------------


def chains_of(plans):
    elements = render(placed(p for found in plans.values() for p in found))
    verdicts = {chain for set_id in VERDICT_MAPS for chain in elements.get(set_id, {}).values()}
    names = {parse_chain_name(verdict.decode()) for verdict in verdicts}
    assert None not in names
    return names


@given(histories(max_size=1))
def test_services_without_affinity_need_no_chains(history):
    globals_, (plans,) = history
    (family,) = globals_.families
    ruleset = Ruleset(family, globals_)
    plain = {name: found for name, found in plans.items() if not any(p.affinity or p.balance for p in found)}
    assert chains_of(plain) == set()
    assert ruleset.definition(chains_of(plain)) == ruleset.definition([])


@given(histories(max_size=1))
def test_chains_are_named_by_counts_and_never_by_services(history):
    globals_, (plans,) = history
    (family,) = globals_.families
    text = skeleton(Ruleset(family, globals_), chains_of(plans))
    for plan in (plan for found in plans.values() for plan in found):
        assert not re.search(rf"\b{plan.key.name}\b", text)
        assert plan.key.namespace not in text


@given(histories(max_size=1))
def test_every_verdict_leads_to_a_chain_of_the_skeleton(history):
    globals_, (plans,) = history
    (family,) = globals_.families
    ruleset = Ruleset(family, globals_)
    text = skeleton(ruleset, chains_of(plans))
    made = set(re.findall(r"^add chain \S+ \S+ (\S+)", text, re.MULTILINE))
    assert {str(name) for name in chains_of(plans)} <= made
    assert set(re.findall(r"\b(?:goto|jump) ([^\s,]+)", text)) <= made


@pytest.mark.parametrize("family", [V4, V6])
def test_every_set_that_a_rule_reads_is_made_and_every_set_is_read(family):
    parts = {
        "ipv4": replace(BASE.ipv4, loopback=Loopback.REFUSED),
        "ipv6": replace(BASE.ipv6, loopback=Loopback.REFUSED),
    }
    chains = (
        ChainName(nodeport, kind, affinity=30) for nodeport in (False, True) for kind in ("external", "local-pick")
    )
    text = skeleton(Ruleset(family, replace(BASE, **parts)), chains)
    made = re.findall(r"^add (?:set|map) \S+ \S+ (\S+)", text, re.MULTILINE)
    assert len(made) == len(set(made))
    assert set(re.findall(r"@([a-z0-9-]+)", text)) == set(made)


@pytest.mark.parametrize("family", [V4, V6])
def test_the_static_rules_have_no_verdicts_to_validate_but_their_own(family):
    """At every change of the map the kernel checks all rules that each of its verdicts refers to."""
    text = skeleton(Ruleset(family, BASE))
    assert set(re.findall(r"vmap @(\S+)", text)) == set(VERDICT_MAPS)


# -- names ---------------------------------------------------------------------------------------------------------

TABLES = [treatment for treatment in TREATMENTS if treatment.endswith(HASHED)]
OTHERS = [treatment for treatment in TREATMENTS if treatment not in TABLES]
tables = st.builds(ChainName, st.booleans(), st.sampled_from(TABLES), st.integers(1, 10_000), st.just(0))
others = st.builds(ChainName, st.booleans(), st.sampled_from(OTHERS), st.just(0), st.integers(1, 86400))
chain_names = st.one_of(tables, others)


@given(chain_names)
def test_chain_names_come_back(name):
    assert parse_chain_name(str(name)) == name
    assert len(str(name)) < 128  # NFT_NAME_MAXLEN is 256


@given(chain_names, chain_names)
def test_chain_names_are_unambiguous(one, two):
    assert (str(one) == str(two)) is (one == two)


STATIC_CHAINS = list(Ruleset(V4, BASE).chains([]))


@pytest.mark.parametrize(
    "text",
    [
        *dict.fromkeys(STATIC_CHAINS),
        "",
        "cluster",
        "cluster-",
        "cluster-1",
        "cluster-0s",
        "cluster-86401s",
        "maglev-0",
        "maglev-5s",
        "maglev-65536",
        "local-nodeport-pick-30s",
        "cluster-x",
        "cluster--1",
        "cluster-1-",
        "cluster-01s",
        "cluster-1-30s",
        "cluster-\u0663s",
        "cluster-5",
        "cluster-s",
        "cluster-5s-",
        "nodeport-",
        "service-ULMVA6XW-ns1/svc1/tcp/p80",
        "KUBE-SERVICES",
    ],
)
def test_other_chains_have_no_such_name(text):
    assert parse_chain_name(text) is None


@pytest.mark.parametrize(
    ("count", "size"),
    [(0, 1), (1, 1), (2, 2), (8, 8), (9, 10), (17, 20), (20, 20), (257, 1024), (65535, 65535), (65536, 65535)],
)
def test_the_class_of_a_number_of_endpoints(count, size):
    assert class_of(count) == size


# -- keys and lines ------------------------------------------------------------------------------------------------


def test_slots_have_the_bytes_of_numgen():
    slots = slot_bytes(5000)
    assert slots[0] == b"\0\0\0\0"
    assert slots[4999] == (4999).to_bytes(4, "little")


def test_service_keys_fill_registers():
    assert service_key(b"\x0a\0\0\1" + b"\x06" + b"\0\x50") == b"\x0a\0\0\1" + b"\x06\0\0\0" + b"\0\x50\0\0"
    assert service_key(b"\x11" + b"\x75\x30") == b"\x11\0\0\0" + b"\x75\x30\0\0"


@pytest.mark.parametrize("family", [V4, V6])
def test_key_sizes(family):
    size = family.address_size
    assert SetId.ENDPOINTS.key_size(family) == size + 12
    assert SetId.CLUSTER_SERVICES.key_size(family) == size + 8
    assert SetId.AFFINITY_SERVICES.key_size(family) == size + 8
    assert SetId.EXTERNAL_NODEPORTS.key_size(family) == 8
    assert SetId.AFFINITY_NODEPORTS.key_size(family) == 8
    assert SetId.NODEPORT_ENDPOINTS.key_size(family) == 12
    for class_map in CLASS_MAPS:
        assert class_map.packing is Packing.CLASS
        assert class_map.data_size(family) == 2
    assert SetId.HAIRPIN.key_size(family) == 2 * size
    assert SetId.FIREWALL_ALLOW.key_size(family) == 2 * size
