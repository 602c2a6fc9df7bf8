"""Checks the values of a configuration, independent of the node: reports all mistakes, and notices about valid values.
The rules are those of the Go kube-proxy 1.36, with two exceptions: mode may be userspace, and metricsBindAddress may be
empty (only by flag), which means no metrics server, as upstream documents."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import get_args

from kubeproxy.config.fields import value_at
from kubeproxy.config.gates import LATER, gate_enabled, gate_problem, gate_warnings
from kubeproxy.config.messages import Mistake, negative, not_positive, not_strict
from kubeproxy.config.modes import DEFAULT, MODES, NODEPORT_WORDS, PRIMARY_ADDRESS, bit_mistakes
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.model.addresses import pack, parse_cidr, split_host_port
from kubeproxy.model.world import LocalMode

LOCAL_MODES: tuple[LocalMode, ...] = get_args(LocalMode)
HIDDEN_METRICS_VERSION = "1.35"
"""The only release of which hidden metrics can be shown: the minor release before 1.36."""

_MAX_VERBOSITY = (1 << 31) - 1
_ALPHA_LOGGING = tuple(
    f"logging.options.{format_}.{name}" for format_ in ("text", "json") for name in ("splitStream", "infoBufferSize")
)
_POSITIVE = ("configSyncPeriod", "logging.flushFrequency")
_NOT_NEGATIVE = (
    "clientConnection.burst",
    *(f"conntrack.{name}" for name in ("maxPerCore", "min", "tcpEstablishedTimeout", "tcpCloseWaitTimeout")),
    *(f"conntrack.{name}" for name in ("udpTimeout", "udpStreamTimeout")),
)
_DUAL_STACK = "expected one CIDR or one of each IP family, like 10.100.0.0/16,fde4:8dba:82e1::/48"


def validate(config: KubeProxyConfiguration) -> list[Mistake]:
    """Return all mistakes in the values of a configuration; its types are valid."""
    return [
        *_gates(config),
        *_logging(config),
        *_numbers(config),
        *_modes(config),
        *_addresses(config),
        *_cidrs(config),
        *_legacy(config),
        *(_beyond_upstream(config) if config.strict else ()),
    ]


def notices(config: KubeProxyConfiguration) -> Iterator[str]:
    """Yield a sentence for each valid value that has no effect here, or another meaning in a later release. Since 1.37
    the Go kube-proxy warns about an unset mode, because the default will be nftables in 1.40 (KEP-5343)."""
    yield from gate_warnings(config.feature_gates)
    if not config.mode:
        yield (
            f"mode is not set, which means {DEFAULT.name} here and iptables in the Go kube-proxy before 1.40. "
            "Set mode, so that both proxies use the same mode"
        )


def _gates(config: KubeProxyConfiguration) -> Iterator[Mistake]:
    for name, value in config.feature_gates.items():
        if mistake := gate_problem(name, value):
            yield Mistake(f"featureGates.{name}", mistake)


def _logging(config: KubeProxyConfiguration) -> Iterator[Mistake]:
    on, logging = partial(gate_enabled, config.feature_gates), config.logging
    if logging.format not in ("text", "json"):
        yield Mistake("logging.format", f'expected text or json, got "{logging.format}"')
    if logging.format == "json" and not on("LoggingBetaOptions"):
        yield Mistake("logging.format", "json needs the feature gate LoggingBetaOptions=true")
    for path in _ALPHA_LOGGING if not on("LoggingAlphaOptions") else ():
        if value_at(config, path):
            yield Mistake(path, "needs the feature gate LoggingAlphaOptions=true")
    if logging.verbosity > _MAX_VERBOSITY:
        yield Mistake("logging.verbosity", f"must be at most {_MAX_VERBOSITY}, got {logging.verbosity}")
    if logging.vmodule and logging.format == "json":
        yield Mistake("logging.vmodule", "only works with the text log format")
    for index, item in enumerate(logging.vmodule):
        if not item.file_pattern or set("=,") & set(item.file_pattern):
            message = f'expected a file pattern without "=" and ",", got "{item.file_pattern}"'
            yield Mistake(f"logging.vmodule[{index}].filePattern", message)
        if item.verbosity > _MAX_VERBOSITY:
            yield Mistake(f"logging.vmodule[{index}].verbosity", f"must be at most {_MAX_VERBOSITY}")


def _numbers(config: KubeProxyConfiguration) -> Iterator[Mistake]:
    mode, sync, shortest = config.of_mode, config.syncs.sync_period, config.syncs.min_sync_period
    sync_path, shortest_path = mode.path(config, "sync_period"), mode.path(config, "min_sync_period")
    # checked in every mode, like upstream
    yield from bit_mistakes("iptables.masqueradeBit", config.iptables.masquerade_bit)
    if not -1000 <= config.oom_score_adj <= 1000:
        yield Mistake("oomScoreAdj", f"must be from -1000 to 1000, got {config.oom_score_adj}")
    yield from not_positive([*((path, value_at(config, path)) for path in _POSITIVE), (sync_path, sync)])
    yield from negative([*((path, value_at(config, path)) for path in _NOT_NEGATIVE), (shortest_path, shortest)])
    if 0 < sync < shortest:
        yield Mistake(shortest_path, f"must not exceed {sync_path} ({sync}), got {shortest}")


# Narrower than the kernel's dev_valid_name, which allows quotes and wildcards: names become part of a ruleset.
_INTERFACE = re.compile(r"[A-Za-z0-9_.@:+-]{1,15}")


def _modes(config: KubeProxyConfiguration) -> Iterator[Mistake]:
    if config.mode and config.mode not in MODES:
        hint = "; kernelspace is for Windows" if config.mode == "kernelspace" else ""
        message = f'expected {", ".join(MODES)}, or "" for {DEFAULT.name}, got "{config.mode}"{hint}'
        yield Mistake("mode", message)
    else:
        yield from config.of_mode.mistakes(config)
    if config.detect_local_mode and config.detect_local_mode not in LOCAL_MODES:
        message = f'expected {", ".join(LOCAL_MODES)}, or "" for ClusterCIDR, got "{config.detect_local_mode}"'
        yield Mistake("detectLocalMode", message)
    for mode, path, value in (
        ("BridgeInterface", "detectLocal.bridgeInterface", config.detect_local.bridge_interface),
        ("InterfaceNamePrefix", "detectLocal.interfaceNamePrefix", config.detect_local.interface_name_prefix),
    ):
        if config.detect_local_mode != mode:
            continue
        if not value:
            yield Mistake(path, f"must not be empty with detectLocalMode {mode}")
        elif not _INTERFACE.fullmatch(value):
            yield Mistake(path, f'expected up to 15 characters of an interface name, got "{value}"')


def _addresses(config: KubeProxyConfiguration) -> Iterator[Mistake]:
    if pack(config.bind_address) is None:
        yield Mistake("bindAddress", f'expected an IP address, got "{config.bind_address}"')
    for path, value in config.own_addresses.items():
        if value and (message := _host_port_mistake(value)):
            yield Mistake(path, message)


def _host_port_mistake(value: str) -> str | None:
    parts = split_host_port(value)
    if parts is None or pack(parts[0]) is None:
        return f'expected IP:port like 0.0.0.0:10256 or [::]:10256, got "{value}"'
    if not re.fullmatch(r"[0-9]{1,5}", parts[1]) or not 1 <= int(parts[1]) <= 65535:
        return f'expected a port from 1 to 65535, got "{parts[1]}"'
    return None


def _cidrs(config: KubeProxyConfiguration) -> Iterator[Mistake]:
    if config.cluster_cidr and config.local_mode == "ClusterCIDR":
        networks = [parse_cidr(part) for part in config.cluster_cidrs]
        families = [len(network[0]) for network in networks if network is not None]
        if len(families) < len(networks) or len(networks) > 2 or len(set(families)) < len(families):
            yield Mistake("clusterCIDR", f'{_DUAL_STACK}; got "{config.cluster_cidr}"')
    for index, part in enumerate(config.node_port_addresses):
        if part not in NODEPORT_WORDS and parse_cidr(part) is None:
            words = ", ".join(f'"{word}"' for word in NODEPORT_WORDS)
            message = f'expected a CIDR like 192.0.2.0/24, or one of {words}, got "{part}"'
            yield Mistake(f"nodePortAddresses[{index}]", message)


def _legacy(config: KubeProxyConfiguration) -> Iterator[Mistake]:
    if config.show_hidden_metrics_for_version not in ("", HIDDEN_METRICS_VERSION):
        message = f'only "{HIDDEN_METRICS_VERSION}" can be shown, got "{config.show_hidden_metrics_for_version}"'
        yield Mistake("showHiddenMetricsForVersion", message)


def _beyond_upstream(config: KubeProxyConfiguration) -> Iterator[Mistake]:
    if config.mode == "userspace":
        yield Mistake("mode", not_strict("the mode userspace"))
    for name in config.feature_gates.keys() & LATER.keys():
        yield Mistake(f"featureGates.{name}", not_strict(f"the gate {name}"))
    for index, part in enumerate(config.node_port_addresses):
        if part in NODEPORT_WORDS and config.node_port_addresses != PRIMARY_ADDRESS:
            beside = " beside other addresses" if part in PRIMARY_ADDRESS else ""
            yield Mistake(f"nodePortAddresses[{index}]", not_strict(f'the word "{part}"{beside}'))
