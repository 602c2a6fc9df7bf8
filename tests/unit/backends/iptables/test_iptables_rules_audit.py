"""The audit of the tables: its findings, its exceptions, its times, and the removal of chains without a Service."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.backends.iptables.found import as_saved, by_chain
from kubeproxy.backends.iptables.skeleton import chain_hashes
from kubeproxy.backends.mode import Depth
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.xtables.xtables import Incompatible, RestoreError
from kubeproxy.model.addresses import Family
from support.effort import examples
from support.fake_tables import FakeCommands, FakeTables, normalised, played
from support.iptables_plans import SHARED_CHAINS, V4, a, opened, plans
from support.random_plans import histories

WEB = f"KUBE-SVC-{chain_hashes(['default/webtcp'])[0]}"


def audited(made) -> str:
    """Return the reason that the backend gives after another program's change, '' for none."""
    made._watch.foreign = True
    assert made.touched()
    difference = made.inspect(Depth.QUICK)
    return "" if difference is None else difference.what


def own_places(made) -> list[tuple[str, str]]:
    return [("nat", chain) for chains in made._contents.own_chains() for chain in chains]


HARM = {
    "delete": lambda rules: rules.pop(),
    "insert": lambda rules: rules.insert(0, f"{rules[0].split(' -')[0]} {rules[0].split(' ')[1]} -j RETURN"),
    "flush": lambda rules: rules.clear(),
    "replace": lambda rules: rules.append(rules.pop() + " -m changed"),
}


@given(histories(min_size=1, max_size=3), st.booleans(), st.data())
@examples(60)
def test_nothing_is_found_but_harm_which_a_repair_undoes(history, uses_nft, data):
    globals_, states = history
    family = globals_.families[0]
    made = played(globals_, states, uses_nft=uses_nft)
    whole = normalised(made.tables.chains, family, SHARED_CHAINS)
    assert audited(made) == ""
    assert not made.touched()
    with_rules = [place for place in own_places(made) if made.tables.chains[place]]
    if not with_rules:
        return
    place = data.draw(st.sampled_from(with_rules))
    HARM[data.draw(st.sampled_from(sorted(HARM)))](made.tables.chains[place])
    assert f"chain {place[1]} of Service " in audited(made)
    list(made.resync(states[-1]))
    assert normalised(made.tables.chains, family, SHARED_CHAINS) == whole
    assert made.touched(), "the repair is looked at"
    assert made.inspect(Depth.QUICK) is None


def test_only_damaged_and_changed_services_are_written():
    state = {a(n): plans(n, i, f"10.244.0.{i}") for i, n in enumerate(["web", "other", "third"], 1)}
    made = opened(state)
    del made.tables.chains["nat", WEB][-1]
    assert "Service default/web (IPv4) was changed by another program" in audited(made)
    list(made.resync(state | {a("other"): plans("other", 2, "10.244.0.9")}))
    text = "".join(made.tables.inputs)
    assert "default/web" in text
    assert "10.244.0.9" in text
    assert "default/third" not in text
    fresh = opened(state | {a("other"): plans("other", 2, "10.244.0.9")})
    assert normalised(made.tables.chains, V4, SHARED_CHAINS) == normalised(fresh.tables.chains, V4, SHARED_CHAINS)


@pytest.mark.parametrize("place", [("nat", "KUBE-MARK-MASQ"), ("filter", "KUBE-FORWARD"), ("nat", "KUBE-SERVICES")])
def test_damage_to_shared_chains_requires_a_full_sync(place):
    state = {a("web"): plans("web", 1, "10.244.0.1")}
    made = opened(state)
    made.tables.chains[place].pop()
    assert f"chain {place[1]} of iptables table {place[0]} (IPv4) was changed" in audited(made)
    list(made.resync(state))
    assert made.tables.chains[place] == opened(state).tables.chains[place]


@pytest.mark.parametrize("chain", ["KUBE-PROXY-CANARY", "PREROUTING", WEB])
def test_removed_objects_are_reported(chain):
    made = opened({a("web"): plans("web", 1, "10.244.0.1")})
    del made.tables.chains["nat", chain]
    said = {"KUBE-PROXY-CANARY": "table nat of iptables", "PREROUTING": "the jump from PREROUTING", WEB: "Service"}
    assert said[chain] in audited(made)


def test_chains_of_others_and_of_no_service_are_no_drift():
    made = opened({a("web"): plans("web", 1, "10.244.0.1")})
    for chain in ("CNI-HOSTPORT-DNAT", "KUBE-KUBELET-CANARY", "KUBE-SVC-AAAAAAAAAAAAAAAA"):
        made.tables.chains["nat", chain] = [f"-A {chain} -j {WEB}"]
    made.tables.chains["nat", "PREROUTING"].append("-A PREROUTING -j CNI-HOSTPORT-DNAT")
    assert audited(made) == ""


def test_shared_chains_of_a_table_with_rules_of_nft_are_compared(monkeypatch):
    """iptables-nft-save prints nothing of such a table, but each other chain can be listed."""
    saved = FakeCommands.saved

    def refusing(self, table):
        if table == "nat":
            raise Incompatible("table `nat' is incompatible, use 'nft' tool")
        return saved(self, table)

    made = opened({a("web"): plans("web", 1, "10.244.0.1")}, uses_nft=True)
    monkeypatch.setattr(FakeCommands, "saved", refusing)
    assert audited(made) == ""
    made.tables.chains["nat", "KUBE-SERVICES"].pop()
    assert "chain KUBE-SERVICES of iptables table nat (IPv4) was changed" in audited(made)


def test_rules_that_another_version_prints_otherwise_are_no_drift(monkeypatch):
    state = {a("web"): plans("web", 1, "10.244.0.1", "10.244.0.2")}
    made = opened(state)
    monkeypatch.setattr(FakeCommands, "printed", lambda self, rule: rule.replace("--probability", "--every-chance"))
    before = dict(made.tables.chains)
    assert audited(made) == ""
    assert made.tables.chains == before, "copies are gone"
    made.tables.chains["nat", WEB][0] += " -m changed"
    assert WEB in audited(made)


def test_a_rule_without_a_target_may_end_with_a_space():
    """Output of iptables-nft 1.8.7."""
    rule = '-A KUBE-FW-A -m comment --comment "a b"'
    with_space, without = ([*by_chain([":KUBE-FW-A -", f"{rule}{end}"])] for end in (" \n", "\n"))
    assert with_space == without


@pytest.mark.slow("a thousand endpoints")
def test_endpoints_that_made_the_cluster_large_are_no_drift():
    many = [f"10.244.{n // 250}.{n % 250 + 1}" for n in range(999)]
    made = opened({a("web"): plans("web", 1, *many), a("other"): plans("other", 2, "10.245.0.1")})
    list(made.sync([(a("other"), plans("other", 2, "10.245.0.1", "10.245.0.2"))]))
    assert audited(made) == ""


def test_after_an_audit_none_follows_for_a_while(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("kubeproxy.backends.iptables.watch.time.monotonic", lambda: now[0])
    looked = []
    saved = FakeCommands.saved

    def slow(self, table):
        looked.append(table)
        now[0] += 1.0
        return saved(self, table)

    monkeypatch.setattr(FakeCommands, "saved", slow)
    made = opened({a("web"): plans("web", 1, "10.244.0.1")})
    looked.clear()
    made._watch.rest = 20.0
    assert audited(made) == ""
    assert len(looked) == 3
    made.tables.chains["nat", WEB].pop()
    now[0] += 59.0
    assert audited(made) == ""
    assert not made.touched()
    now[0] += 1.0
    assert made.touched()
    assert WEB in made.inspect(Depth.QUICK).what


@pytest.mark.parametrize(
    ("rule", "printed"),
    [
        ("-A KUBE-FW-A -s 10.1.2.3/8 -j X\n", "-A KUBE-FW-A -s 10.0.0.0/8 -j X\n"),
        ("-A KUBE-FW-A -s 0.0.0.0/0 -j X\n", "-A KUBE-FW-A -j X\n"),
        ("-A KUBE-FW-A -s 2001:DB8:0::/48 -j X\n", "-A KUBE-FW-A -s 2001:db8::/48 -j X\n"),
        ("-A KUBE-SVC-A ! -i cni0 -d 10.0.0.1/32 -j X\n", "-A KUBE-SVC-A -d 10.0.0.1/32 ! -i cni0 -j X\n"),
    ],
)
def test_rules_as_they_are_printed(rule, printed):
    assert as_saved(rule, Family.IPV4) == printed


@pytest.mark.parametrize("uses_nft", [True, False], ids=["nft", "legacy"])
@pytest.mark.parametrize("place", [("filter", "KUBE-FORWARD"), ("nat", WEB)], ids=["filter", "nat"])
def test_a_copy_that_could_not_be_removed_goes_with_the_repair(monkeypatch, place, uses_nft):
    """As when another program holds the lock at that moment, or the proxy is killed."""
    state = {a("web"): plans("web", 1, "10.244.0.1")}
    made = opened(state, uses_nft=uses_nft)
    whole = set(made.tables.chains)
    restore = FakeTables.restore

    def locked(self, text):
        if "-X KUBE-SEP-AUDIT-0" in text:
            raise ApplyError("another program has held the iptables lock")
        restore(self, text)

    with monkeypatch.context() as patched:
        patched.setattr(FakeTables, "restore", locked)
        made.tables.chains[place].pop()
        with pytest.raises(ApplyError):
            audited(made)
        assert (place[0], "KUBE-SEP-AUDIT-0") in made.tables.chains
    list(made.resync(state))
    assert set(made.tables.chains) == whole
    assert audited(made) == ""


# -- chains of deleted Services ------------------------------------------------------------------------------------


@pytest.fixture
def strict(monkeypatch):
    """Tables that refuse to delete a chain while a rule jumps to it."""
    restore = FakeTables.restore

    def refusing(self, text):
        before = {place: list(rules) for place, rules in self.chains.items()}
        try:
            restore(self, text)
        except AssertionError as error:
            self.chains = before
            raise RestoreError("iptables-restore", str(error), 1) from error

    monkeypatch.setattr(FakeTables, "restore", refusing)


@pytest.mark.parametrize("uses_nft", [True, False], ids=["nft", "legacy"])
def test_a_chain_that_others_use_is_emptied_and_left(strict, caplog, uses_nft):
    state = {a("web"): plans("web", 1, "10.244.0.1"), a("other"): plans("other", 2, "10.244.0.2")}
    made = opened(state, uses_nft=uses_nft)
    endpoint = "nat", f"KUBE-SEP-{chain_hashes(['default/webtcp10.244.0.1:8080'])[0]}"
    assert made.tables.chains[endpoint]
    made.tables.chains["nat", "OUTPUT"].append(f"-A OUTPUT -d 192.0.2.1/32 -j {WEB}")
    list(made.sync([(a("web"), ()), (a("new"), plans("new", 3, "10.244.0.3"))]))
    assert made.tables.chains["nat", WEB] == []
    assert endpoint not in made.tables.chains
    del state[a("web")]
    state[a("new")] = plans("new", 3, "10.244.0.3")
    for _ in range(2):
        list(made.resync(state))
        assert audited(made) == ""
    (told,) = [record.getMessage() for record in caplog.records if "Leaving" in record.message]
    assert told.endswith(f"rules of another program jump to it chain={WEB} family=IPv4")
    made.tables.chains["nat", "OUTPUT"].pop()
    list(made.resync(state))
    assert ("nat", WEB) not in made.tables.chains
    fresh = opened(state)
    assert normalised(made.tables.chains, V4, SHARED_CHAINS) == normalised(fresh.tables.chains, V4, SHARED_CHAINS)


def test_a_restore_that_fails_for_another_reason_is_an_error(strict):
    made = opened({a("web"): plans("web", 1, "10.244.0.1")})
    made.tables.chains.pop(("nat", "KUBE-MARK-MASQ"))
    with pytest.raises(RestoreError):
        list(made.sync([(a("new"), plans("new", 3, "10.244.0.3"))]))
