"""A sync writes only changes, in an order that iptables accepts; the result is the same as that of a full sync."""

from __future__ import annotations

from base64 import b32encode
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kubeproxy.backends.iptables.skeleton import StartOptions, chain_hashes, comment, port_name
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.xtables.nft_compat import RuleWriter
from kubeproxy.kernel.xtables.xtables import RestoreError
from kubeproxy.model.objects import ServicePort
from kubeproxy.model.plan import Detector, ServicePortKey
from support.effort import examples
from support.fake_tables import FakeCommands, backend, named, normalised, played
from support.iptables_plans import SHARED_CHAINS, V4, WORLD, a, opened, plans
from support.random_plans import histories


@given(histories(min_size=1, max_size=4), st.booleans())
@examples(60)
def test_changes_come_to_the_same_as_everything_at_once(history, uses_nft):
    globals_, states = history
    family = globals_.families[0]
    made = played(globals_, states, uses_nft=uses_nft)
    fresh = backend(globals_, family)
    list(fresh.resync(states[-1]))
    assert normalised(made.tables.chains, family, SHARED_CHAINS) == normalised(
        fresh.tables.chains, family, SHARED_CHAINS
    )
    assert made._metrics.counted["nat"][0] == fresh._metrics.counted["nat"][0]
    assert made._metrics.counted["filter"][0] == fresh._metrics.counted["filter"][0]
    assert made._counts == fresh._counts
    nat = [rules for (table, chain), rules in fresh.tables.chains.items() if table == "nat" and chain[:5] == "KUBE-"]
    assert sum(map(len, nat)) == fresh._metrics.counted["nat"][0]


def test_an_endpoint_that_moves_writes_the_choice_and_its_own_chain():
    made = opened({a("web"): plans("web", 1, "10.244.0.1", "10.244.0.2"), a("other"): plans("other", 2, "10.244.0.3")})
    list(made.sync([(a("web"), plans("web", 1, "10.244.0.1", "10.244.0.9"))]))
    assert f"KUBE-SVC-{chain_hashes(['default/webtcp'])[0]}" in named(made)
    assert len(named(made)) == 3, "the Service's, the new endpoint's, the old endpoint's"
    assert made.tables.inputs[0].count("\n-X ") == 1
    assert "*filter" not in made.tables.inputs[0]


def test_nothing_that_changed_writes_nothing():
    state = {a("web"): plans("web", 1, "10.244.0.1")}
    made = opened(state)
    list(made.sync(list(state.items())))
    assert made.tables.inputs == []


def test_the_last_rule_of_the_services_leads_to_the_nodeports():
    state = {a("web"): plans("web", 1, "10.244.0.1", ports=[ServicePort(port=80, node_port=30080)])}
    for uses_nft in (True, False):
        made = opened(state, uses_nft=uses_nft)
        list(made.sync([(a("new"), plans("new", 2, "10.244.0.2"))]))
        assert made.tables.chains["nat", "KUBE-SERVICES"][-1].endswith("-j KUBE-NODEPORTS")
        assert "-d 127.0.0.0/8" in made.tables.chains["nat", "KUBE-NODEPORTS"][0]


@pytest.mark.parametrize(("endpoints", "full"), [(1000, True), (1001, False)])
def test_an_hour_later_a_change_puts_everything_right_but_not_in_a_large_cluster(endpoints, full):
    many = [f"10.244.{n // 250}.{n % 250 + 1}" for n in range(endpoints)]
    made = opened({a("web"): plans("web", 1, *many), a("other"): plans("other", 2)})
    made._full_due = 0.0
    made.tables.chains["nat", "KUBE-MARK-MASQ"].clear()
    list(made.sync([(a("other"), plans("other", 2, ports=[ServicePort(port=81)]))]))
    assert bool(made.tables.chains["nat", "KUBE-MARK-MASQ"]) is full


def test_large_clusters_leave_comments_of_endpoints_out():
    many = [f"10.244.{n // 250}.{n % 250 + 1}" for n in range(1001)]
    made = opened({a("web"): plans("web", 1, *many[:1000])})
    own = f"KUBE-SVC-{chain_hashes(['default/webtcp'])[0]}"
    assert "->" in made.tables.chains["nat", own][1]
    made = opened({a("web"): plans("web", 1, *many)})
    assert "->" not in made.tables.chains["nat", own][1]
    assert "cluster IP" in made.tables.chains["nat", own][0]


def test_a_large_sync_by_nft_is_a_row_of_restores_with_the_way_in_at_the_end(monkeypatch):
    monkeypatch.setattr(RuleWriter, "chains_at_once", 10)
    state = {a(f"s{n}"): plans(f"s{n}", n, "10.244.0.1", "10.244.0.2") for n in range(1, 20)}
    made = backend(WORLD, V4, uses_nft=True)
    list(made.resync(state))
    assert len(made.tables.inputs) > 5
    *_, way_in, jumps = made.tables.inputs
    assert [text for text in made.tables.inputs if ":KUBE-SERVICES" in text] == [way_in]
    assert [text for text in made.tables.inputs if "-I " in text] == [jumps]
    made.tables.inputs.clear()
    list(made.resync({}))
    assert not any(chain.startswith(("KUBE-SVC-", "KUBE-SEP-")) for _, chain in made.tables.chains)


@pytest.mark.parametrize("kind", ["network", "bridge", "prefix", "none"])
def test_another_detector_of_pods_requires_a_full_sync(kind):
    made = opened({})
    ours = structs.replace(WORLD.ipv4, detector=Detector(kind, "cni0" if kind != "network" else "10.1.0.0/16"))
    assert made.set_world(structs.replace(WORLD, ipv4=ours))
    assert not made.set_world(structs.replace(WORLD, ipv4=ours))


def test_other_nodeport_addresses_are_taken_up_by_the_next_sync():
    made = opened({a("web"): plans("web", 1, "10.244.0.1")}, options=StartOptions(False, False, False))
    ours = structs.replace(WORLD.ipv4, nodeport_ips=(b"\xc0\0\2\1",))
    assert not made.set_world(structs.replace(WORLD, ipv4=ours))
    list(made.sync([]))
    assert named(made) == ["KUBE-SERVICES"]
    assert "-d 192.0.2.1/32" in made.tables.chains["nat", "KUBE-SERVICES"][-1]


def test_a_kernel_without_the_match_goes_on_without_counters(monkeypatch):
    told = "Warning: Extension nfacct revision 0 not supported, missing kernel module?"
    restore = FakeCommands.restore

    def refusing(self, pieces):
        text = "".join(pieces)
        if "nfacct" in text:
            raise RestoreError("iptables-nft-restore", told, 4)
        return restore(self, [text])

    monkeypatch.setattr(FakeCommands, "restore", refusing)
    made = opened({a("web"): plans("web", 1, "10.244.0.1", ports=[ServicePort(port=80, node_port=30080)])})
    assert made.tables.chains["nat", "KUBE-NODEPORTS"]


def test_the_rules_that_depend_on_the_node():
    liberal = opened({}, options=StartOptions(False, True, False)).tables.chains
    assert not any("INVALID" in rule for rule in liberal["filter", "KUBE-FORWARD"])
    assert liberal["filter", "KUBE-FIREWALL"] == []
    assert "! -d 127.0.0.0/8" in liberal["nat", "KUBE-SERVICES"][-1]


def test_a_failure_to_set_route_localnet_is_logged_once(monkeypatch, caplog):
    """In a container /proc/sys is read-only, and syncs happen every second."""

    def refused(key, value):
        raise ApplyError(f"cannot set sysctl {key} to {value}: Read-only file system")

    monkeypatch.setattr("kubeproxy.backends.iptables.backend.write_sysctl", refused)
    ports = [ServicePort(port=80, node_port=30080)]
    made = opened({a("web"): plans("web", 1, "10.1.0.1", type="NodePort", ports=ports)})
    for number in range(2, 5):
        list(made.sync([(a("web"), plans("web", 1, f"10.1.0.{number}", type="NodePort", ports=ports))]))
    assert [r.getMessage().split(":")[0] for r in caplog.records] == ["NodePorts do not answer on localhost"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ns/web:http", "ns/web:http"),
        ('ns/w" -j ACCEPT\n-A INPUT', "ns/w__-j_ACCEPT_-A_INPUT"),
        ("ns/$(reboot)\\", "ns/__reboot__"),
        ("n" * 300, "n" * 200),
    ],
)
def test_a_users_words_cannot_leave_their_comment(text, told):
    assert comment(text) == told


def test_chains_are_named_as_upstream():
    """From pkg/proxy/iptables/proxier_test.go, and a recording."""
    key = ServicePortKey("ns1", "svc1", "p80", 6, V4)
    assert port_name(key) == "ns1/svc1:p80"
    assert chain_hashes(["ns1/svc1:p80tcp"])[0] == "XPGD46QRK7WJZT7O"
    assert chain_hashes(["ns1/svc1:p80tcp10.180.0.1:80"])[0] == "SXIVWICOYRO3J4NJ"


@pytest.mark.parametrize("count", [0, 1, 2, 63, 64, 65, 200])
def test_many_names_are_hashed_as_one_by_one(count):
    texts = [f"default/web:httptcp10.0.0.{i}:80" for i in range(count)]
    wanted = [b32encode(sha256(text.encode()).digest())[:16].decode() for text in texts]
    assert chain_hashes(texts) == wanted


def test_half_a_surrogate_pair_has_a_hash():
    odd, usual = "default/\ud800", "default/web"
    assert chain_hashes([odd, usual])[1] == chain_hashes([usual])[0]
