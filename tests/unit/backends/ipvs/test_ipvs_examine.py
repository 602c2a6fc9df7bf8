"""An examination of ipvs mode reports differing virtual servers, real servers, addresses, sets and rules."""

from __future__ import annotations

import pytest

from kubeproxy.backends.ipvs.examine import IpvsExaminer
from kubeproxy.backends.ipvs.layout import IpsetId, scheduler_named
from kubeproxy.backends.state import Kind
from kubeproxy.errors import Unsupported
from kubeproxy.kernel.ipset import SetEntry
from kubeproxy.model.addresses import pack
from unit.backends.ipvs.test_ipvs_backend import NAME, SERVER, A, B, C, at, plans, run, started, v4_world

WORLD = v4_world()
ADDRESS = pack("10.96.0.1")


def set_up(pods=(A, B), **spec):
    backend, kernel = started(WORLD)
    wanted = {NAME: plans(list(pods), WORLD, **spec)}
    run(backend.resync(wanted))
    return backend, kernel, wanted


def examiner(kernel) -> IpvsExaminer:
    return IpvsExaminer(kernel, WORLD, scheduler_named("rr"), ())


def shown(kernel, wanted):
    """Return the differences; both kinds of examination must report the same ones for one Service."""
    everything, some = list(examiner(kernel).everything(wanted)), list(examiner(kernel).some(wanted))
    assert [finding for finding in everything if finding.service == NAME] == some
    return everything


def test_a_correct_state_shows_no_difference():
    spec = {"ports": ((80, 30080),), "ingress": ["198.51.100.1"], "load_balancer_source_ranges": ["172.16.0.0/24"]}
    _, kernel, wanted = set_up(**spec)
    assert shown(kernel, wanted) == []


@pytest.mark.parametrize("protocol", ["TCP", "UDP"])
def test_a_real_server_that_drains_is_as_it_should_be(protocol):
    backend, kernel, _ = set_up((A, B), protocol=protocol)
    fewer = {NAME: plans([A], WORLD, protocol=protocol)}
    run(backend.sync(list(fewer.items())))
    ((_, reals),) = kernel.virtual.values()
    assert reals == {at(A): 1, at(B): 0}
    assert shown(kernel, fewer) == []


def test_real_servers():
    _, kernel, wanted = set_up()
    servers = kernel.virtual[SERVER][1]
    del servers[at(A)]
    servers[at(B)], servers[at(C)] = 0, 1
    assert [(one.kind, one.what, one.present) for one in shown(kernel, wanted)] == [
        (Kind.MISSING, f"endpoint {A}:8080", ""),
        (Kind.DIFFERENT, f"endpoint {B}:8080", "weight 0"),
        (Kind.EXTRA, f"endpoint {C}:8080", "weight 1"),
    ]


def test_virtual_servers_addresses_and_sets():
    _, kernel, wanted = set_up()
    del kernel.virtual[SERVER]
    kernel.bound.discard(ADDRESS)
    kernel.sets[IpsetId.CLUSTER_IP].clear()
    kinds = [(one.kind, one.what, one.where) for one in shown(kernel, wanted)]
    assert (Kind.MISSING, "10.96.0.1:80/tcp", "virtual servers") in kinds
    assert (Kind.MISSING, "address 10.96.0.1", "interface kube-ipvs0") in kinds
    assert (Kind.MISSING, "10.96.0.1:80/tcp", "ipset KUBE-CLUSTER-IP") in kinds


def test_an_entry_that_drops_a_service():
    _, kernel, wanted = set_up()
    kernel.sets[IpsetId.DROP].add(SetEntry(ADDRESS, 6, 80))
    (finding,) = shown(kernel, wanted)
    assert (finding.service, finding.kind, finding.where) == (NAME, Kind.EXTRA, "ipset KUBE-DROP")
    assert finding.present == "dropped, as no endpoint is on this node"


def test_objects_without_a_service():
    _, kernel, wanted = set_up()
    kernel.virtual[pack("10.96.0.9") + SERVER[-3:]] = [0, {}]
    kernel.bound.add(pack("10.96.0.8"))
    found = shown(kernel, wanted)
    assert {(one.service, one.kind) for one in found} == {(None, Kind.EXTRA)}
    assert [one.what for one in found] == ["10.96.0.9:80/tcp", "address 10.96.0.8"]


def test_rules():
    _, kernel, wanted = set_up()
    kernel.tables["nat"]["KUBE-POSTROUTING"] = kernel.tables["nat"]["KUBE-POSTROUTING"][:-1]
    kernel.tables["filter"]["KUBE-FORWARD"] = ()
    forward, masquerade = shown(kernel, wanted)
    assert (forward.service, forward.kind, forward.what) == (None, Kind.MISSING, "the rules of chain KUBE-FORWARD")
    assert (masquerade.kind, masquerade.what) == (Kind.DIFFERENT, "the rules of chain KUBE-POSTROUTING")
    assert masquerade.wanted == "-A KUBE-POSTROUTING -j MASQUERADE --random-fully"


def test_rules_that_cannot_be_printed_are_reported():
    def refuse(_):
        raise Unsupported("no rights")

    _, kernel, wanted = set_up()
    kernel.printed = refuse
    made = examiner(kernel)
    assert list(made.everything(wanted)) == []
    assert made.caveats == ["the IPv4 rules of iptables were not compared: no rights"]
