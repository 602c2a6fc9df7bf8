"""`strict`: empty values mean the same as in the Go kube-proxy, extensions are off, values unknown to it are errors."""

import pytest

from kubeproxy.config.load import load_text
from kubeproxy.config.options import build_options
from kubeproxy.config.pflag import parse
from kubeproxy.config.types import describe
from kubeproxy.errors import ConfigError
from kubeproxy.features import BALANCING, FEATURES, REFUSAL_RESETS
from kubeproxy.model.world import Surroundings, build
from kubeproxy.setup import host

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"


def options_of(*arguments):
    return build_options(parse(arguments))


@pytest.mark.parametrize(
    ("text", "mode", "shortest"),
    [
        ("", "iptables", "1s"),
        ("iptables: {minSyncPeriod: 5s, masqueradeAll: true}", "iptables", "5s"),
        ("mode: nftables", "nftables", "1s"),
        ("mode: nftables\nnftables: {minSyncPeriod: 0s}", "nftables", "1s"),  # 0 means unset, as in the Go kube-proxy
        ("mode: nftables\nnftables: {minSyncPeriod: 3s}", "nftables", "3s"),
        ("mode: ipvs", "ipvs", "0s"),
    ],
)
def test_empty_values_mean_the_same_as_to_the_go_kube_proxy(tmp_path, text, mode, shortest):
    file = tmp_path / "config.conf"
    file.write_text(f"{HEAD}{text}\n")
    by_flag = options_of(f"--config={file}", "--strict")
    file.write_text(f"{HEAD}{text}\nstrict: true\n")
    by_field = options_of(f"--config={file}")
    for options in (by_flag, by_field):
        config = options.config
        assert (config.strict, config.active_mode, str(config.syncs.min_sync_period)) == (True, mode, shortest)
        assert describe(config)["strict"]
    assert by_flag.resolve(load_text(f"{HEAD}{text}\n")).strict


@pytest.mark.parametrize(
    ("line", "mode", "shortest"),
    [
        ("", "iptables", "1s"),
        ("--proxy-mode=nftables", "nftables", "1s"),
        ("--proxy-mode=nftables --iptables-min-sync-period=0", "nftables", "0s"),
        ("--proxy-mode=nftables --iptables-min-sync-period=2s", "nftables", "2s"),
    ],
)
def test_flags_without_a_file(line, mode, shortest):
    config = options_of("--strict", *line.split()).config
    assert (config.active_mode, str(config.syncs.min_sync_period)) == (mode, shortest)


def test_every_feature_is_off():
    for mode in ("nftables", "iptables"):
        options = options_of("--strict", f"--proxy-mode={mode}", "--balancing-entries=0")
        world = build(host.settings(options.config, options.features), Surroundings())
        assert [feature.value(world) for feature in FEATURES.values()] == [each.off for each in FEATURES.values()]
    world = build(host.settings(options_of().config), Surroundings())
    assert BALANCING.value(world)
    assert REFUSAL_RESETS.value(world)


BY_STRICT = "cannot be used with --strict (strict: true): the Go kube-proxy 1.36 does not have"


@pytest.mark.parametrize(
    ("line", "lack"),
    [
        ("--reset-gone-endpoints", "this feature"),
        ("--fast-forward-after=20", "this feature"),
        ("--balancing-entries=9", "this feature"),
        ("--port-ranges=9", "this feature"),
        ("--refuse-with-reset", "this feature"),
        ("--eject-failing-endpoints", "this feature"),
        ("--startup-taint=a/b", "this feature"),
        ("--connection-counters", "this feature"),
        ("--proxy-mode=userspace", "the mode userspace"),
        (
            "--feature-gates=KubeProxyNFTablesLocalhostNodePorts=true",
            "the gate KubeProxyNFTablesLocalhostNodePorts",
        ),
        ("--nodeport-addresses=localhost", 'the word "localhost"'),
        ("--nodeport-addresses=primary,10.0.0.0/8", 'the word "primary" beside other addresses'),
    ],
)
def test_a_contradiction_names_both(tmp_path, line, lack):
    flag = line.partition("=")[0]
    mistake = f"{flag}: {BY_STRICT} {lack}"
    with pytest.raises(ConfigError) as caught:
        options_of("--strict", line)
    assert str(caught.value) == mistake
    options_of(line)
    if flag[2:] not in FEATURES:
        return
    file = tmp_path / "config.conf"
    file.write_text(HEAD)
    options = options_of(f"--config={file}", line)
    with pytest.raises(ConfigError) as caught:  # as when the file of a running proxy changes
        options.resolve(load_text(f"{HEAD}strict: true\n"))
    assert str(caught.value) == mistake


def test_values_that_the_go_kube_proxy_accepts_are_accepted():
    options_of("--strict", "--nodeport-addresses=primary", "--feature-gates=AllBeta=false", "--fast-forward-after=0")
