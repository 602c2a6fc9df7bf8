"""ipvs mode on nodes that never ran it, or on which it was killed."""

from __future__ import annotations

import errno

import pytest

from kubeproxy.backends.ipvs import cleanup
from kubeproxy.backends.ipvs.layout import MAX_ELEMENTS, IpsetId, kind_of
from kubeproxy.backends.ipvs.wire import NodeKernel
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.ipset import IpsetError, Ipsets, SetCounts, SetEntry
from kubeproxy.kernel.xtables import xtables
from kubeproxy.kernel.xtables.xtables import Commands
from kubeproxy.model.addresses import Family
from kubeproxy.registry import CounterMetric


def refuse(code):
    def read(self):
        raise IpsetError(code, "cannot read the ip sets")

    return read


def test_a_kernel_without_ip_sets_has_none_to_remove(monkeypatch):
    monkeypatch.setattr(Ipsets, "counts", refuse(errno.EINVAL))
    monkeypatch.setattr(xtables, "installed", list)
    assert cleanup.cleanup() == []


def test_unreadable_sets_are_reported(monkeypatch):
    monkeypatch.setattr(Ipsets, "counts", refuse(errno.EPERM))
    monkeypatch.setattr(xtables, "installed", list)
    assert cleanup.cleanup() == ["cannot read the ip sets: Operation not permitted"]


class Sets:
    """Return sets by name: their entries and their maximum size."""

    def __init__(self, **there):
        self.there = there

    def create(self, name, kind, *, maxelem):
        if name in self.there:
            raise IpsetError(4103, f"cannot create ip set {name}")
        self.there[name] = (set(), maxelem)

    def destroy(self, name):
        self.there.pop(name, None)

    def entries(self, name):
        return self.there[name][0]

    def add(self, name, entries):
        self.there[name][0].update(entries)

    def swap(self, one, other):
        self.there[one], self.there[other] = self.there[other], self.there[one]


@pytest.mark.parametrize("left", [{}, {"KUBE-SPARE": (set(), 5)}], ids=["first", "after a kill"])
def test_a_small_set_gets_room(left):
    name, entries = "KUBE-CLUSTER-IP", {SetEntry(b"\x0a\x60\0\x01", 6, 80)}
    sets = Sets(**{name: (set(entries), 65536)}, **left)
    kernel = NodeKernel(
        Commands("iptables", Family.IPV4, uses_nft=False, version=(1, 8, 9)),
        None,
        sets,
        None,
        CounterMetric(),
    )
    try:
        kernel._prepare_set(name, IpsetId.CLUSTER_IP, SetCounts(1, 65536, 2, kind_of(IpsetId.CLUSTER_IP, Family.IPV4)))
    except ApplyError as error:
        pytest.fail(str(error))
    assert sets.there == {name: (entries, MAX_ELEMENTS)}
