"""The lab's links carry packets as soon as they exist: no client waits for a lost neighbour solicitation."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import carrier, topology
from lab.carrier import can_be_found, wait_for_links
from lab.iproute import LinkError, ip_batch
from lab.netns import run_in
from lab.topology import ETH0_INDEX, NODE_A, NODE_B, NodeNet, Topology

SIOCGIFFLAGS, IFF_RUNNING = 0x8913, 0x40


@pytest.fixture
def cluster() -> Iterator[Topology]:
    made = Topology(f"links{os.getpid()}")
    try:
        made.up()
        yield made
    finally:
        made.down()


@pytest.fixture
def late(cluster: Topology, monkeypatch: pytest.MonkeyPatch) -> Topology:
    """A topology whose pods' links have the same index at both ends: the kernel reports their carrier late."""

    def veth_line(namespace: str, peer: str, peer_namespace: str) -> str:
        index = ETH0_INDEX + 1
        ours, theirs = f"eth0 index {index} netns {namespace}", f"{peer} index {index} netns {peer_namespace}"
        return f"link add {ours} type veth peer name {theirs}"

    monkeypatch.setattr(topology, "_veth_line", veth_line)
    return cluster


def carries(namespace: str, link: str) -> bool:
    """Return whether the kernel uses a link; unlike a netlink request, this file does not make the kernel do so."""

    def flags() -> int:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
            answer = fcntl.ioctl(opened, SIOCGIFFLAGS, struct.pack("16sh14x", link.encode(), 0))
        return int(struct.unpack_from("16sH", answer)[1])

    return bool(run_in(namespace, flags) & IFF_RUNNING)


@pytest.mark.parametrize("node", [NODE_A, NODE_B])
def test_links_of_a_new_pod_carry_packets(late: Topology, node: NodeNet) -> None:
    pod = late.plan_pod(node)
    late.add_pods([pod])
    assert carries(pod.namespace, "eth0")
    assert [link for link in (pod.link, "cbr0") if not carries(late.node(node), link)] == []


def test_links_of_nodes_carry_packets(cluster: Topology) -> None:
    assert [link for link in ("lan", NODE_A.name, NODE_B.name) if not carries(cluster.outside, link)] == []
    assert [node.name for node in (NODE_A, NODE_B) if not carries(cluster.node(node), "eth0")] == []
    assert carries(cluster.client, "eth0")


def test_a_link_without_a_carrier_is_named(cluster: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrier, "TIMEOUT", 0.0)
    ip_batch(["link add lonely type veth peer name down", "link set lonely up"], cluster.outside)
    with pytest.raises(LinkError, match=f"lonely in {cluster.outside} carries no packets after 0 s"):
        wait_for_links(cluster.outside, ["lonely"])


@pytest.mark.parametrize(("group", "found"), [("1ff00000a", True), ("1ff00000b", False)])
def test_an_ipv6_address_is_found_by_its_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, group: str, found: bool
) -> None:
    """The files are those of Linux 6.18."""
    monkeypatch.setattr(carrier, "NET", tmp_path)
    (tmp_path / "if_inet6").write_text("fd00024400000000000000000000000a 186a0 40 00 82     eth0\n")
    (tmp_path / "igmp6").write_text(f"100000 eth0            ff02000000000000000000{group:0>10}     1 00000004 0\n")
    assert can_be_found("eth0") is found
