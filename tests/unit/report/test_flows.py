"""The tracked UDP flows that a change made stale, and the times of the search for them; a recording conntrack."""

import asyncio
import contextlib
from functools import partial

import pytest
from msgspec import structs

from kubeproxy.errors import ApplyError
from kubeproxy.kernel.conntrack.tracked import target_of
from kubeproxy.kernel.conntrack.udp_flows import Translation
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import (
    NOTHING,
    Action,
    Compiled,
    FamilyGlobals,
    Frontend,
    FrontendKind,
    Globals,
    Policies,
    Policy,
    PortRange,
    ServicePlan,
    ServicePortKey,
    Traffic,
)
from kubeproxy.model.planner import Change
from kubeproxy.report import flows
from kubeproxy.report.flows import (
    SECOND_LOOK,
    UNTRANSLATED,
    FlowCleaner,
    Key,
    Suspects,
    joined,
    remembered,
    suspects,
    translations,
)
from kubeproxy.report.metrics import ProxyMetrics

V4, V6 = Family.IPV4, Family.IPV6
UDP, TCP = 17, 6
VIP, EXTERNAL, NODE = bytes([10, 96, 0, 1]), bytes([198, 51, 100, 1]), bytes([192, 0, 2, 1])
A, B, C = (bytes([10, 244, 0, n, 0x1F, 0x90]) for n in (1, 2, 3))
REJECT = Traffic(Action.REJECT, Action.REJECT, Action.REJECT)
ALL = Policies(Policy.CLUSTER, Policy.CLUSTER)


def frontend(kind, address, port=53, protocol=UDP):
    return Frontend(kind, address + bytes([protocol]) + port.to_bytes(2, "big"))


SERVED = Traffic(Action.CLUSTER, Action.CLUSTER_MASQUERADE, Action.CLUSTER_MASQUERADE)
LOCAL = Traffic(Action.CLUSTER, Action.CLUSTER_MASQUERADE, Action.LOCAL)
NOT_HERE = Traffic(Action.CLUSTER, Action.CLUSTER_MASQUERADE, Action.DROP)


def meaning(
    *serving, protocol=UDP, family=V4, vip=VIP, external=(), balancer=(), nodeport=0, outside=None, sources=None
):
    """Return a Service with endpoints;

    `outside` is the action for addresses other than the cluster IP, `sources` may use the load balancer.
    """
    internal = SERVED if serving else REJECT
    fronts = [frontend(FrontendKind.CLUSTER, vip, protocol=protocol)]
    fronts += [frontend(FrontendKind.EXTERNAL, address, protocol=protocol) for address in external]
    fronts += [frontend(FrontendKind.LOADBALANCER, address, protocol=protocol) for address in balancer]
    if nodeport:
        fronts.append(frontend(FrontendKind.NODEPORT, b"", nodeport, protocol))
    key = ServicePortKey("ns", "web", "", protocol, family)
    return Compiled(
        (ServicePlan(key, tuple(fronts), serving, (), ALL, internal, outside or internal, 0, (), serving, sources),)
    )


def change(before, after, name="web"):
    return Change(("ns", name), before, after)


FRONT = Key(VIP, 53)
TARGET = target_of(VIP, flows.UDP, 53)
NODEPORT = (30053).to_bytes(2)


@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [
        pytest.param(meaning(A), meaning(A, B), set(), id="an endpoint more"),
        pytest.param(meaning(), meaning(A), {UNTRANSLATED}, id="the first endpoint: a packet may have slipped through"),
        pytest.param(meaning(A, B), meaning(A), {B}, id="an endpoint less"),
        pytest.param(meaning(A), meaning(B), {A}, id="another endpoint"),
        pytest.param(meaning(A), meaning(), {A, UNTRANSLATED}, id="no endpoint left"),
        pytest.param(meaning(A), NOTHING, {A}, id="no Service left"),
        pytest.param(meaning(), NOTHING, set(), id="a Service without endpoints goes"),
        pytest.param(NOTHING, meaning(A), {UNTRANSLATED}, id="a new Service: flows began before it"),
        pytest.param(NOTHING, meaning(), {UNTRANSLATED}, id="a new Service without endpoints"),
        pytest.param(meaning(A), meaning(A), set(), id="something else changed"),
    ],
)
def test_flows_that_a_change_makes_stale(before, after, lost):
    assert suspects([change(before, after)], V4, certain=True)[FRONT].lost == lost


def test_if_the_kernels_state_was_uncertain_any_flow_may_be_stale():
    assert suspects([change(NOTHING, meaning(A))], V4, certain=False) == {FRONT: Suspects(frozenset({A}), None)}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param({"outside": NOT_HERE}, {"outside": LOCAL}, id="the first endpoint of this node"),
        pytest.param({"outside": LOCAL}, {"outside": NOT_HERE}, id="the last endpoint of this node"),
        pytest.param({"sources": ((NODE, NODE),)}, {"sources": ((NODE, EXTERNAL),)}, id="another source range"),
        pytest.param({"sources": ((NODE, NODE),)}, {}, id="open to all"),
    ],
)
def test_newly_served_clients_may_have_untranslated_flows(before, after):
    made = [meaning(A, balancer=[EXTERNAL], **part) for part in (before, after)]
    wrong = suspects([change(*made)], V4, certain=True)
    assert wrong == {
        FRONT: Suspects(frozenset({A}), frozenset()),
        Key(EXTERNAL, 53): Suspects(frozenset({A}), frozenset({UNTRANSLATED})),
    }


@pytest.mark.parametrize("more", [{"protocol": TCP}, {"family": V6, "vip": bytes(16)}])
def test_flows_of_other_protocols_and_families_are_kept(more):
    assert suspects([change(meaning(A, **more), meaning(**more))], V4, certain=True) == {}


@pytest.mark.parametrize("order", [1, -1])
def test_a_frontend_that_moves_to_another_service_keeps_flows_to_shared_endpoints(order):
    moves = [change(meaning(A, B), NOTHING, "old"), change(NOTHING, meaning(B, C), "new")][::order]
    assert suspects(moves, V4, certain=True) == {FRONT: Suspects(frozenset({B, C}), frozenset({A}))}


def test_every_frontend_counts():
    before, after = meaning(A, external=[EXTERNAL], nodeport=30053), meaning(B, external=[EXTERNAL], nodeport=30053)
    found = suspects([change(before, after)], V4, certain=True)
    assert found.keys() == {FRONT, Key(EXTERNAL, 53), Key(b"", 30053)}
    assert translations(found, [NODE]) == [
        Translation(VIP + b"\0\x35", A),
        Translation(EXTERNAL + b"\0\x35", A),
        Translation(NODE + NODEPORT, A),
    ]


def test_an_added_external_ip_is_a_new_frontend():
    found = suspects([change(meaning(A), meaning(A, external=[EXTERNAL]))], V4, certain=True)
    assert translations(found, []) == [Translation(EXTERNAL + b"\0\x35", EXTERNAL + b"\0\x35")]


def test_an_external_ip_that_a_service_loses_is_no_frontend_any_more():
    found = suspects([change(meaning(A, external=[EXTERNAL]), meaning(A))], V4, certain=True)
    assert translations(found, []) == [Translation(EXTERNAL + b"\0\x35", A)]


@pytest.mark.parametrize("policy", [SERVED, LOCAL])
def test_flows_stay_that_go_to_an_endpoint_which_serves_whatever_policies_and_source_ranges_say_now(policy):
    changed = meaning(A, balancer=[EXTERNAL], outside=policy, sources=((b"", b""),))
    found = suspects([change(meaning(A, balancer=[EXTERNAL]), changed)], V4, certain=True)
    assert all(A not in look.lost for look in found.values())


def test_flows_to_an_endpoint_that_serves_again_are_not_stale():
    assert translations({FRONT: Suspects(frozenset({A}), frozenset({A, B}))}, []) == [Translation(VIP + b"\0\x35", B)]
    assert translations({FRONT: Suspects(frozenset({A}), None)}, []) is None


class Notes:
    """A conntrack that finds one flow at each search."""

    def __init__(self, *, forgets=True):
        self.calls = []
        self._forgets = forgets

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def forget(self, _family, wanted, _frontends):
        if self._forgets:
            self.calls.append(sorted(t.endpoint for t in wanted))
            return 1
        return None

    def clean(self, _family, services, nodeports, _addresses, _certain, _former):
        self.calls.append((services, nodeports))
        return 1


def cleaned(*steps, forgets=True, looks):
    """Report changes to a cleaner, wait for a number of searches after each; return the arguments of the searches."""

    async def scene():
        notes, metrics = Notes(forgets=forgets), ProxyMetrics()
        cleaner = FlowCleaner(metrics, [V4], dict, notes)
        task = asyncio.create_task(cleaner.run())
        for step, count in zip(steps, looks, strict=True):
            cleaner.changed([step], full=False)
            async with asyncio.timeout(15):
                while len(notes.calls) < count:  # noqa: ASYNC110 - the notes have no event
                    await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return notes.calls

    return asyncio.run(scene())


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(flows, "SECOND_LOOK", 0.01)


def test_there_is_a_second_look(soon):
    assert cleaned(change(meaning(A), meaning(B)), looks=[2]) == [[A], [A]]


@pytest.fixture
def cleaner():
    return FlowCleaner(ProxyMetrics(), [V4], dict, Notes())


def wanted(cleaner, now):
    return translations(cleaner.due(V4, now), [])


def test_a_second_search_uses_the_present_serving_endpoints(cleaner):
    cleaner.changed([change(meaning(A), meaning(B))], full=False)
    assert wanted(cleaner, 0.0) == [Translation(VIP + b"\0\x35", A)]
    cleaner.changed([change(meaning(B), meaning(A, B))], full=False)
    assert cleaner.due(V4, SECOND_LOOK - 0.1) == {}
    assert cleaner.due(V4, SECOND_LOOK) == {FRONT: Suspects(frozenset({A, B}), frozenset({A}))}
    assert cleaner.due(V4, 3600.0) == {}


def test_every_change_has_a_second_look_of_its_own(cleaner):
    cleaner.changed([change(meaning(A), meaning(B))], full=False)
    assert wanted(cleaner, 0.0) == [Translation(VIP + b"\0\x35", A)]
    cleaner.changed([change(meaning(B), meaning(C))], full=False)
    assert wanted(cleaner, 0.3) == [Translation(VIP + b"\0\x35", B)]
    assert wanted(cleaner, 0.5) == [Translation(VIP + b"\0\x35", A)]
    assert wanted(cleaner, 0.8) == [Translation(VIP + b"\0\x35", B)]
    assert cleaner.due(V4, 3600.0) == {}


def test_after_a_full_sync_any_flow_may_be_wrong(cleaner):
    cleaner.changed([change(NOTHING, meaning(A))], full=True)
    assert cleaner.due(V4, 0.0) == cleaner.due(V4, 1.0) == {FRONT: Suspects(frozenset({A}), None)}


def relaying(*ports):
    return FlowCleaner(ProxyMetrics(), [V4], dict, Notes(), relays={V4: lambda _: ports})


def test_flows_to_a_listener_are_identified_by_its_port():
    """In userspace mode no flow leads to an endpoint: those to an open listener of their service port remain."""
    cleaner = relaying(1053)
    cleaner.changed([change(NOTHING, meaning(A))], full=False)
    for now in (0.0, 1.0):
        (look,) = cleaner.due(V4, now).values()
        assert look.lost is None
        assert NODE + bytes((4, 29)) in look.serving
        assert NODE + bytes((4, 30)) not in look.serving


def test_a_listener_leaves_endpoints_by_itself():
    cleaner = relaying(1053)
    cleaner.changed(
        [change(meaning(A, B), meaning(C)), change(meaning(A, vip=NODE), meaning(A, B, vip=NODE))], full=False
    )
    assert cleaner.due(V4, 0.0) == {}


def test_flows_to_a_listener_that_closed_or_is_another_ones_go():
    cleaner = relaying()
    cleaner.changed([change(meaning(A), NOTHING)], full=False)
    assert cleaner.due(V4, 0.0) == {FRONT: Suspects(frozenset(), None)}
    (plan,) = meaning(A).plans
    local = Traffic(Action.LOCAL, Action.LOCAL, Action.LOCAL)
    cleaner = relaying()
    cleaner.changed([change(meaning(A), Compiled((structs.replace(plan, internal=local),)))], full=False)
    assert cleaner.due(V4, 2.0) == {FRONT: Suspects(frozenset(), None)}


def test_a_running_search_uses_the_present_serving_endpoints():
    """A Service that is created again while the kernel's table is read has another listener, with flows to it."""
    notes, ports = Notes(), []
    cleaner = FlowCleaner(ProxyMetrics(), [V4], dict, notes, relays={V4: lambda _: ports})
    cleaner.changed([change(meaning(A), NOTHING)], full=False)
    wanted = cleaner._underway[V4] = cleaner.due(V4, 0.0)
    cleaner._remove(V4, wanted, ())
    ((services, _),) = notes.calls
    assert services == {TARGET: Suspects(frozenset(), None)}
    ports.append(1053)
    cleaner.changed([change(NOTHING, meaning(A))], full=False)
    assert NODE + bytes((4, 29)) in services[TARGET]


def test_two_searches_at_once_are_merged():
    one, two = {FRONT: Suspects(frozenset({C}), frozenset({A}))}, {FRONT: Suspects(frozenset({C}), frozenset({B}))}
    anything = {FRONT: Suspects(frozenset({C}), None)}
    assert joined([one, two]) == {FRONT: Suspects(frozenset({C}), frozenset({A, B}))}
    assert joined([one, anything]) == joined([anything, one]) == anything


def test_a_recheck_looks_at_all_udp_flows_and_no_others(soon):
    async def scene():
        notes = Notes()
        cleaner = FlowCleaner(ProxyMetrics(), [V4], dict, notes)
        cleaner.recheck(
            {("ns", "udp"): meaning(A), ("ns", "tcp"): meaning(B, protocol=TCP, vip=EXTERNAL), ("ns", "none"): NOTHING}
        )
        task = asyncio.create_task(cleaner.run())
        await asyncio.sleep(0.05)
        task.cancel()
        return notes.calls

    assert asyncio.run(scene())[0] == ({TARGET: Suspects(frozenset({A}), None)}, {})


def test_nothing_is_looked_for_when_nothing_went(soon):
    assert cleaned(change(meaning(A), meaning(A, B)), looks=[0]) == []


def test_a_kernel_that_cannot_forget_is_read(soon):
    found = cleaned(change(meaning(A, nodeport=30053), meaning(B, nodeport=30053)), forgets=False, looks=[2])
    wanted = Suspects(frozenset({B}), frozenset({A}))
    assert found == [({TARGET: wanted}, {NODEPORT: wanted})] * 2


def flaky(answer):
    """Return a function that raises ApplyError once, and then answers."""
    answers = iter([ApplyError("the table changed while being read")])

    def ask(*_):
        for error in answers:
            raise error
        return answer

    return ask


async def looked_for(cleaner, calls, *, until):
    task = asyncio.create_task(cleaner.run())
    async with asyncio.timeout(15):
        while not task.done() and not until():  # noqa: ASYNC110 - the notes have no event
            await asyncio.sleep(0.001)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return calls


@pytest.fixture
def again(monkeypatch):
    monkeypatch.setattr(flows, "RETRY", 0.01)
    monkeypatch.setattr(flows, "SECOND_LOOK", 3600.0)


def test_flows_that_the_kernel_refused_to_remove_are_searched_again(again):
    async def scene():
        notes = Notes()
        taking_notes, refuse_once = notes.forget, flaky(None)

        def forget(family, wanted, frontends):
            refuse_once()
            return taking_notes(family, wanted, frontends)

        notes.forget = forget
        cleaner = FlowCleaner(ProxyMetrics(), [V4], dict, notes)
        cleaner.changed([change(meaning(A), meaning(B))], full=False)
        return await looked_for(cleaner, notes.calls, until=lambda: notes.calls)

    assert asyncio.run(scene()) == [[A]]


def test_addresses_that_cannot_be_read_end_nothing(again):
    async def scene():
        notes = Notes()
        cleaner = FlowCleaner(ProxyMetrics(), [V4], flaky({V4: [NODE]}), notes)
        cleaner.world(Globals("node-a", ipv4=FamilyGlobals(nodeport_ips=None), ipv6=None))
        cleaner.changed([change(meaning(A, nodeport=30053), meaning(B, nodeport=30053))], full=False)
        return await looked_for(cleaner, notes.calls, until=lambda: notes.calls)

    assert asyncio.run(scene()) == [[A, A]]


def test_a_family_gets_reports_of_its_own_syncs_only():
    cleaner = FlowCleaner(ProxyMetrics(), [V4, V6], dict, Notes())
    six = meaning(A, family=V6, vip=bytes(16))
    cleaner.changed([change(meaning(A), NOTHING), change(six, NOTHING, "six")], full=False, families=[V4])
    assert cleaner.due(V4, 0.0).keys() == {FRONT}
    assert cleaner.due(V6, 0.0) == {}


def test_after_a_repair_untranslated_flows_are_searched_although_nothing_changed(cleaner):
    cleaner.changed([change(meaning(A), meaning(A))], full=True, families=[V4])
    assert cleaner.due(V4, 0.0) == {FRONT: Suspects(frozenset({A}), None)}


def test_flows_that_the_kernel_never_removes_are_stored_within_limits(monkeypatch):
    monkeypatch.setattr(flows, "MOST_REMEMBERED", 3)
    monkeypatch.setattr(flows, "MOST_LOST", 2)
    many = {Key(VIP, port): Suspects(frozenset({C}), frozenset({A})) for port in range(4)}
    last = Key(VIP, 3)
    assert list(remembered(many, {})) == list(remembered({}, many)) == [Key(VIP, 1), Key(VIP, 2), last]
    assert remembered(many, {last: Suspects(frozenset(), frozenset({B}))})[last] == Suspects(frozenset(), {A, B})
    more = {last: Suspects(frozenset(), frozenset({B, C}))}
    assert remembered(many, more)[last] == Suspects(frozenset(), None)


def test_a_family_that_is_committed_while_another_is_cleaned_does_not_wait(monkeypatch):
    """At a start the kernel gets the IPv6 rules after those of IPv4: until then stale flows lead nowhere."""
    order = []
    real = asyncio.sleep

    async def noted(delay, result=None):
        order.append("pause")
        return await real(0.01, result)

    async def scene():
        cleaner = FlowCleaner(ProxyMetrics(), [V6, V4], dict, Notes())  # the turn of V6 is over then
        loop = asyncio.get_running_loop()

        def clean(family, wanted, addresses):
            order.append(family)
            if family is V4:
                loop.call_soon_threadsafe(cleaner.changed, [change(meaning(A, **six), NOTHING)])
            return 0

        six = {"family": V6, "vip": bytes(16)}
        cleaner.changed = partial(cleaner.changed, full=True)
        monkeypatch.setattr(cleaner, "_remove", clean)
        cleaner.changed([change(meaning(A), NOTHING)])
        task = asyncio.create_task(cleaner.run())
        async with asyncio.timeout(15):
            while V6 not in order:
                await real(0.001)
        task.cancel()

    monkeypatch.setattr(asyncio, "sleep", noted)
    asyncio.run(scene())
    assert order[: order.index(V6)] == [V4]


@pytest.fixture
def undisturbed_soon(monkeypatch):
    monkeypatch.setattr(flows, "ANSWER_TIME", 0.01)
    monkeypatch.setattr(flows, "DISTURBED_PAUSE", 0.01)
    monkeypatch.setattr(flows, "SECOND_LOOK", 0.01)


def test_flows_wait_while_another_program_has_changed_the_kernel(undisturbed_soon):
    """Another kube-proxy may have written newer plans, by which these flows are correct."""

    async def scene():
        notes, answers, asked = Notes(), [True] * 5, []

        def disturbed():
            asked.append(list(notes.calls))
            return answers.pop() if answers else False

        cleaner = FlowCleaner(ProxyMetrics(), [V4], dict, notes, disturbed={V4: disturbed})
        cleaner.changed([change(meaning(A), meaning(B))], full=False)
        await looked_for(cleaner, notes.calls, until=lambda: len(notes.calls) == 2)
        return notes.calls, asked

    calls, asked = asyncio.run(scene())
    assert calls == [[A], [A]]
    assert asked[:6] == [[]] * 6


def test_flows_wait_after_a_refusal_for_the_next_commit(undisturbed_soon):
    async def scene():
        notes = Notes()
        cleaner = FlowCleaner(ProxyMetrics(), [V4], dict, notes)
        cleaner.changed([change(meaning(A), meaning(B))], full=False)
        cleaner.hold(V4)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await cleaner.run()
        before = list(notes.calls)
        cleaner.changed([change(meaning(B), meaning(B))], full=True)
        return before, await looked_for(cleaner, notes.calls, until=lambda: notes.calls)

    before, after = asyncio.run(scene())
    assert before == []
    assert after[0] == ({TARGET: Suspects(frozenset({B}), None)}, {})


def test_flows_wait_when_a_full_sync_begins_while_they_are_read(undisturbed_soon):
    async def scene():
        notes = Notes(forgets=False)

        def clean(*arguments):
            certain = arguments[4]
            if not notes.calls:
                cleaner.hold(V4)
            notes.calls.append(certain())
            return 1 if certain() else None

        notes.clean = clean
        cleaner = FlowCleaner(ProxyMetrics(), [V4], dict, notes)
        cleaner.changed([change(meaning(A), meaning(B))], full=False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await cleaner.run()
        held = len(notes.calls)
        cleaner.changed([change(meaning(B), meaning(B))], full=True)
        return held, await looked_for(cleaner, notes.calls, until=lambda: len(notes.calls) > 1)

    held, calls = asyncio.run(scene())
    assert held == 1
    assert calls == [False, True]


def test_flows_to_endpoints_of_a_running_commit_remain(cleaner):
    """The kernel has the endpoint before the proxy reports it."""
    cleaner.changed([change(meaning(A), meaning(B))], full=False)
    cleaner.committing(V4, [change(meaning(B), meaning(A, C))])
    assert cleaner.due(V4, 0.0) == {FRONT: Suspects(frozenset({A, B, C}), frozenset({A}))}
    cleaner.changed([change(meaning(B), meaning(A, C))], full=False)
    cleaner.committing(V4, [change(meaning(A, C), meaning(B))])
    assert cleaner.due(V4, SECOND_LOOK) == {FRONT: Suspects(frozenset({A, B, C}), frozenset({A, B}))}


def test_one_family_does_not_wait_for_the_other(undisturbed_soon):
    async def scene():
        cleaner = FlowCleaner(ProxyMetrics(), [V4, V6], dict, notes := Notes())
        six = meaning(A, family=V6, vip=bytes(16))
        cleaner.changed([change(meaning(A), NOTHING), change(six, NOTHING, "six")], full=True)
        cleaner.hold(V4)
        return await looked_for(cleaner, notes.calls, until=lambda: notes.calls)

    ((services, nodeports),) = asyncio.run(scene())[:1]
    assert (len(services), nodeports) == (1, {})
    assert TARGET not in services


@pytest.mark.parametrize(
    ("before", "after", "full", "waits"),
    [
        (meaning(A), meaning(B), False, True),
        (meaning(A), NOTHING, False, True),
        (NOTHING, meaning(A), False, False),  # flows without translation reach no endpoint
        (meaning(A), meaning(B), True, False),
    ],
)
def test_a_removed_endpoint_may_answer_pending_requests(monkeypatch, before, after, full, waits):
    order, real = [], asyncio.sleep

    async def noted(delay, result=None):
        order.append(delay)
        return await real(0, result)

    async def scene():
        cleaner = FlowCleaner(ProxyMetrics(), [V4], dict, notes := Notes())
        cleaner.changed([change(before, after)], full=full)
        task = asyncio.create_task(cleaner.run())
        async with asyncio.timeout(15):
            while not notes.calls:
                await real(0.001)
        task.cancel()

    monkeypatch.setattr(asyncio, "sleep", noted)
    asyncio.run(scene())
    assert (order[:1] == [flows.ANSWER_TIME]) is waits


# -- ranges of ports -----------------------------------------------------------------------------------------------


def ranging(endpoints, first=10000, last=20000):
    """Return a Service whose only UDP frontend is a range; its first port is TCP."""
    key = VIP + bytes([UDP]) + first.to_bytes(2, "big")
    plan = meaning(*endpoints).plans[0]
    plan = structs.replace(
        plan,
        key=plan.key._replace(protocol=TCP),
        frontends=(frontend(FrontendKind.CLUSTER, VIP, 80, TCP),),
        port_ranges=(PortRange(FrontendKind.CLUSTER, key, last),),
    )
    return Compiled((plan,))


def test_a_flow_to_a_range_is_stale_once_its_endpoint_is_gone_whatever_its_port():
    change = Change(("default", "web"), ranging([A, B]), ranging([A]))
    looks = suspects([change], V4, certain=True)
    (key,) = looks
    assert (key, len(key.ports)) == (Key(VIP, 10000, 20000), 10001)
    assert looks[key].lost == {B[:-2]}
    assert [A[:-2] + port in looks[key].serving for port in (b"\x27\x10", b"\x4e\x20")] == [True, True]
    assert B[:-2] + b"\x27\x10" not in looks[key].serving
    assert B in looks[key].serving | {B[:-2]}
    assert translations(looks, ()) is None, "too many to be deleted one by one"
    assert change.after.has(UDP)
    assert suspects([Change(("default", "web"), ranging([A]), ranging([A]))], V4, certain=True)[key].lost == set()


MOVES = {
    "to another range": ([(ranging([A]), ranging([A], 15000, 25000), "web")], {10000: False, 15000: True, 20000: True}),
    "to another Service": (
        [(ranging([A]), NOTHING, "old"), (NOTHING, ranging([A], 15000, 25000), "new")],
        {14999: False, 15000: True, 20000: True},
    ),
    "away": ([(ranging([A]), NOTHING, "web")], {10000: False, 20000: False}),
    "to a port": ([(ranging([A], 50, 5000), meaning(A), "web")], {50: False, 53: True, 5000: False}),
    "from a port": ([(meaning(A), ranging([A], 53, 60), "web")], {53: True}),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("pending", [False, True], ids=["first search", "second search of an earlier change"])
def test_flows_stay_to_the_ports_that_a_former_and_a_new_range_have_in_common(move, pending):
    notes = Notes()
    cleaner = FlowCleaner(ProxyMetrics(), [V4], lambda: {V4: ()}, notes)
    changes, kept = MOVES[move]
    if pending:
        before, _, name = changes[0]
        more = structs.replace(before.plans[0], serving=(A, B))
        cleaner.changed([change(Compiled((more,)), before, name)], full=False)
        cleaner.due(V4, 0.0)
    cleaner.changed([change(*each) for each in changes], full=False)
    if pending:
        cleaner._first[V4].clear()
    cleaner._remove(V4, cleaner.due(V4, SECOND_LOOK), ())
    ((services, _),) = notes.calls
    for port, stays in kept.items():
        endpoint = A if (move, port) == ("to a port", 53) else A[:-2] + port.to_bytes(2)
        assert (endpoint in services[target_of(VIP, UDP, port)]) is stays, port
