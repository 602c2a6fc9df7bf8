"""Loading a configuration file: formats, strict and lenient parsing, types, defaults, all mistakes at once."""

import contextlib
import json
import logging
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.config.durations import Duration
from kubeproxy.config.load import load_file, load_text
from kubeproxy.config.modes import parse_port_range
from kubeproxy.errors import ConfigError

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"

KUBEADM = HEAD + textwrap.dedent("""\
    bindAddress: 0.0.0.0
    bindAddressHardFail: false
    clientConnection:
      acceptContentTypes: ""
      burst: 0
      contentType: ""
      kubeconfig: /var/lib/kube-proxy/kubeconfig.conf
      qps: 0
    clusterCIDR: 10.244.0.0/16
    configSyncPeriod: 0s
    conntrack:
      maxPerCore: null
      min: null
      tcpBeLiberal: false
      tcpCloseWaitTimeout: null
      tcpEstablishedTimeout: null
      udpStreamTimeout: 0s
      udpTimeout: 0s
    detectLocal:
      bridgeInterface: ""
      interfaceNamePrefix: ""
    detectLocalMode: ""
    enableProfiling: false
    healthzBindAddress: ""
    hostnameOverride: ""
    iptables:
      localhostNodePorts: null
      masqueradeAll: false
      masqueradeBit: null
      minSyncPeriod: 0s
      syncPeriod: 0s
    ipvs:
      excludeCIDRs: null
      minSyncPeriod: 0s
      scheduler: ""
      strictARP: false
      syncPeriod: 0s
      tcpFinTimeout: 0s
      tcpTimeout: 0s
      udpTimeout: 0s
    logging:
      flushFrequency: 0
      options:
        json:
          infoBufferSize: "0"
        text:
          infoBufferSize: "0"
      verbosity: 0
    metricsBindAddress: ""
    mode: ""
    nftables:
      masqueradeAll: false
      masqueradeBit: null
      minSyncPeriod: 0s
      syncPeriod: 0s
    nodePortAddresses: null
    oomScoreAdj: null
    portRange: ""
    showHiddenMetricsForVersion: ""
    winkernel:
      enableDSR: false
      forwardHealthCheckVip: false
      networkName: ""
      rootHnsEndpointName: ""
      sourceVip: ""
    """)


def mistakes(text):
    with pytest.raises(ConfigError) as caught:
        load_text(text)
    return str(caught.value).splitlines()


def test_the_file_of_kubeadm(caplog):
    config = load_text(KUBEADM)
    assert config.active_mode == "nftables"
    assert config.cluster_cidrs == ("10.244.0.0/16",)
    assert config.client_connection.kubeconfig == "/var/lib/kube-proxy/kubeconfig.conf"
    assert (config.client_connection.qps, config.client_connection.burst) == (5.0, 10)
    assert config.iptables.sync_period == config.nftables.sync_period == 30
    assert config.logging.flush_frequency == 5
    assert config.conntrack.max_per_core == 32768
    assert not caplog.records


def test_json_is_read_too():
    config = load_text(
        '{"apiVersion": "kubeproxy.config.k8s.io/v1alpha1",\n\t"kind": "KubeProxyConfiguration", "mode": "ipvs"}'
    )
    assert config.mode == "ipvs"


def test_json_may_have_escapes_that_yaml_lacks():
    tree = {"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", "mode": "ipvs"}
    assert (
        load_text(json.dumps(tree | {"winkernel": {"networkName": "\U0001f600"}})).winkernel.network_name
        == "\U0001f600"
    )


def test_only_the_first_document_counts():
    assert load_text(HEAD + "mode: ipvs\n---\n" + HEAD + "mode: iptables\n").mode == "ipvs"


def test_merge_keys_and_aliases_are_followed():
    config = load_text(HEAD + "iptables: &periods\n  syncPeriod: 10s\nipvs:\n  <<: *periods\n")
    assert config.iptables.sync_period == config.ipvs.sync_period == 10


def test_flush_frequency_may_be_nanoseconds():
    assert load_text(HEAD + "logging: {flushFrequency: 1000000000}").logging.flush_frequency == Duration(1)


def test_base_60_numbers_and_dates_stay_text():
    assert load_text(HEAD + "hostnameOverride: 22:30\n").hostname_override == "22:30"
    assert load_text(HEAD + "hostnameOverride: 2024-01-01\n").hostname_override == "2024-01-01"


def test_numbers_as_helm_writes_them():
    """Helm prints a number above a million as a float; Kubernetes' own parser accepts it as a whole number."""
    config = load_text(HEAD + "conntrack: {min: 1.048576e+06, maxPerCore: 1e+06}\nclientConnection: {qps: 1e2}\n")
    assert (config.conntrack.min, config.conntrack.max_per_core) == (1048576, 1000000)
    assert config.client_connection.qps == 100.0
    assert type(config.conntrack.min) is int
    assert load_text(HEAD + "hostnameOverride: '1e3'\n").hostname_override == "1e3"


WRONG_FILES = [
    ("", "not a configuration: expected a map of fields with apiVersion: kubeproxy.config.k8s.io/v1alpha1"),
    ("- a", "not a configuration: expected a map of fields with apiVersion: kubeproxy.config.k8s.io/v1alpha1"),
    ("mode: ipvs", "apiVersion: missing; add apiVersion: kubeproxy.config.k8s.io/v1alpha1"),
    (
        "apiVersion: kubeproxy.config.k8s.io/v1alpha1",
        "kind: missing; add kind: KubeProxyConfiguration",
    ),
    (
        "apiVersion: kubeproxy.config.k8s.io/v1beta1\nkind: KubeProxyConfiguration",
        'apiVersion: expected kubeproxy.config.k8s.io/v1alpha1, got "kubeproxy.config.k8s.io/v1beta1"; this release',
    ),
    (
        "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeletConfiguration",
        'kind: expected KubeProxyConfiguration, got "KubeletConfiguration"',
    ),
    (HEAD + "mode: [", "cannot be read as YAML or JSON: line 4, column 1: did not find expected node content"),
    (HEAD + "? [a]\n: b", "cannot be read as YAML or JSON: line 3, column 3: a key must be text"),
    (HEAD + "x: &x [*x]\n", "cannot be read as YAML or JSON: line 3: *x contains itself"),
    ("{" * 100_000, "cannot be read as YAML or JSON: line 1: nested deeper than 50 levels"),
    ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "cannot be read as YAML or JSON: line 1: nested deeper than 50"),
    ("[" * 1_000, "cannot be read as YAML or JSON: line 1: nested deeper than 50 levels"),
    (HEAD + "a: \x07", "cannot be read as YAML or JSON: "),
]


@pytest.mark.parametrize(("text", "message"), WRONG_FILES)
def test_a_file_that_is_no_configuration(text, message):
    assert mistakes(text)[0].startswith(message)


def test_an_alias_bomb_is_refused():
    lines = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    assert mistakes(HEAD + "a0: &a0 x\n" + "\n".join(lines))[0].startswith(
        "cannot be read as YAML or JSON: line 9: more than"
    )


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*absent: No such file"):
        load_file(tmp_path / "absent")
    (tmp_path / "bad").write_text(HEAD + "mode: x\noomScoreAdj: 5000\n")
    with pytest.raises(ConfigError, match=r"/bad: 2 mistakes:\n  oomScoreAdj: .*\n  mode: "):
        load_file(tmp_path / "bad")
    (tmp_path / "latin").write_bytes(b"mode: \xff")
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        load_file(tmp_path / "latin")


def test_unknown_and_duplicate_fields_are_noticed_and_passed_over(caplog):
    with caplog.at_level(logging.WARNING, "kubeproxy.config"):
        config = load_text(HEAD + "mode: ipvs\nmode: iptables\nmod: x\niptables:\n  sincPeriod: 1s\n  syncPeriod: 9s\n")
    assert config.mode == "iptables"
    assert config.iptables.sync_period == 9
    (record,) = caplog.records
    message = record.getMessage()
    assert "mod: unknown field; did you mean mode?" in message
    assert "iptables.sincPeriod: unknown field; did you mean syncPeriod or minSyncPeriod?" in message
    assert "mode: occurs more than once, the last value is used" in message


def test_duplicates_are_noticed_in_json(caplog):
    load_text(
        '{"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration",'
        ' "ipvs": {"scheduler": "rr", "scheduler": "lc"}}'
    )
    assert "ipvs.scheduler: occurs more than once" in caplog.text


def test_names_are_case_sensitive(caplog):
    assert load_text(HEAD + "Mode: ipvs").mode == ""
    assert "Mode: unknown field; did you mean mode?" in caplog.text


def test_all_mistakes_at_once():
    lines = mistakes(
        HEAD
        + textwrap.dedent("""\
            mode: ipvs
            oomScoreAdj: 5000
            iptables:
              masqueradeBit: x
              syncPeriod: 5
            ipvs:
              excludeCIDRs: [10.0.0.0/8, nope]
              tcpTimeout: -1s
              syncPeriod: 1s
              minSyncPeriod: 2s
            conntrack: []
            nodePortAddresses: [loopback, 10.0.0.0/8]
            featureGates: {KubeProxyIPVSS: true, NFTablesProxyMode: false}
            logging:
              vmodule: [{filePattern: "a=b", verbosity: 1}, {filepattern: x}]
            detectLocalMode: BridgeInterface
            """)
    )
    assert [line.split(": ")[0] for line in sorted(lines)] == [
        "conntrack",
        "detectLocal.bridgeInterface",
        "featureGates.KubeProxyIPVSS",
        "featureGates.NFTablesProxyMode",
        "iptables.masqueradeBit",
        "iptables.syncPeriod",
        "ipvs.excludeCIDRs[1]",
        "ipvs.minSyncPeriod",
        "ipvs.tcpTimeout",
        "logging.vmodule[0].filePattern",
        "logging.vmodule[1].filePattern",
        "nodePortAddresses[0]",
        "oomScoreAdj",
    ]


VALUES = [
    ("clusterCIDR: 10.0.0.0/8, fd00::/8", "clusterCIDR: expected one CIDR or one of each IP family"),
    ("clusterCIDR: 10.0.0.0/8,fd00::/8,fd01::/16", "clusterCIDR: expected one CIDR or one of each IP family"),
    ("clusterCIDR: pods", "clusterCIDR: expected one CIDR or one of each IP family"),
    ("nodePortAddresses: [10.0.0.1]", 'nodePortAddresses[0]: expected a CIDR like 192.0.2.0/24, or one of "primary", '),
    (
        "nodePortAddresses: [all, Primary]",
        'nodePortAddresses[1]: expected a CIDR like 192.0.2.0/24, or one of "primary", ',
    ),
    ("detectLocalMode: InterfaceNamePrefix", "detectLocal.interfaceNamePrefix: must not be empty with detectLocalMode"),
    ("nftables: {syncPeriod: -1s}", "nftables.syncPeriod: must be greater than 0, got -1s"),
    ("nftables: {minSyncPeriod: -1s}", "nftables.minSyncPeriod: must not be negative, got -1s"),
    ("mode: iptables\niptables: {minSyncPeriod: 31s}", "iptables.minSyncPeriod: must not exceed iptables.syncPeriod"),
    ("iptables: {syncPeriod: -1s}", "iptables.syncPeriod: must be greater than 0, got -1s"),
    (
        "iptables: {minSyncPeriod: 2m, syncPeriod: 1m}",
        "iptables.minSyncPeriod: must not exceed iptables.syncPeriod (1m0s)",
    ),
    ("mode: userspace\niptables: {syncPeriod: -1s}", "iptables.syncPeriod: must be greater than 0, got -1s"),
    (
        "mode: userspace\nportRange: 2000-300",
        'portRange: expected ports like 300-2000, 300+1700 or 300, got "2000-300"',
    ),
    ("mode: userspace\nudpIdleTimeout: -1s", "udpIdleTimeout: must be greater than 0, got -1s"),
    ("mode: ipvs\nfeatureGates: {KubeProxyIPVS: false}", "mode: ipvs needs the feature gate KubeProxyIPVS=true"),
    (
        "logging: {format: json}\nfeatureGates: {LoggingBetaOptions: false}",
        "logging.format: json needs the feature gate LoggingBetaOptions=true",
    ),
    (
        "logging: {format: json}\nfeatureGates: {AllBeta: false}",
        "logging.format: json needs the feature gate LoggingBetaOptions=true",
    ),
    ("mode: ipvs\nipvs: {scheduler: --help}", 'ipvs.scheduler: expected the name of a scheduler like lc, or "" for rr'),
    ("mode: ipvs\nipvs: {udpTimeout: -1s}", "ipvs.udpTimeout: must not be negative, got -1s"),
    ("logging: {format: json, vmodule: [{filePattern: a}]}", "logging.vmodule: only works with the text log format"),
    ("logging: {verbosity: 3000000000}", "logging.verbosity: must be at most 2147483647, got 3000000000"),
    ("conntrack: {min: 3000000000}", "conntrack.min: expected a whole number from -2147483648 to 2147483647"),
    ("conntrack: {min: 1e400}", "conntrack.min: expected a whole number, got Infinity"),
    ("hostnameOverride: 1e3", "hostnameOverride: expected text, got 1000.0 (put it in quotes)"),
    ("conntrack: {min: true}", "conntrack.min: expected a whole number, got true"),
    ("enableProfiling: 1", "enableProfiling: expected true or false, got 1"),
    (
        "featureGates: {WatchList: 1}",
        'featureGates: expected a map of feature gates to true or false, got {"WatchList": 1}',
    ),
    ("iptables: 5", "iptables: expected a map of fields, got 5"),
    ("mode: " + "x" * 100, "mode: expected nftables, iptables, ipvs, userspace"),
]


@pytest.mark.parametrize(("text", "message"), VALUES)
def test_a_wrong_value(text, message):
    (line,) = mistakes(HEAD + text)
    assert line.startswith(message)


FINE = [
    "iptables: {syncPeriod: -1s, minSyncPeriod: 1h}\nmode: ipvs",
    "ipvs: {tcpTimeout: -1s, excludeCIDRs: [nope], syncPeriod: -5s}\nmode: iptables",
    "nftables: {masqueradeBit: 99, syncPeriod: -1s}\nmode: iptables",
    "ipvs: {scheduler: whatever}\nmode: ipvs",
    "logging: {options: {json: {splitStream: true, infoBufferSize: 1Ki}}}\nfeatureGates: {LoggingAlphaOptions: true}",
    "logging: {options: {text: {splitStream: true}}}\nfeatureGates: {AllAlpha: true}",
    "featureGates: {NFTablesProxyMode: true, GitRepoVolumeDriver: false, AllBeta: true}",
    "nodePortAddresses: [primary]",
    "nodePortAddresses: [primary, localhost, all, 10.0.0.0/8]",
    "portRange: 0-0\nmode: userspace",
    "portRange: 300+1700\nmode: userspace",
    "featureGates: {KubeProxyIPVS: false}",
    "portRange: 2000-300",
    "portRange: nope\nudpIdleTimeout: -1s\nmode: ipvs",
]


@pytest.mark.parametrize("text", FINE)
def test_settings_of_other_modes_are_not_checked(text):
    load_text(HEAD + text)


def test_ipv6_defaults():
    config = load_text(HEAD + 'bindAddress: "::"\n')
    assert (config.healthz_bind_address, config.metrics_bind_address) == ("[::]:10256", "[::1]:10249")
    config = load_text(HEAD + 'bindAddress: "fd00::5"\nmetricsBindAddress: 0.0.0.0\n')
    assert (config.healthz_bind_address, config.metrics_bind_address) == ("[::]:10256", "0.0.0.0:10249")


def test_zero_durations_take_the_default_where_upstream_does_so():
    blocks = "iptables: {syncPeriod: 0s, minSyncPeriod: '0'}\nipvs: {syncPeriod: 0s}\nconfigSyncPeriod: 0h\n"
    config = load_text(HEAD + blocks + "conntrack: {tcpEstablishedTimeout: 0s, maxPerCore: 0}\nudpIdleTimeout: 0s\n")
    assert (config.iptables.sync_period, config.iptables.min_sync_period) == (30, 1)
    assert (config.ipvs.sync_period, config.ipvs.min_sync_period) == (30, 0)
    assert config.config_sync_period == 900
    assert config.udp_idle_timeout == 0.25
    assert (config.conntrack.tcp_established_timeout, config.conntrack.max_per_core) == (0, 0)


def test_without_a_mode_the_iptables_block_applies_to_nftables():
    block = "iptables: {masqueradeBit: 15, masqueradeAll: true, syncPeriod: 1m, minSyncPeriod: 2s}\n"
    for text in (block, block + "nftables: {masqueradeBit: null, masqueradeAll: false, syncPeriod: 0s}\n"):
        config = load_text(HEAD + text)
        assert (config.masquerades.masquerade_bit, config.masquerades.masquerade_all) == (15, True)
        assert (config.syncs.sync_period, config.syncs.min_sync_period) == (60, 2)
    config = load_text(HEAD + block + "nftables: {masqueradeBit: 3, syncPeriod: 5s}\n")
    assert (config.masquerades.masquerade_bit, config.syncs.sync_period, config.syncs.min_sync_period) == (3, 5, 2)
    config = load_text(HEAD + block + "mode: nftables\n")
    assert (config.masquerades.masquerade_bit, config.masquerades.masquerade_all) == (14, False)
    assert (config.syncs.sync_period, config.syncs.min_sync_period) == (30, 0)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("iptables", (1, 2, True, 5)),
        ("ipvs", (3, 4, True, 5)),
        ("nftables", (6, 0, False, 7)),
        ("userspace", (1, 2, True, 5)),
    ],
)
def test_only_the_active_modes_values_count(mode, expected):
    config = load_text(
        HEAD
        + f"mode: {mode}\n"
        + "iptables: {syncPeriod: 1m, minSyncPeriod: 2s, masqueradeAll: true, masqueradeBit: 5}\n".replace("1m", "60s")
        + "ipvs: {syncPeriod: 180s, minSyncPeriod: 4s}\n"
        + "nftables: {syncPeriod: 360s, masqueradeBit: 7}\n"
    )
    sync, minimum, everything, bit = expected
    assert (config.syncs.sync_period, config.syncs.min_sync_period) == (sync * 60, minimum)
    assert (config.masquerades.masquerade_all, config.masquerades.masquerade_bit) == (everything, bit)


@pytest.mark.parametrize(
    ("text", "ports"),
    [
        ("", range(0)),
        ("0", range(0)),
        ("0-0", range(0)),
        ("80", range(80, 81)),
        ("300-2000", range(300, 2001)),
        ("300+1700", range(300, 2001)),
        (" 300-2000 ", range(300, 2001)),
        ("60000-70000", None),
        ("65000+1000", None),
        ("a-b", None),
        ("5-", None),
    ],
)
def test_port_ranges(text, ports):
    assert parse_port_range(text) == ports


scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8))
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
)
NAMES = st.sampled_from(
    ["mode", "iptables", "conntrack", "nodePortAddresses", "logging", "featureGates", "configSyncPeriod"]
)


@given(st.dictionaries(NAMES, trees))
def test_any_json_is_a_configuration_or_a_config_error(values):
    head = {"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration"}
    with contextlib.suppress(ConfigError):
        load_text(json.dumps(head | values))


@given(st.text(max_size=60))
def test_any_text_is_a_configuration_or_a_config_error(text):
    with contextlib.suppress(ConfigError):
        load_text(HEAD + text)


@pytest.mark.parametrize("name", ['cbr0"', "a b", "cbr*", "interface-too-long", "a/b"])
def test_an_interface_name_that_is_none_is_a_mistake(name):
    detect = {"bridgeInterface": name}
    text = HEAD + f"detectLocalMode: BridgeInterface\ndetectLocal: {json.dumps(detect)}\n"
    with pytest.raises(ConfigError, match=r"detectLocal\.bridgeInterface: expected up to 15 characters"):
        load_text(text)


def test_unused_settings_are_not_checked():
    """As in the Go kube-proxy: leftover settings of another mode do not prevent a start."""
    unused = {
        "detectLocalMode": "BridgeInterface",
        "detectLocal": {"bridgeInterface": "cbr0", "interfaceNamePrefix": "a name that is none"},
        "clusterCIDR": "pods",
        "mode": "iptables",
        "ipvs": {"excludeCIDRs": ["x"], "tcpTimeout": "-1s", "syncPeriod": "-1s"},
        "nftables": {"masqueradeBit": 99, "minSyncPeriod": "9h"},
    }
    config = load_text(HEAD + "\n".join(f"{name}: {json.dumps(value)}" for name, value in unused.items()))
    assert config.cluster_cidr == "pods"
    with pytest.raises(ConfigError, match="clusterCIDR"):
        load_text(HEAD + "clusterCIDR: pods\n")
