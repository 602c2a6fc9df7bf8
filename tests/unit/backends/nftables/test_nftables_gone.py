"""The set of deleted endpoints: additions, removals before a new endpoint is reachable, and restarts."""

from __future__ import annotations

from functools import partial

import pytest

from kubeproxy.backends.nftables import gone
from kubeproxy.backends.nftables.gone import GONE, MOST, GoneEndpoints
from kubeproxy.backends.nftables.layout import service_key
from kubeproxy.features import RESETS
from kubeproxy.kernel.nftables.elements import Element
from kubeproxy.model.addresses import PORT_BYTES, pack
from kubeproxy.model.gone import Departed
from support.nftables_ground import resync, sync
from support.nftables_plans import V4, V6, WORLD, cluster

RESETTING = RESETS.on(WORLD, True)
PLANS = cluster("a")


def key(number, port=80, protocol=6):
    return pack(f"10.244.9.{number}") + bytes((protocol,)) + PORT_BYTES[port]


def departed(*keys, taken=()):
    return Departed(keys, frozenset(pack(f"10.244.9.{number}") for number in taken))


def nobody(_):
    return False


def listed(ground):
    return ground.elements(GONE)


def test_without_the_flag_there_is_no_such_set(ground):
    backend = ground.start()
    resync(backend, PLANS)
    assert not backend.depart(departed(key(1)), nobody)
    assert GONE not in ground.contents()
    assert not [rule for rules in ground.chains().values() for rule in rules if "dnat" in rule and "reply" in rule]


def test_deleted_endpoints_are_added_and_removed_when_the_address_is_used(ground):
    backend = ground.start(RESETTING)
    resync(backend, PLANS)
    assert backend.depart(departed(key(1), key(2), key(2, 53, 17)), nobody)
    sync(backend)
    assert listed(ground) == {"10.244.9.1 . tcp . 80", "10.244.9.2 . tcp . 80", "10.244.9.2 . udp . 53"}
    assert not ground.is_touched(backend)
    assert backend.depart(departed(taken=(2, 7)), nobody)
    sync(backend)
    assert listed(ground) == {"10.244.9.1 . tcp . 80"}
    assert not backend.depart(departed(taken=(2, 7)), nobody)


def test_an_address_leaves_before_anything_leads_there(ground):
    backend = ground.start(RESETTING)
    resync(backend, PLANS)
    backend.depart(departed(key(1)), nobody)
    sync(backend)
    seen = []
    ground.before_commit = lambda: seen.append((listed(ground), ground.count("endpoints")))
    backend.depart(departed(taken=(1,)), nobody)
    sync(backend, *cluster("a", endpoints=5).items())
    before = ground.count("endpoints")
    assert seen == [({"10.244.9.1 . tcp . 80"}, 3), (set(), 3)]
    assert before == 5


def test_elements_that_the_kernel_has_expired_can_be_removed_too(ground):
    backend = ground.start(RESETTING)
    resync(backend, PLANS)
    backend.depart(departed(key(1)), nobody)
    sync(backend)
    ground.disturb(f"delete element ip kube-proxy {GONE} {{ 10.244.9.1 . tcp . 80 }}")
    backend.depart(departed(taken=(1,)), nobody)
    sync(backend)
    assert not listed(ground)


def test_a_restart_keeps_the_set_except_endpoints_in_use(ground):
    backend = ground.start(RESETTING)
    resync(backend, PLANS)
    backend.depart(departed(key(1), key(2), key(3)), nobody)
    sync(backend)
    again = ground.start(RESETTING)
    again.depart(departed(), lambda address: address == pack("10.244.9.2"))
    resync(again, PLANS)
    assert listed(ground) == {"10.244.9.1 . tcp . 80", "10.244.9.3 . tcp . 80"}
    assert all(0 < element.expires <= gone.SECONDS * 1000 for element in ground.packed(GONE))
    again.depart(departed(taken=(3,)), nobody)
    sync(again)
    assert listed(ground) == {"10.244.9.1 . tcp . 80"}
    ground.is_clean(again, PLANS)


def test_a_table_that_was_lost_gets_them_again(ground):
    backend = ground.start(RESETTING)
    resync(backend, PLANS)
    backend.depart(departed(key(1)), nobody)
    sync(backend)
    ground.disturb("delete table ip kube-proxy")
    resync(backend, PLANS)
    assert listed(ground) == {"10.244.9.1 . tcp . 80"}


def test_another_family_has_others():
    endpoints = GoneEndpoints(V6)
    assert not endpoints.note(departed(key(1)), 0.0)


def written(write) -> list[bytes]:
    messages: list[bytes] = []
    write(messages.extend)
    return messages


def test_the_stored_endpoints_are_limited():
    endpoints = GoneEndpoints(V4)
    endpoints.note(departed(key(1)), 0.0)
    endpoints.reset(0.0, lambda _: None)
    assert not endpoints.note(departed(taken=(1,)), gone.SECONDS + 1.0), "the kernel has forgotten it"
    many = tuple(n.to_bytes(4, "big") + b"\x06\0\x50" for n in range(MOST + 10))
    endpoints.note(Departed(many[:-1]), 0.0)
    endpoints.reset(0.0, lambda _: None)
    endpoints.note(Departed(many[-1:]), 1.0)
    assert written(endpoints.spare)
    assert len(vars(endpoints)["_ports"]) == MOST


@pytest.mark.parametrize("in_use", [True, False])
def test_unwritten_endpoints_survive_a_full_sync(in_use):
    endpoints = GoneEndpoints(V4)
    endpoints.note(departed(key(1)), 0.0)
    endpoints.found([Element(service_key(key(2)), b"", 0, 5000)], lambda _: in_use, 1.0)
    assert bool(written(partial(endpoints.reset, 1.0))) is not in_use
    assert bool(written(endpoints.spare)) is in_use
