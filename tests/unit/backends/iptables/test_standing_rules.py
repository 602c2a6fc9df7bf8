"""A full sync onto existing rules writes only differences; the result is the same as that of writing everything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.errors import ApplyError
from kubeproxy.kernel.xtables.xtables import Incompatible
from kubeproxy.model.objects import ServicePort
from support.effort import examples
from support.fake_tables import FakeCommands, backend, named, normalised
from support.iptables_plans import SHARED_CHAINS, V4, WORLD, a, opened, plans
from support.random_plans import histories


def again(made, wanted, world=WORLD, family=V4):
    """Return another proxy on the same tables after its first sync; `tables.inputs` contains its input."""
    fresh = backend(world, family, uses_nft=made._commands.uses_nft)
    fresh._commands.tables = fresh.tables = made.tables
    made.tables.inputs.clear()
    list(fresh.resync(wanted))
    return fresh


def two():
    nodeport = [ServicePort(port=80, node_port=30080)]
    return {
        a("web"): plans("web", 1, "10.244.0.1", "10.244.0.2", ports=nodeport),
        a("other"): plans("other", 2, "10.244.0.3", ports=[ServicePort(port=80, node_port=30081)]),
        a("none"): plans("none", 3),
    }


@given(histories(min_size=2, max_size=4), st.booleans())
@examples(60)
def test_proxies_one_after_the_other_come_to_the_same_as_one(history, uses_nft):
    globals_, states = history
    family = globals_.families[0]
    made = backend(globals_, family, uses_nft=uses_nft)
    for state in states:
        made = again(made, state, globals_, family)
    fresh = backend(globals_, family)
    list(fresh.resync(states[-1]))
    assert normalised(made.tables.chains, family, SHARED_CHAINS) == normalised(
        fresh.tables.chains, family, SHARED_CHAINS
    )
    assert {t: total for t, (total, _) in made._metrics.counted.items()} == {
        t: total for t, (total, _) in fresh._metrics.counted.items()
    }
    assert made._counts == fresh._counts
    made.tables.inputs.clear()
    list(made.resync(states[-1]))
    assert made.tables.inputs == []


@pytest.mark.parametrize("uses_nft", [True, False])
def test_a_restarted_proxy_writes_nothing(uses_nft):
    fresh = again(opened(two(), uses_nft=uses_nft), two())
    assert fresh.tables.inputs == []
    assert {last for _, last in fresh._metrics.counted.values()} == {0}
    assert fresh._metrics.counted["nat"][0] > 10


@pytest.mark.parametrize("uses_nft", [True, False])
@pytest.mark.parametrize(
    ("place", "harm", "written"),
    [
        (("nat", "KUBE-MARK-MASQ"), list.clear, ["KUBE-MARK-MASQ"]),
        (("nat", "KUBE-POSTROUTING"), list.reverse, ["KUBE-POSTROUTING"]),
        (("filter", "KUBE-FORWARD"), list.pop, ["KUBE-FORWARD"]),
        (("nat", "KUBE-SERVICES"), list.pop, ["KUBE-SERVICES"]),
        (("nat", "KUBE-SERVICES"), lambda rules: rules.insert(0, rules.pop()), ["KUBE-SERVICES"]),
        (("nat", "KUBE-SERVICES"), lambda rules: rules.insert(0, rules[0]), ["KUBE-SERVICES"]),
        (("nat", "KUBE-NODEPORTS"), list.reverse, ["KUBE-NODEPORTS"]),
        (("nat", "KUBE-SERVICES"), lambda rules: rules.insert(0, rules.pop(0)), []),
        (("nat", "PREROUTING"), list.clear, []),
        (("filter", "KUBE-SERVICES"), list.clear, ["KUBE-SERVICES"]),
    ],
)
def test_a_start_repairs_foreign_changes_and_writes_nothing_else(place, harm, written, uses_nft):
    made = opened(two(), uses_nft=uses_nft)
    wanted = normalised(made.tables.chains, V4, SHARED_CHAINS)
    harm(made.tables.chains[place])
    fresh = again(made, two())
    assert normalised(fresh.tables.chains, V4, SHARED_CHAINS) == wanted
    assert named(fresh) == written
    assert fresh.tables.chains["nat", "KUBE-SERVICES"][-1].endswith("-j KUBE-NODEPORTS")


@pytest.mark.parametrize("uses_nft", [True, False])
def test_the_order_of_services_is_free(uses_nft):
    made = opened(two(), uses_nft=uses_nft)
    first, second, *rest = made.tables.chains["nat", "KUBE-SERVICES"]
    made.tables.chains["nat", "KUBE-SERVICES"][:] = [second, first, *rest]
    assert again(made, two()).tables.inputs == []


@pytest.mark.parametrize("uses_nft", [True, False])
def test_a_start_writes_only_the_changes_of_the_cluster(uses_nft):
    later = two() | {a("other"): plans("other", 2, "10.244.0.9", ports=[ServicePort(port=80, node_port=30081)])}
    fresh = again(opened(two(), uses_nft=uses_nft), later)
    assert len(named(fresh)) == 3, "the choice, the endpoint that came and the one that went"
    assert sum(text.count("\n-X ") for text in fresh.tables.inputs) == 1
    assert fresh._metrics.counted["nat"][1] == 4, "two of the choice, two of the endpoint"


@pytest.mark.parametrize("uses_nft", [True, False])
@pytest.mark.parametrize("error", [Incompatible("rules of nft itself"), ApplyError("it was killed")])
def test_a_table_that_cannot_be_read_is_written(monkeypatch, error, uses_nft):
    saved = FakeCommands.saved

    def refusing(self, table):
        if table == "nat":
            raise error
        return saved(self, table)

    made = opened(two(), uses_nft=uses_nft)
    monkeypatch.setattr(FakeCommands, "saved", refusing)
    fresh = again(made, two())
    assert {"KUBE-MARK-MASQ", "KUBE-SERVICES", "KUBE-POSTROUTING"} <= set(named(fresh))
    assert len([chain for chain in named(fresh) if chain.startswith("KUBE-SEP-")]) == 3
    assert "*filter" not in "".join(fresh.tables.inputs)
