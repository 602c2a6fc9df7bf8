"""Every field of the configuration file: its default, an accepted value, and a refused value with the message."""

import json
import operator

import msgspec
import pytest

from kubeproxy.config.durations import Duration
from kubeproxy.config.fields import VModuleItem, json_fields
from kubeproxy.config.load import load_text
from kubeproxy.config.types import KubeProxyConfiguration, describe
from kubeproxy.errors import ConfigError

BOOL = ("yes", 'expected true or false, got "yes"')
TEXT = (5, "expected text, got 5 (put it in quotes)")
DURATION = (5, 'expected a duration like "30s" or "1h30m", got 5')
NEGATIVE = ("-1s", "must not be negative, got -1s")
DUAL_STACK = "expected one CIDR or one of each IP family, like 10.100.0.0/16,fde4:8dba:82e1::/48"
SECONDS_0, SECONDS_30 = Duration(0), Duration(30)

# path, default, value in the file, value in the program, refused value, message
FIELDS = [
    ("featureGates", {}, {"WatchList": True}, {"WatchList": True}, [1],
     "expected a map of feature gates to true or false, got [1]"),
    ("clientConnection.kubeconfig", "", "/k", "/k", *TEXT),
    ("clientConnection.acceptContentTypes", "", "application/json", "application/json", *TEXT),
    ("clientConnection.contentType", "application/vnd.kubernetes.protobuf", "application/json", "application/json",
     *TEXT),
    ("clientConnection.qps", 5.0, -1, -1.0, "x", 'expected a number, got "x"'),
    ("clientConnection.burst", 10, 20, 20, -1, "must not be negative, got -1"),
    ("logging.format", "text", "json", "json", "xml", 'expected text or json, got "xml"'),
    ("logging.flushFrequency", Duration(5), "1s", Duration(1), "-1s", "must be greater than 0, got -1s"),
    ("logging.verbosity", 0, 4, 4, -1, "expected a whole number from 0 to 4294967295, got -1"),
    ("logging.vmodule", (), [{"filePattern": "net*", "verbosity": 2}],
     (VModuleItem(file_pattern="net*", verbosity=2),), {"net": 2},
     'expected a list of maps with filePattern and verbosity, got {"net": 2}'),
    ("logging.options.text.splitStream", False, False, False, True,
     "needs the feature gate LoggingAlphaOptions=true"),
    ("logging.options.text.infoBufferSize", 0, "0", 0, "64Ki", "needs the feature gate LoggingAlphaOptions=true"),
    ("logging.options.json.splitStream", False, False, False, *BOOL),
    ("logging.options.json.infoBufferSize", 0, 0, 0, "x",
     'expected a number of bytes like 512 or "64Ki", got "x"'),
    ("hostnameOverride", "", "node-1", "node-1", *TEXT),
    ("bindAddress", "0.0.0.0", "10.0.0.5", "10.0.0.5", "node-1", 'expected an IP address, got "node-1"'),
    ("healthzBindAddress", "0.0.0.0:10256", "127.0.0.1", "127.0.0.1:10256", "localhost:1",
     'expected IP:port like 0.0.0.0:10256 or [::]:10256, got "localhost:1"'),
    ("metricsBindAddress", "127.0.0.1:10249", "[::]:9", "[::]:9", "1.2.3.4:0",
     'expected a port from 1 to 65535, got "0"'),
    ("bindAddressHardFail", False, True, True, *BOOL),
    ("enableProfiling", False, True, True, *BOOL),
    ("showHiddenMetricsForVersion", "", "1.35", "1.35", "1.30", 'only "1.35" can be shown, got "1.30"'),
    ("mode", "", "ipvs", "ipvs", "kernelspace",
     'expected nftables, iptables, ipvs, userspace, or "" for nftables, got "kernelspace"; kernelspace is for Windows'),
    ("iptables.masqueradeBit", 14, 0, 0, 32, "must be from 0 to 31, got 32"),
    ("iptables.masqueradeAll", False, True, True, *BOOL),
    ("iptables.localhostNodePorts", True, False, False, *BOOL),
    ("iptables.syncPeriod", SECONDS_30, "1m", Duration(60), *DURATION),
    ("iptables.minSyncPeriod", Duration(1), "5s", Duration(5), *DURATION),
    ("ipvs.syncPeriod", SECONDS_30, "1m", Duration(60), *DURATION),
    ("ipvs.minSyncPeriod", SECONDS_0, "5s", Duration(5), *DURATION),
    ("ipvs.scheduler", "", "lc", "lc", *TEXT),
    ("ipvs.excludeCIDRs", (), ["10.0.0.0/8"], ("10.0.0.0/8",), "10.0.0.0/8",
     'expected a list of text, got "10.0.0.0/8"'),
    ("ipvs.strictARP", False, True, True, *BOOL),
    ("ipvs.tcpTimeout", SECONDS_0, "15m", Duration(900), *DURATION),
    ("ipvs.tcpFinTimeout", SECONDS_0, "2m", Duration(120), *DURATION),
    ("ipvs.udpTimeout", SECONDS_0, "5m", Duration(300), *DURATION),
    ("nftables.masqueradeBit", 14, 31, 31, -1, "must be from 0 to 31, got -1"),
    ("nftables.masqueradeAll", False, True, True, *BOOL),
    ("nftables.syncPeriod", SECONDS_30, "1m", Duration(60), "soon",
     'expected a duration like "30s" or "1h30m", got "soon"'),
    ("nftables.minSyncPeriod", SECONDS_0, "100ms", Duration(0.1), "31s",
     "must not exceed nftables.syncPeriod (30s), got 31s"),
    ("winkernel.networkName", "", "n", "n", *TEXT),
    ("winkernel.sourceVip", "", "10.0.0.1", "10.0.0.1", *TEXT),
    ("winkernel.enableDSR", False, True, True, *BOOL),
    ("winkernel.rootHnsEndpointName", "", "e", "e", *TEXT),
    ("winkernel.forwardHealthCheckVip", False, True, True, *BOOL),
    ("detectLocalMode", "", "NodeCIDR", "NodeCIDR", "nodecidr",
     'expected ClusterCIDR, NodeCIDR, BridgeInterface, InterfaceNamePrefix, or "" for ClusterCIDR, got "nodecidr"'),
    ("detectLocal.bridgeInterface", "", "cbr0", "cbr0", *TEXT),
    ("detectLocal.interfaceNamePrefix", "", "veth", "veth", *TEXT),
    ("clusterCIDR", "", "10.0.0.0/8,fd00::/8", "10.0.0.0/8,fd00::/8", "10.0.0.0/8,11.0.0.0/8",
     DUAL_STACK + '; got "10.0.0.0/8,11.0.0.0/8"'),
    ("nodePortAddresses", (), ["10.0.0.0/8", "fd00::/8"], ("10.0.0.0/8", "fd00::/8"), [1],
     "expected a list of text, got [1], see [0]"),
    ("oomScoreAdj", -999, 0, 0, 1001, "must be from -1000 to 1000, got 1001"),
    ("conntrack.maxPerCore", 32768, 0, 0, -1, "must not be negative, got -1"),
    ("conntrack.min", 131072, 0, 0, 1.5, "expected a whole number, got 1.5"),
    ("conntrack.tcpEstablishedTimeout", Duration(86400), "0s", SECONDS_0, *NEGATIVE),
    ("conntrack.tcpCloseWaitTimeout", Duration(3600), "0s", SECONDS_0, *NEGATIVE),
    ("conntrack.tcpBeLiberal", False, True, True, *BOOL),
    ("conntrack.udpTimeout", SECONDS_0, "30s", SECONDS_30, *NEGATIVE),
    ("conntrack.udpStreamTimeout", SECONDS_0, "3m", Duration(180), *NEGATIVE),
    ("configSyncPeriod", Duration(900), "1h30m", Duration(5400), "-1s", "must be greater than 0, got -1s"),
    ("portRange", "", "300-2000", "300-2000", 300, "expected text, got 300 (put it in quotes)"),
    ("udpIdleTimeout", Duration(0.25), "1.5s", Duration(1.5), 1,
     'expected a duration like "30s" or "1h30m", got 1'),
    ("windowsRunAsService", False, True, True, *BOOL),
    ("strict", False, True, True, *BOOL),
]  # fmt: skip
PATHS = [row[0] for row in FIELDS]


def file_with(values):
    """Return the text of a configuration file with values at paths."""
    tree = {"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration"}
    for path, value in values.items():
        *parents, name = path.split(".")
        block = tree
        for parent in parents:
            block = block.setdefault(parent, {})
        block[name] = value
    return json.dumps(tree)


def at(config, path):
    """Return the value of a field by its JSON path."""
    for name in path.split("."):
        config = operator.attrgetter(json_fields(type(config))[name][0])(config)
    return config


def leaves(cls, path=""):
    for name, (_, kind) in json_fields(cls).items():
        here = f"{path}{name}"
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield from leaves(kind, f"{here}.")
        else:
            yield here


def test_the_table_names_every_field():
    assert sorted(PATHS) == sorted(leaves(KubeProxyConfiguration))


@pytest.mark.parametrize(("path", "default"), [row[:2] for row in FIELDS], ids=PATHS)
def test_default(path, default):
    for config in (load_text(file_with({})), load_text(file_with({path: None})), KubeProxyConfiguration()):
        assert at(config, path) == default


@pytest.mark.parametrize(("path", "text", "value"), [(row[0], row[2], row[3]) for row in FIELDS], ids=PATHS)
def test_accepted(path, text, value):
    assert at(load_text(file_with({path: text})), path) == value


@pytest.mark.parametrize(("path", "text", "message"), [(row[0], row[4], row[5]) for row in FIELDS], ids=PATHS)
def test_refused(path, text, message):
    with pytest.raises(ConfigError) as caught:
        load_text(file_with({path: text}))
    assert str(caught.value) == f"{path}: {message}"


def test_describe_has_every_field_under_its_name():
    described = describe(load_text(file_with({"windowsRunAsService": True, "udpIdleTimeout": "1s", "strict": True})))
    for path in PATHS:
        value = described
        for name in path.split("."):
            value = value[name]
