"""Properties of the node at the start: its families, and whether the configuration's networks fit them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kubeproxy.config.durations import Duration
from kubeproxy.config.fields import ConntrackSettings
from kubeproxy.config.load import load_text
from kubeproxy.errors import ConfigError, Unsupported
from kubeproxy.model.addresses import Family, family_of, pack
from kubeproxy.model.objects import Node, NodeAddress, NodeSpec, NodeStatus, ObjectMeta
from kubeproxy.model.world import Settings
from kubeproxy.setup import host

V4, V6 = Family.IPV4, Family.IPV6
HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"


@pytest.mark.parametrize(
    ("override", "name"), [("", "host-1.example"), (" Node-1 ", "node-1"), ("node-1.Example", "node-1.example")]
)
def test_the_name(override, name, monkeypatch):
    monkeypatch.setattr(host.socket, "gethostname", lambda: " Host-1.Example\n")
    assert host.node_name(override) == name


def test_a_host_without_a_name(monkeypatch):
    monkeypatch.setattr(host.socket, "gethostname", lambda: "")
    with pytest.raises(ConfigError, match="hostnameOverride: the host has no name"):
        host.node_name("")


@pytest.fixture
def proc(tmp_path):
    (tmp_path / "net").mkdir()
    (tmp_path / "sys/net/ipv6/conf/all").mkdir(parents=True)
    return tmp_path


def test_families(proc):
    assert host.families(None, proc) == host.families(V4, proc) == (V4,)
    with pytest.raises(Unsupported, match="IPv6 is off in this kernel"):
        host.families(V6, proc)
    (proc / "net/if_inet6").touch()
    assert host.families(V6, proc) == (V4, V6)
    disabled = proc / "sys/net/ipv6/conf/all/disable_ipv6"
    disabled.write_text("0\n")
    assert host.families(V4, proc) == (V4, V6)
    disabled.write_text("1\n")
    assert host.families(V4, proc) == (V4,)


@pytest.mark.parametrize(
    ("found", "bind", "missing", "able"),
    [
        ((V4, V6), "", (), (V4, V6)),
        ((V4, V6), "", (V6,), (V4,)),
        ((V4, V6), "fd00::1", (V4,), (V6,)),
        ((V4,), "", (), (V4,)),
        ((V4, V6), "", (V4,), (V6,)),
        ((V4, V6), "192.0.2.1", (V4,), None),
        ((V4, V6), "", (V4, V6), None),
        ((V4, V6), "fd00::1", (V6,), None),
        ((V4,), "", (V4,), None),
    ],
)
def test_a_node_may_do_without_one_family_unless_its_address_is_of_it(found, bind, missing, able, monkeypatch):
    """On a kernel without a nat table for ip6tables the Go kube-proxy serves only IPv4.

    The family of the Node's first address is not known yet.
    """
    monkeypatch.setattr(host, "_CHECKED_AGAIN", (0.0,))

    def check(families):
        for family in families:
            if family in missing:
                raise Unsupported(f"no {family.label}")

    primary = family_of(pack(bind)) if bind else None
    if able is None:
        with pytest.raises(Unsupported, match=f"no {missing[0].label}"):
            host.supported(found, primary, check)
        return
    got = host.supported(found, primary, check)
    assert (got.families, got.lack) == (able, "" if able == found else f"no {missing[0].label}")
    if got.lack:
        assert got.words == f"Services are served by {able[0].label} alone: no {missing[0].label}"


def test_settings_of_a_configuration(monkeypatch):
    monkeypatch.setattr(host, "families", lambda primary: (primary,))
    found = host.settings(load_text(HEAD + "hostnameOverride: n\nbindAddress: fd00::1\nclusterCIDR: fd00:1::/64\n"))
    assert (found.node_name, found.families, found.bind_address) == ("n", (V6,), pack("fd00::1"))
    assert host.settings(load_text(HEAD)).bind_address == b""


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_an_unspecified_bind_address_asks_for_no_family(address, monkeypatch):
    """The Node's first address decides: `bindAddress: "::"` is common, even in clusters whose kernels have no IPv6."""
    monkeypatch.setattr(host, "families", lambda primary: (V4,) if primary is None else ())
    assert host.settings(load_text(HEAD + f"hostnameOverride: n\nbindAddress: '{address}'")).families == (V4,)


def test_cluster_cidrs_of_the_wrong_family():
    with pytest.raises(ConfigError, match=r"clusterCIDR: fd00::/8 has no IPv4 network, but this node has IPv4 only"):
        host.check_families(Settings("n", (V4,), cluster_cidrs=("fd00::/8",)))
    host.check_families(Settings("n", (V4,), "NodeCIDR", cluster_cidrs=("fd00::/8",)))  # the address has no effect then


def node(addresses, *cidrs):
    listed = [NodeAddress(*address.split()) for address in addresses]
    return Node(ObjectMeta(name="n"), NodeSpec(pod_cidrs=list(cidrs)), NodeStatus(listed))


ADDRESSES = ["Hostname n", "ExternalIP fd00::1", "InternalIP 10.0.0.1"]


@pytest.mark.parametrize(
    ("node", "bind", "fits"),
    [
        (node(ADDRESSES, "10.1.0.0/24"), b"", True),
        (node(ADDRESSES, "fd00:1::/64", "10.1.0.0/24"), b"", True),
        (node(ADDRESSES, "fd00:1::/64"), b"", False),
        (node(ADDRESSES, "fd00:1::/64"), pack("fd00::1"), True),
        (node(ADDRESSES[:2], "fd00:1::/64"), b"", True),
        (node([], "10.1.0.0/24"), b"", True),
        (node(ADDRESSES, "::ffff:10.1.0.0/120"), b"", True),
        (node(ADDRESSES, "no network", "10.1.0.0/024"), b"", True),
        (node(ADDRESSES), b"", True),
        (None, b"", True),
    ],
)
def test_pod_networks_of_the_node(node, bind, fits):
    for mode in ("NodeCIDR", "ClusterCIDR"):
        settings = Settings("n", (V4, V6), mode, bind_address=bind)
        if fits or mode == "ClusterCIDR":
            host.check_pod_cidrs(settings, node)
        else:
            with pytest.raises(ConfigError, match="podCIDRs fd00:1::/64 of Node n are not IPv4"):
                host.check_pod_cidrs(settings, node)


def test_a_family_that_lacks_something_for_a_moment_is_served(monkeypatch):
    """Otherwise the check would not happen again until the next start."""
    monkeypatch.setattr(host, "_CHECKED_AGAIN", (0.0, 0.0))
    errors = [Unsupported("no buffer space"), Unsupported("no buffer space")]

    def check(families):
        if errors:
            raise errors.pop()

    assert host.supported((V4, V6), None, check) == ((V4, V6), "")


def test_the_place_in_an_oom(caplog):
    """This must not prevent a start: in a container the score can often not be lowered."""
    now = int(Path("/proc/self/oom_score_adj").read_text(encoding="ascii"))
    untouched = ConntrackSettings(
        max_per_core=0, tcp_established_timeout=Duration(0), tcp_close_wait_timeout=Duration(0)
    )
    host.tune(untouched, now)
    assert not caplog.records
    host.tune(untouched, -1001)
    assert [record.getMessage() for record in caplog.records] == [
        "Cannot set oom_score_adj=-1001 error='Invalid argument'"
    ]
