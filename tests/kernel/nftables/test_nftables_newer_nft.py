"""Sets of a newer nft make older versions of nft crash; this program still reads and writes its own table."""

from __future__ import annotations

import pytest
from msgspec import structs

from support.cluster_objects import world
from support.newer_nft import FAMILIES, typed_set
from support.nftables_ground import resync, sync
from support.nftables_plans import V4, V6, plans_of, sticky

ONE = (bytes([10, 96, 0, 0]), bytes([10, 96, 255, 255]))
TWO = (bytes([10, 98, 0, 0]), bytes([10, 98, 0, 3]))


@pytest.mark.parametrize("family", [V4, V6])
@pytest.mark.parametrize("theirs", FAMILIES)
def test_a_firewalls_sets_do_not_prevent_loading_our_table(ground, family, theirs):
    ground.disturb(f"add table {theirs} firewall")
    typed_set(theirs, "firewall", "marks")
    globals_ = world(families=[family])
    plans = {("default", "a"): plans_of("a", 1, globals_=globals_)}
    backend = ground.start(globals_)
    resync(backend, plans)
    more = {("default", "b"): sticky("b", 2, 2, globals_=globals_)}
    sync(backend, *more.items())
    ground.is_clean(backend, plans | more)
    again = ground.start(globals_)
    resync(again, plans | more)
    ground.is_clean(again, plans | more)


def test_service_cidrs_change_beside_them(ground):
    def with_cidrs(*cidrs):
        return structs.replace(base, ipv4=structs.replace(base.ipv4, service_cidrs=cidrs))

    ground.disturb("add table ip firewall")
    typed_set("ip", "firewall", "marks")
    base = world(families=[V4])
    backend = ground.start(base)
    resync(backend, {})
    for cidrs in ((ONE,), (ONE, TWO), (), (TWO,)):
        assert backend.set_world(with_cidrs(*cidrs)) is False
        sync(backend)
        assert ground.count("service-cidrs") == len(cidrs)
        ground.is_clean(backend, {})


def test_a_table_of_another_kube_proxy_with_such_sets_is_replaced(ground):
    ground.disturb(
        'add table ip kube-proxy { comment "rules for kube-proxy" ; }',
        "add chain ip kube-proxy services { type nat hook prerouting priority dstnat ; }",
    )
    typed_set("ip", "kube-proxy", "cluster-ips")
    globals_ = world(families=[V4])
    plans = {("default", "a"): plans_of("a", 3, globals_=globals_), ("default", "b"): sticky("b", 2, 2)}
    backend = ground.start(globals_)
    resync(backend, plans)
    ground.is_clean(backend, plans)
