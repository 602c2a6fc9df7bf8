"""What makes a configuration invalid; all of it is found in one go. Pure, and knows nothing of the node.

The rules are those of the Go kube-proxy 1.36. Two are wider here: mode may be userspace, and an empty
metricsBindAddress (which only a flag can give) means no metrics server, as its documentation has always promised.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from kubeproxy.config.addresses import parse_cidr, parse_ip, split_host_port
from kubeproxy.config.decode import Problem
from kubeproxy.config.gates import alpha_logging, gate_problem
from kubeproxy.config.types import IPTables, KubeProxyConfiguration, Logging, OutputRouting

MODES = ("nftables", "iptables", "ipvs", "userspace")
LOCAL_MODES = ("ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix")
HIDDEN_METRICS_VERSION = "1.35"
"""The only version whose hidden metrics can be shown: the minor release before 1.36."""

_MAX_VERBOSITY = (1 << 31) - 1
_DUAL_STACK = "expected one CIDR or one of each IP family, like 10.100.0.0/16,fde4:8dba:82e1::/48"


def validate(config: KubeProxyConfiguration) -> list[Problem]:
    """Every mistake in the values of a configuration whose types are right; empty when it can be run."""
    return [
        *_gates(config),
        *_logging(config.logging, alpha_options=alpha_logging(config.feature_gates)),
        *_numbers(config),
        *_durations(config),
        *_modes(config),
        *_addresses(config),
        *_cidrs(config),
        *_legacy(config),
    ]


def _gates(config: KubeProxyConfiguration) -> Iterator[Problem]:
    for name, value in config.feature_gates.items():
        problem = gate_problem(name, value)
        if problem:
            yield Problem(f"featureGates.{name}", problem)


def _logging(logging: Logging, *, alpha_options: bool) -> Iterator[Problem]:
    if logging.format not in ("text", "json"):
        yield Problem("logging.format", f'expected text or json, got "{logging.format}"')
    if logging.flush_frequency <= 0:
        yield Problem("logging.flushFrequency", f"must be greater than 0, got {logging.flush_frequency}")
    if logging.verbosity > _MAX_VERBOSITY:
        yield Problem("logging.verbosity", f"must be at most {_MAX_VERBOSITY}, got {logging.verbosity}")
    if logging.vmodule and logging.format == "json":
        yield Problem("logging.vmodule", "only works with the text log format")
    for index, item in enumerate(logging.vmodule):
        if not item.file_pattern or set("=,") & set(item.file_pattern):
            message = f'expected a file pattern without "=" and ",", got "{item.file_pattern}"'
            yield Problem(f"logging.vmodule[{index}].filePattern", message)
        if item.verbosity > _MAX_VERBOSITY:
            yield Problem(f"logging.vmodule[{index}].verbosity", f"must be at most {_MAX_VERBOSITY}")
    if not alpha_options:
        yield from _routing("logging.options.text", logging.options.text)
        yield from _routing("logging.options.json", logging.options.json)


def _routing(path: str, options: OutputRouting) -> Iterator[Problem]:
    for name, used in (("splitStream", options.split_stream), ("infoBufferSize", options.info_buffer_size)):
        if used:
            yield Problem(f"{path}.{name}", "needs the feature gate LoggingAlphaOptions=true")


def _numbers(config: KubeProxyConfiguration) -> Iterator[Problem]:
    conntrack = config.conntrack
    bounds = [
        ("iptables.masqueradeBit", config.iptables.masquerade_bit, 0, 31),
        ("oomScoreAdj", config.oom_score_adj, -1000, 1000),
    ]
    inherited = not config.mode and config.nftables.masquerade_bit == config.iptables.masquerade_bit
    if config.active_mode == "nftables" and not inherited:
        bounds.append(("nftables.masqueradeBit", config.nftables.masquerade_bit, 0, 31))
    for path, value, low, high in bounds:
        if not low <= value <= high:
            yield Problem(path, f"must be from {low} to {high}, got {value}")
    for path, value in (
        ("clientConnection.burst", config.client_connection.burst),
        ("conntrack.maxPerCore", conntrack.max_per_core),
        ("conntrack.min", conntrack.min),
    ):
        if value < 0:
            yield Problem(path, f"must not be negative, got {value}")


def _durations(config: KubeProxyConfiguration) -> Iterator[Problem]:
    conntrack, ipvs = config.conntrack, config.ipvs
    sync, shortest = config.sync_period, config.min_sync_period
    sync_path, shortest_path = _sync_path(config, "syncPeriod"), _sync_path(config, "minSyncPeriod")
    for path, value in (("configSyncPeriod", config.config_sync_period), (sync_path, sync)):
        if value <= 0:
            yield Problem(path, f"must be greater than 0, got {value}")
    not_negative = [
        (shortest_path, shortest),
        ("conntrack.tcpEstablishedTimeout", conntrack.tcp_established_timeout),
        ("conntrack.tcpCloseWaitTimeout", conntrack.tcp_close_wait_timeout),
        ("conntrack.udpTimeout", conntrack.udp_timeout),
        ("conntrack.udpStreamTimeout", conntrack.udp_stream_timeout),
    ]
    if config.active_mode == "ipvs":
        not_negative += [
            ("ipvs.tcpTimeout", ipvs.tcp_timeout),
            ("ipvs.tcpFinTimeout", ipvs.tcp_fin_timeout),
            ("ipvs.udpTimeout", ipvs.udp_timeout),
        ]
    for path, value in not_negative:
        if value < 0:
            yield Problem(path, f"must not be negative, got {value}")
    if 0 < sync < shortest:
        yield Problem(shortest_path, f"must not exceed {sync_path} ({sync}), got {shortest}")


def _sync_path(config: KubeProxyConfiguration, name: str) -> str:
    """The path of the active mode's syncPeriod or minSyncPeriod: where the user wrote it, if it was inherited."""
    attribute = {"syncPeriod": "sync_period", "minSyncPeriod": "min_sync_period"}[name]
    usual, written = getattr(IPTables(), attribute), getattr(config.iptables, attribute)
    inherited = not config.mode and getattr(config.nftables, attribute) == written != usual
    own = config.active_mode if config.active_mode in ("ipvs", "nftables") else "iptables"
    return f"iptables.{name}" if inherited else f"{own}.{name}"


# Narrower than the kernel's dev_valid_name, which lets quotes and wildcards pass: these go into a ruleset.
_INTERFACE = re.compile(r"[A-Za-z0-9_.@:+-]{1,15}")


def _modes(config: KubeProxyConfiguration) -> Iterator[Problem]:
    if config.mode and config.mode not in MODES:
        hint = "; kernelspace is for Windows" if config.mode == "kernelspace" else ""
        message = f'expected {", ".join(MODES)}, or "" for nftables, got "{config.mode}"{hint}'
        yield Problem("mode", message)
    if config.detect_local_mode and config.detect_local_mode not in LOCAL_MODES:
        message = f'expected {", ".join(LOCAL_MODES)}, or "" for ClusterCIDR, got "{config.detect_local_mode}"'
        yield Problem("detectLocalMode", message)
    for mode, path, value in (
        ("BridgeInterface", "detectLocal.bridgeInterface", config.detect_local.bridge_interface),
        ("InterfaceNamePrefix", "detectLocal.interfaceNamePrefix", config.detect_local.interface_name_prefix),
    ):
        if config.detect_local_mode != mode:
            continue
        if not value:
            yield Problem(path, f"must not be empty with detectLocalMode {mode}")
        elif not _INTERFACE.fullmatch(value):
            yield Problem(path, f'expected up to 15 characters of an interface name, got "{value}"')


def _addresses(config: KubeProxyConfiguration) -> Iterator[Problem]:
    if parse_ip(config.bind_address) is None:
        yield Problem("bindAddress", f'expected an IP address, got "{config.bind_address}"')
    for path, value in (
        ("healthzBindAddress", config.healthz_bind_address),
        ("metricsBindAddress", config.metrics_bind_address),
    ):
        if value and (message := _host_port_problem(value)):
            yield Problem(path, message)


def _host_port_problem(value: str) -> str | None:
    parts = split_host_port(value)
    if parts is None or parse_ip(parts[0]) is None:
        return f'expected IP:port like 0.0.0.0:10256 or [::]:10256, got "{value}"'
    if not re.fullmatch(r"[0-9]{1,5}", parts[1]) or not 1 <= int(parts[1]) <= 65535:
        return f'expected a port from 1 to 65535, got "{parts[1]}"'
    return None


def _cidrs(config: KubeProxyConfiguration) -> Iterator[Problem]:
    if config.cluster_cidr and config.local_mode == "ClusterCIDR":
        networks = [parse_cidr(part) for part in config.cluster_cidrs]
        families = [network.version for network in networks if network is not None]
        if len(families) < len(networks) or len(networks) > 2 or len(set(families)) < len(families):
            yield Problem("clusterCIDR", f'{_DUAL_STACK}; got "{config.cluster_cidr}"')
    for index, part in enumerate(config.node_port_addresses):
        if part == "primary" and len(config.node_port_addresses) > 1:
            yield Problem(f"nodePortAddresses[{index}]", '"primary" cannot be combined with CIDRs')
        elif part != "primary" and parse_cidr(part) is None:
            yield Problem(
                f"nodePortAddresses[{index}]", f'expected a CIDR like 192.0.2.0/24, or "primary", got "{part}"'
            )
    if config.active_mode == "ipvs":
        for index, part in enumerate(config.ipvs.exclude_cidrs):
            if parse_cidr(part) is None:
                yield Problem(f"ipvs.excludeCIDRs[{index}]", f'expected a CIDR like 192.0.2.0/24, got "{part}"')


def _legacy(config: KubeProxyConfiguration) -> Iterator[Problem]:
    if config.show_hidden_metrics_for_version not in ("", HIDDEN_METRICS_VERSION):
        message = f'only "{HIDDEN_METRICS_VERSION}" can be shown, got "{config.show_hidden_metrics_for_version}"'
        yield Problem("showHiddenMetricsForVersion", message)
    if parse_port_range(config.port_range) is None:
        yield Problem("portRange", f'expected ports like 300-2000, 300+1700 or 300, got "{config.port_range}"')
    if config.udp_idle_timeout <= 0:
        yield Problem("udpIdleTimeout", f"must be greater than 0, got {config.udp_idle_timeout}")


def parse_port_range(text: str) -> range | None:
    """The ports of "low-high", "low+count" or "port"; an empty range for "" and "0" (any port), None when invalid."""
    match = re.fullmatch(r"([0-9]{1,5})(?:([-+])([0-9]{1,5}))?", text.strip())
    if not text.strip() or text.strip() in ("0", "0-0"):
        return range(0)
    if match is None:
        return None
    low = int(match[1])
    high = {"-": int(match[3] or 0), "+": low + int(match[3] or 0), None: low}[match[2]]
    return range(low, high + 1) if 0 < low <= high <= 65535 else None
