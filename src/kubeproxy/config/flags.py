"""The table of all command line flags. Fast to import. pflag.py parses a command line, and options.py applies it.
Names, kinds and defaults are the same as in the Go kube-proxy 1.36; the help text notes differences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from kubeproxy.features import FEATURES, STARTUP_TAINT, Feature


class Flag(NamedTuple):
    """One flag."""

    name: str
    kind: str  # a key of pflag.KINDS
    default: str  # in the notation of `kind`
    group: str
    path: str  # the JSON path of the field that the flag sets; "" for another effect
    usage: str
    deprecated: str = ""  # the last part of the deprecation notice
    hidden: bool = False


GENERAL, CLIENT, SERVERS, BACKEND, LOCAL, CONNTRACK, LOGGING, LEGACY = (
    "General",
    "Kubernetes API",
    "Addresses and servers",
    "Proxy modes",
    "Local traffic and NodePorts",
    "Connection tracking",
    "Logging",
    "Deprecated",
)
GROUPS = (GENERAL, CLIENT, SERVERS, BACKEND, LOCAL, CONNTRACK, LOGGING, LEGACY)


def _features(group: str, *features: Feature[Any]) -> Iterator[Flag]:
    return (Flag(each.flag, each.kind, str(each.default).lower(), group, "", each.usage) for each in features)


_INTERVAL = "The interval of complete checks and repairs (like 5s, 1m, 2h22m), greater than 0."
_MINIMUM = "The least time between two syncs (like 5s, 1m). 0 applies each change immediately."

FLAGS = (
    Flag("config", "string", "", GENERAL, "", "The configuration file. The file replaces the flags, see below."),
    Flag("write-config-to", "string", "", GENERAL, "", "Write the configuration to this file and exit."),
    Flag("manifests", "string", "", GENERAL, "",
         "Read Services, EndpointSlices and Nodes from the YAML and JSON files of this folder instead of an API server;"
         " changed files are read again. (Not in the Go kube-proxy.)"),
    Flag("control-socket", "string", "/run/kube-proxy/control.sock", GENERAL, "",
         "The unix socket by which commands such as `kube-proxy why` query the running proxy; only root and "
         "its owner can open it. Empty for none. (Not in the Go kube-proxy.)"),
    Flag("cleanup", "bool", "false", GENERAL, "", "Remove the rules of all modes from the kernel and exit."),
    Flag("init-only", "bool", "false", GENERAL, "",
         "Do the steps that need full root privileges and exit; afterwards CAP_NET_ADMIN is enough to run."),
    *_features(GENERAL, STARTUP_TAINT),
    Flag("feature-gates", "mapStringBool", "", GENERAL, "featureGates",
         "Pairs like A=true,B=false for features that are not final. All gates of Kubernetes 1.36 are accepted;"
         " a proxy reads:"),
    Flag("config-sync-period", "duration", "15m0s", GENERAL, "configSyncPeriod",
         "The interval at which the state from the API server is refreshed, greater than 0."),
    Flag("oom-score-adj", "int32", "-999", GENERAL, "oomScoreAdj",
         "The oom_score_adj of this process, from -1000 to 1000."),
    Flag("show-hidden-metrics-for-version", "string", "", GENERAL, "showHiddenMetricsForVersion",
         'Show metrics that the previous minor release ("1.35") has hidden.'),
    Flag("version", "version", "false", GENERAL, "", "Print the version and exit; --version=raw prints the details."),
    Flag("help", "bool", "false", GENERAL, "", "Print this help and exit."),

    Flag("kubeconfig", "string", "", CLIENT, "clientConnection.kubeconfig",
         "The kubeconfig file. Without --kubeconfig and --master, the service account of the pod is used."),
    Flag("master", "string", "", CLIENT, "", "The API server's address; it takes precedence over the kubeconfig."),
    Flag("kube-api-content-type", "string", "application/vnd.kubernetes.protobuf", CLIENT,
         "clientConnection.contentType", "Accepted for compatibility; requests use JSON."),
    Flag("kube-api-burst", "int32", "10", CLIENT, "clientConnection.burst", "Requests that may be sent in one burst."),
    Flag("kube-api-qps", "float32", "5", CLIENT, "clientConnection.qps", "Requests to the API server per second."),

    Flag("hostname-override", "string", "", SERVERS, "",
         "The name of this Node, in place of the host name and of the name in the configuration file."),
    Flag("bind-address", "ip", "0.0.0.0", SERVERS, "bindAddress",  # noqa: S104 - no socket is bound to it
         "The Node's primary IP, in place of the Node object's. No socket is bound to this address."),
    Flag("healthz-bind-address", "ipport", "0.0.0.0:10256", SERVERS, "healthzBindAddress",
         "The address of the health server. Empty for none."),
    Flag("metrics-bind-address", "ipport", "127.0.0.1:10249", SERVERS, "metricsBindAddress",
         "The address of the metrics server. Empty for none."),
    Flag("page-from", "strings", "127.0.0.0/8,::1/128", SERVERS, "",
         "The clients, as CIDRs, that may open the page /ui/ of the metrics server; empty for none. kubectl "
         "port-forward and ssh -L connect from loopback. (Not in the Go kube-proxy.)"),
    Flag("page-hosts", "strings", "", SERVERS, "",
         "Names and addresses without a port by which, in addition to localhost, a browser may request the page, "
         "such as the name of a reverse proxy. (Not in the Go kube-proxy.)"),
    Flag("bind-address-hard-fail", "bool", "false", SERVERS, "bindAddressHardFail",
         "Exit when one of these servers cannot be started, instead of trying again."),
    Flag("profiling", "bool", "false", SERVERS, "enableProfiling", "Serve /debug/pprof on the metrics server."),

    Flag("proxy-mode", "ProxyMode", "", BACKEND, "mode",
         "nftables (the default; the Go kube-proxy's is iptables), iptables, ipvs or userspace."),
    Flag("strict", "bool", "false", BACKEND, "strict",
         "Treat packets as the Go kube-proxy 1.36 does, except for refused addresses and other fixes that"
         " docs/migrate.md lists. An empty mode means iptables, all features of this program are off, and values that"
         " the Go kube-proxy does not have are errors. (Not in the Go kube-proxy.)"),
    Flag("masquerade-all", "bool", "false", BACKEND, "", "Masquerade all traffic to cluster IPs."),
    *_features(BACKEND, *(each for each in FEATURES.values() if each is not STARTUP_TAINT)),
    Flag("iptables-masquerade-bit", "int32", "14", BACKEND, "iptables.masqueradeBit",
         "The bit of the firewall mark for packets to masquerade, from 0 to 31."),
    Flag("iptables-localhost-nodeports", "bool", "true", BACKEND, "iptables.localhostNodePorts",
         "Whether NodePorts can be reached on 127.0.0.1 (iptables mode, IPv4)."),
    Flag("iptables-sync-period", "duration", "30s", BACKEND, "", _INTERVAL + " For all modes but ipvs."),
    Flag("iptables-min-sync-period", "duration", "1s", BACKEND, "",
         _MINIMUM + " For all modes but ipvs; nftables mode has 0s unless this flag is given."),
    Flag("ipvs-sync-period", "duration", "30s", BACKEND, "", _INTERVAL),
    Flag("ipvs-min-sync-period", "duration", "1s", BACKEND, "", _MINIMUM),
    Flag("ipvs-scheduler", "string", "", BACKEND, "ipvs.scheduler", "The ipvs scheduler; rr when empty."),
    Flag("ipvs-exclude-cidrs", "strings", "", BACKEND, "ipvs.excludeCIDRs",
         "CIDRs of virtual servers that ipvs mode does not change."),
    Flag("ipvs-strict-arp", "bool", "false", BACKEND, "ipvs.strictARP", "Set arp_ignore to 1 and arp_announce to 2."),
    Flag("ipvs-tcp-timeout", "duration", "0s", BACKEND, "ipvs.tcpTimeout",
         "Timeout of idle TCP connections in ipvs; 0 keeps the kernel's value."),
    Flag("ipvs-tcpfin-timeout", "duration", "0s", BACKEND, "ipvs.tcpFinTimeout",
         "Timeout of TCP connections in ipvs after a FIN; 0 keeps the kernel's value."),
    Flag("ipvs-udp-timeout", "duration", "0s", BACKEND, "ipvs.udpTimeout",
         "Timeout of UDP flows in ipvs; 0 keeps the kernel's value."),
    Flag("proxy-port-range", "string", "", BACKEND, "portRange",
         "Ports that userspace mode may listen on: 300-2000, 300+1700; empty for any."),
    Flag("udp-timeout", "duration", "250ms", BACKEND, "udpIdleTimeout",
         "The timeout of an idle UDP flow in userspace mode, greater than 0."),

    Flag("detect-local-mode", "LocalMode", "", LOCAL, "detectLocalMode",
         "The method of recognising traffic of this node's pods: ClusterCIDR (the default), NodeCIDR, "
         "BridgeInterface or"
         " InterfaceNamePrefix."),
    Flag("cluster-cidr", "string", "", LOCAL, "clusterCIDR",
         "The pods' addresses: one CIDR, or one of each IP family, separated by a comma."),
    Flag("pod-bridge-interface", "string", "", LOCAL, "detectLocal.bridgeInterface",
         "The bridge of this node's pods, for BridgeInterface."),
    Flag("pod-interface-name-prefix", "string", "", LOCAL, "detectLocal.interfaceNamePrefix",
         "The prefix of the names of the pods' interfaces, for InterfaceNamePrefix."),
    Flag("nodeport-addresses", "strings", "", LOCAL, "nodePortAddresses",
         "The node's addresses that serve NodePorts: CIDRs, or the word primary. Unset means primary in"
         " nftables mode, all local addresses in other modes."),

    Flag("conntrack-max-per-core", "int32", "32768", CONNTRACK, "conntrack.maxPerCore",
         "Connections to track for each CPU; 0 keeps the kernel's limit and ignores --conntrack-min."),
    Flag("conntrack-min", "int32", "131072", CONNTRACK, "conntrack.min", "The least number of connections to track."),
    Flag("conntrack-tcp-timeout-established", "duration", "24h0m0s", CONNTRACK, "conntrack.tcpEstablishedTimeout",
         "Timeout of established TCP connections; 0 keeps the kernel's value."),
    Flag("conntrack-tcp-timeout-close-wait", "duration", "1h0m0s", CONNTRACK, "conntrack.tcpCloseWaitTimeout",
         "Timeout of TCP connections in CLOSE_WAIT; 0 keeps the kernel's value."),
    Flag("conntrack-tcp-be-liberal", "bool", "false", CONNTRACK, "conntrack.tcpBeLiberal",
         "Set nf_conntrack_tcp_be_liberal to 1."),
    Flag("conntrack-udp-timeout", "duration", "0s", CONNTRACK, "conntrack.udpTimeout",
         "Timeout of UDP flows without an answer; 0 keeps the kernel's value."),
    Flag("conntrack-udp-timeout-stream", "duration", "0s", CONNTRACK, "conntrack.udpStreamTimeout",
         "Timeout of UDP flows in both directions; 0 keeps the kernel's value."),

    Flag("logging-format", "string", "text", LOGGING, "logging.format", "text or json."),
    Flag("log-flush-frequency", "duration", "5s", LOGGING, "logging.flushFrequency",
         "The maximum delay before a log line is written."),
    Flag("v", "Level", "0", LOGGING, "logging.verbosity", "The verbosity of the log."),
    Flag("vmodule", "pattern=N,...", "", LOGGING, "logging.vmodule",
         "Verbosity by source file: pattern=N,... (text format only)."),
    Flag("log-text-split-stream", "bool", "false", LOGGING, "logging.options.text.splitStream",
         "Write errors to stderr and other lines to stdout (text format; needs the gate LoggingAlphaOptions)."),
    Flag("log-text-info-buffer-size", "quantity", "0", LOGGING, "logging.options.text.infoBufferSize",
         "The buffer of the split stream, in bytes or like 1K, 2Ki, 3M (needs the gate LoggingAlphaOptions)."),
    Flag("log-json-split-stream", "bool", "false", LOGGING, "logging.options.json.splitStream",
         "Write errors to stderr and other lines to stdout (JSON format; needs the gate LoggingAlphaOptions)."),
    Flag("log-json-info-buffer-size", "quantity", "0", LOGGING, "logging.options.json.infoBufferSize",
         "The buffer of the split stream, in bytes or like 1K, 2Ki, 3M (needs the gate LoggingAlphaOptions)."),

    Flag("healthz-port", "int32", "10256", LEGACY, "", "Port of the health server; 0 for none.",
         "use --healthz-bind-address instead."),
    Flag("metrics-port", "int32", "10249", LEGACY, "", "Port of the metrics server; 0 for none.",
         "use --metrics-bind-address instead."),
    Flag("boot-id-file", "string", "/proc/sys/kernel/random/boot_id", LEGACY, "", "Accepted, without effect."),
    Flag("machine-id-file", "string", "/etc/machine-id,/var/lib/dbus/machine-id", LEGACY, "",
         "Accepted, without effect."),
    *(Flag(name, kind, default, LEGACY, "", "", "because logs go to standard error.", hidden=True)
      for name, kind, default in (
          ("add-dir-header", "bool", "false"), ("alsologtostderr", "bool", "false"),
          ("log-backtrace-at", "string", ":0"), ("log-dir", "string", ""), ("log-file", "string", ""),
          ("log-file-max-size", "string", "1800"), ("logtostderr", "bool", "true"), ("one-output", "bool", "false"),
          ("skip-headers", "bool", "false"), ("skip-log-headers", "bool", "false"),
          ("stderrthreshold", "string", "2"))),
)  # fmt: skip

BY_NAME = {flag.name: flag for flag in FLAGS}

_KEPT = (
    "config write-config-to manifests control-socket page-from page-hosts cleanup init-only master"
    " hostname-override strict version help"
)
KEPT_WITH_CONFIG = (
    frozenset(_KEPT.split())
    | FEATURES.keys()
    | {flag.name for flag in FLAGS if flag.group in (LOGGING, LEGACY) and not flag.name.endswith("-port")}
)
"""Flags that also apply with --config, or that have no effect at all. The file overrides all other flags."""
