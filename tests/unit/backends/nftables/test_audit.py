"""Reading our table back: endpoints keep the slots they are in."""

from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.backends.nftables import audit
from kubeproxy.backends.nftables.layout import NUMBER_MAPS, Layout, SetId, list_number
from kubeproxy.backends.nftables.render import Numbers, Placed, place, render, slots
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import Policy
from support.nftables_plans import placed
from support.random_plans import histories


def everything(placed):
    found = render(placed)
    return {name: found.get(name, {}) for name in Layout(Family.IPV4).shapes}


@given(histories(max_size=1), st.randoms(use_true_random=False))
def test_endpoints_are_recalled_in_the_slots_that_the_kernel_has_them_in(history, random):
    _, (plans,) = history
    for plan in (plan for found in plans.values() for plan in found):
        cluster, local = list(slots(plan, Policy.CLUSTER)), list(slots(plan, Policy.LOCAL))
        if not (plan.balance and plan.balance.hashing):  # which decides who has which slot
            random.shuffle(cluster)
            random.shuffle(local)
        there = Placed(plan, tuple(cluster), tuple(local), 7 if plan.affinity else 0)
        actual = everything([there])
        assert everything([place(plan, audit.recall(plan, actual, Numbers()), Numbers())]) == actual


@given(histories(min_size=2, max_size=2))
def test_recalled_endpoints_move_as_little_as_those_remembered(history):
    _, (earlier, later) = history
    for name, found in later.items():
        before = {item.plan.key: item for item in placed(earlier.get(name, ()))}
        for plan in found:
            old = before.get(plan.key)
            if old is None or old.plan.frontends != plan.frontends or old.plan.external != plan.external:
                continue
            if old.plan.internal == plan.internal:
                recalled = audit.recall(plan, everything([old]), Numbers())
                assert render([place(plan, recalled, Numbers())]) == render([place(plan, old, Numbers())])


def test_nothing_is_recalled_from_an_empty_table():
    assert audit.ranges_by_list({SetId.FIREWALL_ALLOW: {}}, Family.IPV4) == {}
    number, one, two = list_number(3, Family.IPV4), b"\x0a\0\0\1", b"\x0a\0\0\2"
    span, other = (number + a + number + b for a, b in ((one, one), (two, two)))
    found = {SetId.FIREWALL_ALLOW: {span: b"", other: b""}}
    assert audit.ranges_by_list(found, Family.IPV4) == {number: [span, other]}
    assert set(audit.numbers({key: {} for key in NUMBER_MAPS} | found)) == {3}
