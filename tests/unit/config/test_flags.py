"""Every flag: its kind and default, an accepted value with its effect, and a refused value with the message."""

import operator

import pytest

from kubeproxy.config.durations import Duration
from kubeproxy.config.fields import VModuleItem, json_fields
from kubeproxy.config.flags import BY_NAME, FLAGS, GROUPS
from kubeproxy.config.options import build_options, page_access
from kubeproxy.config.pflag import KINDS, parse, shown_default
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.errors import ConfigError
from kubeproxy.features import Forwarding

INT = ("x", 'invalid argument "x" for "--{}" flag: strconv.ParseInt: parsing "x": invalid syntax')
BOOL = ("x", 'invalid argument "x" for "--{}" flag: strconv.ParseBool: parsing "x": invalid syntax')
DURATION = ("5", 'invalid argument "5" for "--{}" flag: time: missing unit in duration "5"')
NEGATIVE = ("-1s", "--{}: must not be negative, got -1s")
DUAL_STACK = "--{}: expected one CIDR or one of each IP family, like 10.100.0.0/16,fde4:8dba:82e1::/48"
QUANTITY = (
    'invalid argument "x" for "--{}" flag: "x" is no quantity of bytes; '
    "write a number with an optional suffix like Ki or M"
)
GATE = "needs the feature gate LoggingAlphaOptions=true"
ALPHA = "--feature-gates=LoggingAlphaOptions=true"
IPVS = "--proxy-mode=ipvs"
USERSPACE = "--proxy-mode=userspace"

# flag, kind, default, other flags, accepted value, path of the field (or attribute of the options), resulting value,
# refused value (None: any text is accepted), message
ROWS = [
    ("config", "string", "", "", None, "", None, "/absent",
     "cannot read the configuration file /absent: No such file or directory"),
    ("write-config-to", "string", "", "", "/x", ".write_config_to", "/x", None, ""),
    ("manifests", "string", "", "", "/m", ".manifests", "/m", None, ""),
    ("control-socket", "string", "/run/kube-proxy/control.sock", "", "/s", ".control_socket", "/s", None, ""),
    ("cleanup", "bool", "false", "", "true", ".cleanup", True, *BOOL),
    ("init-only", "bool", "false", "", "true", ".init_only", True, *BOOL),
    ("startup-taint", "string", "", "", "example.com/not-ready", ".features",
     {"startup-taint": "example.com/not-ready"}, "a/b/c",
     '--{}: expected the key of a taint, as example.com/not-ready, got "a/b/c"'),
    ("feature-gates", "mapStringBool", "", "", "WatchList=true,AllBeta=false", "featureGates",
     {"WatchList": True, "AllBeta": False}, "WatchLists=true",
     "--{}: unrecognized feature gate: WatchLists; did you mean WatchList or WatchListClient?"),
    ("config-sync-period", "duration", "15m0s", "", "1m", "configSyncPeriod", Duration(60), "0",
     "--{}: must be greater than 0, got 0s"),
    ("oom-score-adj", "int32", "-999", "", "-998", "oomScoreAdj", -998, "-1001",
     "--{}: must be from -1000 to 1000, got -1001"),
    ("show-hidden-metrics-for-version", "string", "", "", "1.35", "showHiddenMetricsForVersion", "1.35", "1.2",
     '--{}: only "1.35" can be shown, got "1.2"'),
    ("version", "version", "false", "", None, "", None, *BOOL),
    ("help", "bool", "false", "", None, "", None, *BOOL),
    ("kubeconfig", "string", "", "", "/k", "clientConnection.kubeconfig", "/k", None, ""),
    ("master", "string", "", "", "http://172.17.8.100:8080", ".master", "http://172.17.8.100:8080", None, ""),
    ("kube-api-content-type", "string", "application/vnd.kubernetes.protobuf", "", "application/json",
     "clientConnection.contentType", "application/json", None, ""),
    ("kube-api-burst", "int32", "10", "", "20", "clientConnection.burst", 20, "-1",
     "--{}: must not be negative, got -1"),
    ("kube-api-qps", "float32", "5", "", "7.5", "clientConnection.qps", 7.5, "x",
     'invalid argument "x" for "--{}" flag: strconv.ParseFloat: parsing "x": invalid syntax'),
    ("hostname-override", "string", "", "", " Node-1 ", "hostnameOverride", "node-1", "  ", "--{}: must not be blank"),
    ("bind-address", "ip", "0.0.0.0", "", "fd00::1", "bindAddress", "fd00::1", "node",
     'invalid argument "node" for "--{}" flag: "node" is not a valid IP address'),
    ("healthz-bind-address", "ipport", "0.0.0.0:10256", "", "127.0.0.1", "healthzBindAddress", "127.0.0.1:10256",
     "a:1", 'invalid argument "a:1" for "--{}" flag: "a" is not a valid IP address'),
    ("metrics-bind-address", "ipport", "127.0.0.1:10249", "", "", "metricsBindAddress", "", "1.2.3.4:99999",
     '--{}: expected a port from 1 to 65535, got "99999"'),
    ("page-from", "strings", "[127.0.0.0/8,::1/128]", "", "10.1.2.3/8", ".page", page_access(["10.0.0.0/8"], []),
     "10.0.0.1", '--{}: "10.0.0.1" is no CIDR such as 10.0.0.0/8; for this address alone write 10.0.0.1/32'),
    ("page-hosts", "strings", "[]", "", "Node-A.example.,[FD00::1]", ".page",
     page_access(["127.0.0.0/8", "::1/128"], ["node-a.example", "fd00::1"]), "http://node-a",
     '--{}: "http://node-a" is no name or IP address; give one without scheme and port, as node-a.example'),
    ("bind-address-hard-fail", "bool", "false", "", "true", "bindAddressHardFail", True, *BOOL),
    ("profiling", "bool", "false", "", "true", "enableProfiling", True, *BOOL),
    ("proxy-mode", "ProxyMode", "", "", "iptables", "mode", "iptables", "ipsv",
     '--{}: expected nftables, iptables, ipvs, userspace, or "" for nftables, got "ipsv"'),
    ("strict", "bool", "false", "", "true", "strict", True, *BOOL),
    ("masquerade-all", "bool", "false", IPVS, "true", "iptables.masqueradeAll", True, *BOOL),
    ("connection-counters", "bool", "false", "", "true", ".features", {"connection-counters": True}, *BOOL),
    ("reset-gone-endpoints", "bool", "false", "", "true", ".features", {"reset-gone-endpoints": True}, *BOOL),
    ("fast-forward-after", "int32", "0", "", "20", ".features",
     {"fast-forward-after": Forwarding(20, (6, 17))}, "-1", "--{}: must not be negative, got -1"),
    ("refuse-with-reset", "bool", "true", "", "false", ".features", {"refuse-with-reset": False}, *BOOL),
    ("balancing-entries", "int32", "1048576", "", "0", ".features", {"balancing-entries": 0}, "-1",
     "--{}: must not be negative, got -1"),
    ("service-proxy-name", "string", "", "", "kube-proxy-py", ".features", {"service-proxy-name": "kube-proxy-py"},
     "a,b", '--{}: expected the value of a label, got "a,b"'),
    ("cilium-annotations", "bool", "false", "", "true", ".features", {"cilium-annotations": True}, *BOOL),
    ("eject-failing-endpoints", "bool", "false", "", "true", ".features",
     {"eject-failing-endpoints": "always"}, *BOOL),
    ("port-ranges", "int32", "16", "", "0", ".features", {"port-ranges": 0}, "-1",
     "--{}: must not be negative, got -1"),
    ("iptables-masquerade-bit", "int32", "14", "", "0", "iptables.masqueradeBit", 0, "32",
     "--{}: must be from 0 to 31, got 32"),
    ("iptables-localhost-nodeports", "bool", "true", "", "false", "iptables.localhostNodePorts", False, *BOOL),
    ("iptables-sync-period", "duration", "30s", "", "1m", "nftables.syncPeriod", Duration(60), "0s",
     "--{}: must be greater than 0, got 0s"),
    ("iptables-min-sync-period", "duration", "1s", "--proxy-mode=iptables", "0", "iptables.minSyncPeriod", Duration(0),
     "31s", "--{}: must not exceed --iptables-sync-period (30s), got 31s"),
    ("ipvs-sync-period", "duration", "30s", IPVS, "1m", "ipvs.syncPeriod", Duration(60), "-1s",
     "--{}: must be greater than 0, got -1s"),
    ("ipvs-min-sync-period", "duration", "1s", IPVS, "5s", "ipvs.minSyncPeriod", Duration(5), *NEGATIVE),
    ("ipvs-scheduler", "string", "", "", "lc", "ipvs.scheduler", "lc", None, ""),
    ("ipvs-exclude-cidrs", "strings", "[]", IPVS, "10.0.0.0/8,fd00::/8", "ipvs.excludeCIDRs",
     ("10.0.0.0/8", "fd00::/8"), "10.0.0.0", '--{}: expected a CIDR like 192.0.2.0/24, got "10.0.0.0"'),
    ("ipvs-strict-arp", "bool", "false", "", "true", "ipvs.strictARP", True, *BOOL),
    ("ipvs-tcp-timeout", "duration", "0s", IPVS, "15m", "ipvs.tcpTimeout", Duration(900), *NEGATIVE),
    ("ipvs-tcpfin-timeout", "duration", "0s", IPVS, "2m", "ipvs.tcpFinTimeout", Duration(120), *NEGATIVE),
    ("ipvs-udp-timeout", "duration", "0s", IPVS, "5m", "ipvs.udpTimeout", Duration(300), *NEGATIVE),
    ("proxy-port-range", "string", "", USERSPACE, "300+100", "portRange", "300+100", "x",
     '--{}: expected ports like 300-2000, 300+1700 or 300, got "x"'),
    ("udp-timeout", "duration", "250ms", USERSPACE, "1s", "udpIdleTimeout", Duration(1), "0",
     "--{}: must be greater than 0, got 0s"),
    ("detect-local-mode", "LocalMode", "", "", "NodeCIDR", "detectLocalMode", "NodeCIDR", "Pods",
     '--{}: expected ClusterCIDR, NodeCIDR, BridgeInterface, InterfaceNamePrefix, or "" for ClusterCIDR, got "Pods"'),
    ("cluster-cidr", "string", "", "", "10.0.0.0/8,fd00::/8", "clusterCIDR", "10.0.0.0/8,fd00::/8", "10.0.0.0",
     DUAL_STACK + '; got "10.0.0.0"'),
    ("pod-bridge-interface", "string", "", "--detect-local-mode=BridgeInterface", "cbr0",
     "detectLocal.bridgeInterface", "cbr0", "", "--{}: must not be empty with detectLocalMode BridgeInterface"),
    ("pod-interface-name-prefix", "string", "", "--detect-local-mode=InterfaceNamePrefix", "veth",
     "detectLocal.interfaceNamePrefix", "veth", "",
     "--{}: must not be empty with detectLocalMode InterfaceNamePrefix"),
    ("nodeport-addresses", "strings", "[]", "", "primary", "nodePortAddresses", ("primary",), "primary,10.0.0.0",
     '--{}: expected a CIDR like 192.0.2.0/24, or one of "primary", "localhost", "all", got "10.0.0.0"'),
    ("conntrack-max-per-core", "int32", "32768", "", "0", "conntrack.maxPerCore", 0, "-1",
     "--{}: must not be negative, got -1"),
    ("conntrack-min", "int32", "131072", "", "0", "conntrack.min", 0, *INT),
    ("conntrack-tcp-timeout-established", "duration", "24h0m0s", "", "0s", "conntrack.tcpEstablishedTimeout",
     Duration(0), *NEGATIVE),
    ("conntrack-tcp-timeout-close-wait", "duration", "1h0m0s", "", "0s", "conntrack.tcpCloseWaitTimeout",
     Duration(0), *NEGATIVE),
    ("conntrack-tcp-be-liberal", "bool", "false", "", "true", "conntrack.tcpBeLiberal", True, *BOOL),
    ("conntrack-udp-timeout", "duration", "0s", "", "30s", "conntrack.udpTimeout", Duration(30), *NEGATIVE),
    ("conntrack-udp-timeout-stream", "duration", "0s", "", "3m", "conntrack.udpStreamTimeout", Duration(180),
     *NEGATIVE),
    ("logging-format", "string", "text", "", "json", "logging.format", "json", "xml",
     '--{}: expected text or json, got "xml"'),
    ("log-flush-frequency", "duration", "5s", "", "1s", "logging.flushFrequency", Duration(1), *DURATION),
    ("v", "Level", "0", "", "4", "logging.verbosity", 4, "-1",
     'invalid argument "-1" for "-v, --v" flag: strconv.ParseUint: parsing "-1": invalid syntax'),
    ("vmodule", "pattern=N,...", "", "", "net*=2", "logging.vmodule", (VModuleItem(file_pattern="net*", verbosity=2),),
     "net", 'invalid argument "net" for "--{}" flag: "net" does not have the pattern=N format'),
    ("log-text-split-stream", "bool", "false", ALPHA, "true", "logging.options.text.splitStream", True, *BOOL),
    ("log-text-info-buffer-size", "quantity", "0", ALPHA, "64Ki", "logging.options.text.infoBufferSize", 65536, "x",
     QUANTITY),
    ("log-json-split-stream", "bool", "false", ALPHA, "true", "logging.options.json.splitStream", True, *BOOL),
    ("log-json-info-buffer-size", "quantity", "0", ALPHA, "1M", "logging.options.json.infoBufferSize", 1_000_000,
     "1.5", 'invalid argument "1.5" for "--{}" flag: "1.5" is no whole number of bytes within 63 bits'),
    ("healthz-port", "int32", "10256", "", "0", "healthzBindAddress", "", "70000",
     "--{}: must be from 0 to 65535, got 70000"),
    ("metrics-port", "int32", "10249", "", "0", "metricsBindAddress", "", *INT),
    ("boot-id-file", "string", "/proc/sys/kernel/random/boot_id", "", "/b", "mode", "", None, ""),
    ("machine-id-file", "string", "/etc/machine-id,/var/lib/dbus/machine-id", "", "/m", "mode", "", None, ""),
]  # fmt: skip
NAMES = [row[0] for row in ROWS]


def options_of(*arguments):
    return build_options(parse([argument for argument in arguments if argument]))


def found(options, path):
    if path.startswith("."):
        return getattr(options, path[1:])
    value = options.config
    for name in path.split("."):
        value = operator.attrgetter(json_fields(type(value))[name][0])(value)
    return value


def test_the_table_names_every_flag():
    assert [flag.name for flag in FLAGS if not flag.hidden] == NAMES


@pytest.mark.parametrize(("name", "kind", "default"), [row[:3] for row in ROWS], ids=NAMES)
def test_kind_and_default(name, kind, default):
    (flag,) = (flag for flag in FLAGS if flag.name == name)
    assert flag.kind == kind
    assert shown_default(flag) == default


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_the_default_is_that_of_the_configuration(flag):
    kind = KINDS[flag.kind]
    value = kind.parse(flag.default)
    assert kind.show(value) == shown_default(flag)
    assert flag.group in GROUPS
    assert flag.hidden or flag.usage
    if flag.path:
        default = found(options_of(), flag.path)
        assert value == default


@pytest.mark.parametrize(
    ("name", "others", "text", "path", "value"),
    [(row[0], *row[3:7]) for row in ROWS if row[4] is not None],
    ids=[row[0] for row in ROWS if row[4] is not None],
)
def test_accepted(name, others, text, path, value):
    assert found(options_of(others, f"--{name}={text}"), path) == value
    assert found(options_of(f"--{name.replace('-', '_')}={text}", others), path) == value
    if BY_NAME[name].kind != "bool":
        assert found(build_options(parse([f"--{name}", text, *filter(None, [others])])), path) == value


@pytest.mark.parametrize(
    ("name", "others", "text", "message"),
    [(row[0], row[3], *row[7:]) for row in ROWS if row[7] is not None],
    ids=[row[0] for row in ROWS if row[7] is not None],
)
def test_refused(name, others, text, message):
    with pytest.raises(ConfigError) as caught:
        options_of(others, f"--{name}={text}")
    assert str(caught.value) == message.format(name)


@pytest.mark.parametrize("name", ["text-split-stream", "json-split-stream", "text-info-buffer-size"])
def test_alpha_logging_needs_its_gate(name):
    with pytest.raises(ConfigError) as caught:
        options_of(f"--log-{name}=1")
    assert str(caught.value) == f"--log-{name}: {GATE}"


def test_no_flags_are_the_default_configuration():
    assert options_of().config == KubeProxyConfiguration()
