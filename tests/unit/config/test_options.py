"""Precedence of flags and configuration file, and the command lines of real installers."""

import pytest

from kubeproxy.config.durations import Duration
from kubeproxy.config.load import load_file
from kubeproxy.config.options import Options, build_options
from kubeproxy.config.pflag import parse
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.errors import ConfigError

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"


def options_of(*arguments):
    return build_options(parse(arguments))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "config.conf"
    path.write_text(
        HEAD + "mode: ipvs\nhostnameOverride: from-file\nlogging: {verbosity: 1, vmodule: [{filePattern: a}]}\n"
    )
    return path


def test_the_file_replaces_flags(file):
    options = options_of(f"--config={file}", "--proxy-mode=iptables", "--cluster-cidr=nonsense", "--healthz-port=0")
    assert options.config == load_file(file)
    assert options.notices == (
        "Flag --healthz-port has been deprecated, use --healthz-bind-address instead.",
        "Ignored, because --config replaces them: --proxy-mode, --cluster-cidr, --healthz-port",
    )


def test_flags_that_apply_in_addition_to_the_file(file):
    options = options_of(
        f"--config={file}",
        "--hostname-override=From-Flag",
        "--v=4",
        "--vmodule=b=2",
        "--master=https://api:6443",
        "--cleanup",
        "--init-only",
        "--manifests=/m",
        "--write-config-to=/w",
    )
    config = options.config
    assert config.mode == "ipvs"
    assert config.hostname_override == "from-flag"
    assert config.logging.verbosity == 4
    assert [(item.file_pattern, item.verbosity) for item in config.logging.vmodule] == [("b", 2), ("a", 0)]
    assert options.config_file == str(file)
    assert (options.master, options.manifests, options.write_config_to) == ("https://api:6443", "/m", "/w")
    assert options.cleanup
    assert options.init_only
    assert options.notices == ()


def test_resolve_puts_flags_over_a_newly_read_file(file):
    options = options_of(f"--config={file}", "--hostname-override=x", "--v=4")
    assert options.resolve(load_file(file)) == options.config
    with pytest.raises(ConfigError, match=r"logging\.vmodule: only works with the text log format"):
        options_of(f"--config={file}", "--logging-format=json")


def test_mistakes_in_the_file_are_named_by_path(file):
    file.write_text(HEAD + "oomScoreAdj: 5000\n")
    with pytest.raises(ConfigError, match=r"config\.conf: oomScoreAdj: must be from"):
        options_of(f"--config={file}")


def test_mistakes_in_flags_are_named_by_flag_and_all_at_once():
    with pytest.raises(ConfigError) as caught:
        options_of("--oom-score-adj=5000", "--proxy-mode=x", "--nodeport-addresses=a,b")
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "--oom-score-adj",
        "--proxy-mode",
        "--nodeport-addresses",
        "--nodeport-addresses",
    ]


def test_the_notice_about_flags():
    notice = (
        "All flags other than --config, --write-config-to and --cleanup are deprecated; use a configuration file",
    )
    assert options_of("--v=2").notices == notice
    assert options_of("--cleanup").notices == ()
    assert options_of().notices == ()


def test_a_zero_by_flag_stays_zero():
    config = options_of("--proxy-mode=iptables", "--iptables-min-sync-period=0").config
    assert config.syncs.min_sync_period == 0
    with pytest.raises(ConfigError, match="--iptables-sync-period: must be greater than 0"):
        options_of("--iptables-sync-period=0")


def test_sync_flags_apply_to_their_mode():
    every = ("--iptables-sync-period=1m", "--iptables-min-sync-period=10s", "--ipvs-sync-period=2m")
    assert options_of(*every, "--proxy-mode=iptables").config.syncs.sync_period == 60
    assert options_of(*every, "--proxy-mode=nftables").config.syncs.sync_period == 60
    assert options_of(*every).config.syncs.min_sync_period == 10
    ipvs = options_of(*every, "--proxy-mode=ipvs").config
    assert (ipvs.syncs.sync_period, ipvs.syncs.min_sync_period) == (120, 1)
    assert ipvs.iptables.sync_period == 30
    assert options_of("--proxy-mode=nftables").config.syncs.min_sync_period == 0


def test_masquerade_flags_apply_to_the_active_mode():
    assert options_of("--masquerade-all").config.masquerades.masquerade_all
    assert options_of("--masquerade-all", "--proxy-mode=iptables").config.masquerades.masquerade_all
    assert options_of("--iptables-masquerade-bit=15").config.masquerades.masquerade_bit == 15
    assert options_of("--iptables-masquerade-bit=15", "--proxy-mode=nftables").config.masquerades.masquerade_bit == 14
    with pytest.raises(ConfigError, match=r"^--iptables-masquerade-bit: must be from 0 to 31, got 40$"):
        options_of("--iptables-masquerade-bit=40")


ADDRESSES = [
    ((), "0.0.0.0:10256", "127.0.0.1:10249"),
    (("--bind-address=::",), "0.0.0.0:10256", "127.0.0.1:10249"),
    (("--bind-address=",), "0.0.0.0:10256", "127.0.0.1:10249"),
    (("--bind-address=10.0.0.1",), "0.0.0.0:10256", "127.0.0.1:10249"),
    (("--healthz-port=0", "--metrics-port=0"), "", ""),
    (("--healthz-port=1", "--metrics-port=2"), "0.0.0.0:10256", "127.0.0.1:10249"),
    (("--healthz-bind-address=127.0.0.1", "--healthz-port=1"), "127.0.0.1:1", "127.0.0.1:10249"),
    (("--healthz-bind-address=127.0.0.1:5", "--healthz-port=1"), "127.0.0.1:5", "127.0.0.1:10249"),
    (("--metrics-bind-address=[::]:10249",), "0.0.0.0:10256", "[::]:10249"),
    (("--metrics-bind-address=::",), "0.0.0.0:10256", "[::]:10249"),
    (("--healthz-bind-address=", "--metrics-bind-address="), "", ""),
    (("--healthz-port=0", "--write-config-to=/w"), "0.0.0.0:10256", "127.0.0.1:10249"),
]


@pytest.mark.parametrize(("arguments", "healthz", "metrics"), ADDRESSES)
def test_server_addresses(arguments, healthz, metrics):
    config = options_of(*arguments).config
    assert (config.healthz_bind_address, config.metrics_bind_address) == (healthz, metrics)


INSTALLERS = {
    "kubeadm": ("--config={file}", "--hostname-override=node-1"),
    "EKS": ("--v=2", "--config={file}", "--hostname-override=node-1"),
    "the systemd unit of the seeds": ("--master=http://172.17.8.100:8080", "--v=4", "--proxy-mode=iptables"),
    "GKE": (
        "--master=https://10.0.0.2", "--kubeconfig=/var/lib/kube-proxy/kubeconfig", "--cluster-cidr=10.4.0.0/14",
        "--oom-score-adj=-998", "--v=2", "--iptables-sync-period=1m", "--iptables-min-sync-period=10s",
        "--ipvs-sync-period=1m", "--ipvs-min-sync-period=10s", "--detect-local-mode=NodeCIDR",
    ),
    "AKS": (
        "--conntrack-max-per-core=32768", "--metrics-bind-address=0.0.0.0:10249", "--kubeconfig=/k",
        "--cluster-cidr=10.244.0.0/16", "--detect-local-mode=ClusterCIDR", "--pod-interface-name-prefix=", "--v=3",
    ),
    "k3s": (
        "--cluster-cidr=10.42.0.0/16", "--conntrack-max-per-core=0", "--conntrack-tcp-timeout-close-wait=0s",
        "--conntrack-tcp-timeout-established=0s", "--healthz-bind-address=127.0.0.1", "--hostname-override=n",
        "--kubeconfig=/var/lib/rancher/k3s/agent/kubeproxy.kubeconfig", "--proxy-mode=iptables",
    ),
    "k3s on IPv6, told to log": (
        "--cluster-cidr=fd00:42::/56", "--conntrack-max-per-core=0", "--conntrack-tcp-timeout-close-wait=0s",
        "--conntrack-tcp-timeout-established=0s", "--healthz-bind-address=::1", "--hostname-override=n",
        "--kubeconfig=/var/lib/rancher/k3s/agent/kubeproxy.kubeconfig", "--proxy-mode=iptables", "--v=1",
        "--vmodule=proxier=4,servicechangetracker=5", "--log_file=/var/log/k3s.log", "--alsologtostderr=true",
    ),
    "EKS on Bottlerocket": (
        "--v=2", "--config={file}", "--conntrack-max-per-core=0", "--conntrack-min=0", "--hostname-override=n",
    ),
    "AKS with the Azure CNI": (
        "--conntrack-max-per-core=0", "--metrics-bind-address=0.0.0.0:10249", "--kubeconfig=/k",
        "--cluster-cidr=10.251.0.0/16", "--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix=azv",
        "--v=3",
    ),
    "NixOS": (
        "--bind-address=0.0.0.0", "--cluster-cidr=10.1.0.0/16", "--hostname-override=n", "--kubeconfig=/k", "--v=2",
        "--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0",
    ),
    "Talos": (
        "--cluster-cidr=10.244.0.0/16", "--conntrack-max-per-core=0", "--hostname-override=n", "--kubeconfig=/k",
        "--proxy-mode=nftables",
    ),
    "a pod of the hyperkube days": (
        "--v=2", "--master=http://10.0.0.1:8080", "--proxy-mode=userspace", "--masquerade-all", "--udp-timeout=250ms",
    ),
    "kops": (
        "--conntrack-max-per-core=131072", "--kubeconfig=/var/lib/kube-proxy/kubeconfig",
        "--master=https://api.internal", "--oom-score-adj=-998", "--v=2", "--logtostderr=false", "--alsologtostderr",
        "--log-file=/var/log/kube-proxy.log",
    ),
    "hand-written": (
        "--feature-gates", "NFTablesProxyMode=true", "--nodeport-addresses", "primary", "-v", "2", "--masquerade-all",
    ),
}  # fmt: skip


@pytest.mark.parametrize("arguments", INSTALLERS.values(), ids=INSTALLERS)
def test_the_command_lines_of_installers(file, arguments):
    options_of(*(argument.format(file=file) for argument in arguments))


def test_the_command_line_of_k3s_in_detail():
    config = options_of(*INSTALLERS["k3s"]).config
    assert config.healthz_bind_address == "127.0.0.1:10256"
    assert config.conntrack.max_per_core == 0
    assert config.conntrack.tcp_established_timeout == Duration(0)
    assert config.hostname_override == "n"


def test_options_show_every_flag_and_have_defaults():
    shown = dict(options_of("--v=2").flags)
    assert shown["v"] == "2"
    assert shown["cleanup"] == "false"
    assert Options().config == Options().resolve(KubeProxyConfiguration())
