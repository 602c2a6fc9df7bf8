"""A written configuration is equal after it is read again, and differences name the changed fields."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.config.durations import Duration
from kubeproxy.config.fields import ConntrackSettings, IPTables, Logging, NFTables, VModuleItem
from kubeproxy.config.load import load_text
from kubeproxy.config.types import (
    KubeProxyConfiguration,
    describe,
    differences,
    dump,
    in_effect,
    with_values,
    write_file,
)
from kubeproxy.errors import ConfigError

periods = st.integers(10**9, 10**15).map(Duration.from_nanoseconds)
texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=8)
configs = st.builds(
    KubeProxyConfiguration,
    feature_gates=st.dictionaries(st.sampled_from(["WatchList", "AllBeta"]), st.booleans()),
    hostname_override=texts,
    bind_address=st.sampled_from(["0.0.0.0", "::", "10.0.0.1"]),
    mode=st.sampled_from(["", "nftables", "iptables", "userspace"]),
    logging=st.builds(
        Logging,
        verbosity=st.integers(0, 20),
        vmodule=st.lists(st.builds(VModuleItem, file_pattern=st.just("a*"), verbosity=st.integers(0, 9))).map(tuple),
    ),
    iptables=st.builds(IPTables, masquerade_bit=st.integers(0, 31), min_sync_period=st.just(Duration(1))),
    nftables=st.builds(NFTables, masquerade_all=st.booleans(), sync_period=periods),
    conntrack=st.builds(ConntrackSettings, max_per_core=st.integers(0, 9), tcp_established_timeout=periods),
    config_sync_period=periods,
    udp_idle_timeout=periods,
    node_port_addresses=st.lists(st.sampled_from(["10.0.0.0/8", "fd00::/8"])).map(tuple),
    cluster_cidr=st.sampled_from(["", "10.0.0.0/8", "10.0.0.0/8,fd00::/8"]),
    show_hidden_metrics_for_version=st.sampled_from(["", "1.35"]),
)


@given(configs)
def test_a_written_configuration_is_read_unchanged(config):
    config = load_text(dump(config))  # like any running configuration, it was read from a file
    assert load_text(dump(config)) == config


def test_the_default_configuration_reads_back_without_a_notice(caplog):
    assert load_text(dump(KubeProxyConfiguration())) == KubeProxyConfiguration()
    assert not caplog.records


def test_describe_is_plain_values_under_kubernetes_names():
    described = describe(KubeProxyConfiguration())
    assert described["apiVersion"] == "kubeproxy.config.k8s.io/v1alpha1"
    assert described["kind"] == "KubeProxyConfiguration"
    assert described["conntrack"]["tcpEstablishedTimeout"] == "24h0m0s"
    assert described["ipvs"]["excludeCIDRs"] == []
    assert described["clientConnection"]["qps"] == 5.0
    assert "udpIdleTimeout" not in described
    assert yaml.safe_load(dump(KubeProxyConfiguration())) == described


def test_a_written_file_belongs_to_its_owner_alone_and_no_link_is_followed(tmp_path):
    out, other, link = tmp_path / "out.yaml", tmp_path / "other", tmp_path / "link"
    out.write_text("what was there")
    out.chmod(0o644)
    write_file(KubeProxyConfiguration(mode="ipvs"), out)
    assert out.stat().st_mode & 0o777 == 0o600
    other.write_text("mine")
    link.symlink_to(other)
    with pytest.raises(ConfigError, match=r"--write-config-to: .*/link is a symbolic link"):
        write_file(KubeProxyConfiguration(), link)
    assert other.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "other", "out.yaml"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ("nftables", "ClusterCIDR", ["primary"])),
        ("mode: iptables", ("iptables", "ClusterCIDR", [])),
        ("mode: ipvs\ndetectLocalMode: NodeCIDR", ("ipvs", "NodeCIDR", [])),
        ("nodePortAddresses: [10.0.0.0/8]", ("nftables", "ClusterCIDR", ["10.0.0.0/8"])),
        ("iptables: {masqueradeBit: 3, syncPeriod: 9s}", ("nftables", "ClusterCIDR", ["primary"])),
    ],
)
def test_a_written_file_has_the_meaning_of_empty_fields(tmp_path, text, shown):
    """As the Go kube-proxy, which has another default mode, writes and shows it."""
    config = load_text(f"apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n{text}\n")
    write_file(config, tmp_path / "out.yaml")
    written = yaml.safe_load((tmp_path / "out.yaml").read_text())
    assert (written["mode"], written["detectLocalMode"], written["nodePortAddresses"]) == shown
    again = load_text((tmp_path / "out.yaml").read_text())
    assert again == in_effect(config) == in_effect(again)
    assert (again.masquerades.masquerade_bit, again.syncs.sync_period) == (
        config.masquerades.masquerade_bit,
        config.syncs.sync_period,
    )


def test_write_file(tmp_path):
    write_file(KubeProxyConfiguration(mode="ipvs"), tmp_path / "out.yaml")
    assert load_text((tmp_path / "out.yaml").read_text()).mode == "ipvs"
    with pytest.raises(ConfigError, match=r"--write-config-to: cannot write .*: No such file or directory"):
        write_file(KubeProxyConfiguration(), tmp_path / "absent" / "out.yaml")


def test_differences():
    old = KubeProxyConfiguration()
    new = with_values(
        old,
        {
            "iptables.syncPeriod": Duration(60),
            "mode": "iptables",
            "nodePortAddresses": ("primary",),
            "featureGates": {"WatchList": True},
            "udpIdleTimeout": Duration(1),
        },
    )
    assert differences(old, old) == []
    assert differences(old, new) == [
        "featureGates.WatchList: unset -> true",
        'iptables.syncPeriod: "30s" -> "1m0s"',
        'mode: "" -> "iptables"',
        'nodePortAddresses: [] -> ["primary"]',
        'udpIdleTimeout: unset -> "1s"',
    ]
    assert differences(new, old)[0] == "featureGates.WatchList: true -> unset"
