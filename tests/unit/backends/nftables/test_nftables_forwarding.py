"""Fast forwarding: the table's text, the interfaces of the flowtable, and kernels without flowtables."""

from __future__ import annotations

import logging
from socket import IPPROTO_TCP, IPPROTO_UDP

import pytest

from kubeproxy.backends.nftables import forwarding
from kubeproxy.backends.nftables.forwarding import Devices, within
from kubeproxy.backends.nftables.ruleset import Ruleset
from kubeproxy.errors import ApplyError
from kubeproxy.features import FAST_FORWARDING, Forwarding
from kubeproxy.kernel.nftables.messages import MOST_DEVICES
from kubeproxy.model.world import Settings
from support.nft_text import skeleton
from support.nftables_plans import V4, WORLD

BOTH = Forwarding(20, (IPPROTO_TCP, IPPROTO_UDP))


def test_the_flowtable_exists_only_if_enabled():
    assert "flow" not in skeleton(Ruleset(V4, WORLD))
    text = skeleton(Ruleset(V4, FAST_FORWARDING.on(WORLD, BOTH))).splitlines()
    assert "add flowtable ip kube-proxy fast { hook ingress priority filter ; }" in text
    (jump,) = [line for line in text if "jump fast-forward" in line]
    assert jump == "add rule ip kube-proxy filter-forward ct status dnat ct original packets >= 20 jump fast-forward"
    assert [
        line.split("fast-forward ")[1] for line in text if line.startswith("add rule ip kube-proxy fast-forward")
    ] == [
        "meta l4proto tcp flow add @fast",
        "meta l4proto udp flow add @fast",
    ]


class Node:
    """Interfaces that are added and removed, and a kernel that refuses messages that name a missing one."""

    def __init__(self, *names) -> None:
        self.there = dict(enumerate(names, 1))
        self.lists = 0
        self.news = False
        self.committed = []
        self.gone = set()

    def changed(self):
        news, self.news = self.news, False
        return news

    def close(self):
        pass

    def listed(self):
        self.lists += 1
        return dict(self.there)

    def commit(self, messages):
        (message,) = messages
        names = [name for name in self.there.values() if f"{name}\0".encode() in message]
        if self.gone & set(names):
            raise ApplyError("No such file or directory")
        self.committed.append(names)


@pytest.fixture
def node():
    return Node("eth0", "veth1", "veth2")


@pytest.fixture
def devices(node):
    return Devices(V4, node, node.listed)


def test_interfaces_are_listed_once_and_then_when_they_changed(node, devices):
    for _ in range(3):
        devices.upkeep(node.commit)
    assert (node.committed, node.lists) == ([["eth0", "veth1", "veth2"]], 1)
    node.there[7] = "veth7"
    node.news = True
    devices.upkeep(node.commit)
    devices.upkeep(node.commit)
    assert (node.committed[1:], node.lists) == ([["veth7"]], 2)


def test_a_name_that_comes_back_is_another_interface(node, devices):
    devices.upkeep(node.commit)
    del node.there[2]
    node.there[9] = "veth1"
    node.news = True
    devices.upkeep(node.commit)
    assert node.committed[1:] == [["veth1"]]


def test_an_interface_deleted_in_the_meantime_excludes_no_other(node, devices):
    node.gone = {"veth1"}
    devices.upkeep(node.commit)
    assert node.committed == [["eth0"], ["veth2"]]
    node.gone = set()
    devices.upkeep(node.commit)
    assert node.committed[2:] == [["veth1"]]


def test_another_table_gets_them_all_again(node, devices):
    devices.upkeep(node.commit)
    devices.forget()
    devices.upkeep(node.commit)
    assert node.committed == [["eth0", "veth1", "veth2"]] * 2


def test_no_message_has_more_than_the_kernel_takes(devices):
    node = Node(*(f"veth{number:04}" for number in range(MOST_DEVICES + 5)))
    Devices(V4, node, node.listed).upkeep(node.commit)
    assert [len(names) for names in node.committed] == [MOST_DEVICES, 5]


@pytest.mark.parametrize(
    ("release", "refusal", "left", "said"),
    [
        ("6.12.1", None, BOTH, ""),
        ("6.4.0", None, BOTH, ""),
        ("6.1.0-56-amd64", None, Forwarding(20, (IPPROTO_TCP,)), "Only TCP is fast forwarded: before Linux 6.4"),
        ("6.12.1", ApplyError("No such file or directory"), Forwarding(), "this kernel has no flowtables"),
    ],
)
def test_features_that_the_kernel_lacks_are_logged_and_left_out(monkeypatch, caplog, release, refusal, left, said):
    def run():
        if refusal is not None:
            raise refusal

    monkeypatch.setattr(forwarding, "_probe", run)
    monkeypatch.setattr(forwarding.modules, "release", lambda: release)
    with caplog.at_level(logging.WARNING):
        found = within(FAST_FORWARDING.on(Settings("node", (V4,)), BOTH))
    assert FAST_FORWARDING.value(found) == left
    assert said in caplog.text
    assert bool(caplog.records) == bool(said)


def test_services_without_the_annotation_are_not_tracked(monkeypatch):
    monkeypatch.setattr(forwarding, "_probe", pytest.fail)
    settings = Settings("node", (V4,))
    assert within(settings) is settings
