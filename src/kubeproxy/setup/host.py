"""Determines this node's settings at the start: name, address families, sysctls, OOM score. Source: docs/reference.md
"Start" 3, 6 to 9 and 12."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast

from kubeproxy.config.fields import ConntrackSettings
from kubeproxy.config.gates import gate_enabled
from kubeproxy.config.modes import EVERY_ADDRESS, spelled_out
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.errors import ConfigError, Unsupported
from kubeproxy.features import Features
from kubeproxy.kernel.proc import sysctl
from kubeproxy.kernel.route import local_addresses
from kubeproxy.model.addresses import Family, family_of, is_loopback, pack, parse_networks, split_host_port
from kubeproxy.model.objects import Node
from kubeproxy.model.world import PRIMARY, LocalMode, Settings, node_addresses, pod_cidrs, primary_family
from kubeproxy.setup import modes

log = logging.getLogger("kubeproxy.host")


def node_name(override: str) -> str:
    """Return the Node's name, which is the override or the host's name, trimmed and in lower case."""
    name = (override or socket.gethostname()).strip().lower()
    if not name:
        raise ConfigError("hostnameOverride: the host has no name; set hostnameOverride to the Node's name")
    return name


def families(primary: Family | None = None, proc: Path = Path("/proc")) -> tuple[Family, ...]:
    """Return the families that the kernel supports. Raises Unsupported if the kernel does not support the primary
    family."""
    disabled = proc / "sys/net/ipv6/conf/all/disable_ipv6"
    has_ipv6 = (proc / "net/if_inet6").exists() and not (disabled.exists() and disabled.read_text().strip() == "1")
    found = (Family.IPV4, Family.IPV6) if has_ipv6 else (Family.IPV4,)
    if primary is not None and primary not in found:
        raise Unsupported(
            "bindAddress is an IPv6 address, but IPv6 is off in this kernel: set net.ipv6.conf.all.disable_ipv6=0, "
            "or give an IPv4 address"
        )
    return found


_CHECKED_AGAIN = (0.1, 0.4)
"""Seconds before each repetition of a failed check of the families."""


class Supported(NamedTuple):
    """The families that a mode supports on this node, and the missing requirement of the other family ('' if none)."""

    families: tuple[Family, ...]
    lack: str = ""

    @property
    def words(self) -> str:
        """A sentence about the missing requirement."""
        return f"Services are served by {self.families[0].label} alone: {self.lack}"


def supported(
    found: tuple[Family, ...], primary: Family | None, check: Callable[[Sequence[Family]], None]
) -> Supported:
    """Return the families that pass `check`, which raises Unsupported if a family's requirement is missing.

    Only the primary family is required; if there is no primary family (None), either family may be missing. A failed
    check is repeated, because memory may be short for a moment. Raises Unsupported if the primary family, or every
    family, fails. Source: platformCheckSupported of cmd/kube-proxy."""
    lacks: list[Unsupported] = []
    for pause in (0.0, *_CHECKED_AGAIN):
        time.sleep(pause)
        try:
            check(found)
        except Unsupported as error:
            if len(found) == 1:
                raise
            lacks.append(error)
        else:
            return Supported(found)
    for family in found if primary is None else (primary,):
        try:
            check((family,))
        except Unsupported as error:
            lacks.append(error)
        else:
            return Supported((family,), str(lacks[-1]))
    raise lacks[0]


def settings(config: KubeProxyConfiguration, features: Mapping[str, Any] = MappingProxyType({})) -> Settings:
    """Return the node's settings from the configuration, the values of features, and the host. Raises Unsupported."""
    bind = pack(config.bind_address) or b""
    bind = bind if any(bind) else b""
    return Settings(
        node_name=node_name(config.hostname_override),
        families=families(family_of(bind) if bind else None),
        local_mode=cast(LocalMode, config.local_mode),
        cluster_cidrs=config.cluster_cidrs,
        bridge=config.detect_local.bridge_interface,
        prefix=config.detect_local.interface_name_prefix,
        nodeport_addresses=spelled_out(config.node_port_addresses) or config.of_mode.nodeport_addresses,
        loopback_nodeports=config.of_mode.loopback_nodeports(config),
        bind_address=bind,
        masquerade_all=config.masquerades.masquerade_all,
        masquerade_mark=1 << config.masquerades.masquerade_bit,
        features=Features(features, config.of_mode.name, config.strict),
        external_ips="served" if gate_enabled(config.feature_gates, "AllowServiceExternalIPs") else "ignored",
    )


def packed_local_addresses(wanted: Sequence[Family]) -> Mapping[Family, list[bytes]]:
    """Return this node's packed addresses by family, except addresses of Services (see modes.interfaces)."""
    without = modes.interfaces()
    return {
        family: [address.ip for address in local_addresses(family) if address.interface not in without]
        for family in wanted
    }


LARGEST_SCALED: Final = 1_048_576
"""The maximum table size that is computed from the number of CPUs (kube-proxy 1.36)."""


def conntrack_sysctls(conntrack: ConntrackSettings, cpus: int | None = None) -> list[tuple[str, int]]:
    """Return the sysctls for a conntrack block, in order. `cpus` defaults to the number of CPUs of this machine.

    The table size is maxPerCore times the CPUs, but at least min. If maxPerCore times the CPUs exceeds LARGEST_SCALED,
    the size is LARGEST_SCALED instead. A value of 0 leaves its sysctl unchanged. Source: kube-proxy v1.36
    pkg/proxy/conntrack/sysctls.go."""
    scaled = conntrack.max_per_core * (cpus or os.cpu_count() or 1)
    size = LARGEST_SCALED if scaled > LARGEST_SCALED else max(scaled, conntrack.min)
    wanted = (
        (sysctl.NF_CONNTRACK_MAX, size if scaled else 0),
        (sysctl.TCP_TIMEOUT_ESTABLISHED, int(conntrack.tcp_established_timeout)),
        (sysctl.TCP_TIMEOUT_CLOSE_WAIT, int(conntrack.tcp_close_wait_timeout)),
        (sysctl.UDP_TIMEOUT, int(conntrack.udp_timeout)),
        (sysctl.UDP_TIMEOUT_STREAM, int(conntrack.udp_stream_timeout)),
        (sysctl.TCP_BE_LIBERAL, int(conntrack.tcp_be_liberal)),
    )
    return [(key, value) for key, value in wanted if value]


def tune(conntrack: ConntrackSettings, oom_score_adj: int) -> None:
    """Set the configured sysctls and OOM score. Raises ApplyError or Unsupported."""
    written = sysctl.apply_settings(conntrack_sysctls(conntrack))
    if written:
        log.info("Set sysctls keys=%s", ",".join(written))
    try:
        Path("/proc/self/oom_score_adj").write_text(str(oom_score_adj))
    except OSError as error:
        log.warning("Cannot set oom_score_adj=%d error=%r", oom_score_adj, error.strerror)


def check_families(wanted: Settings) -> None:
    """Raise ConfigError if clusterCIDR has no network of this node's only family. Source: docs/reference.md "Start" 9;
    checkBadIPConfig of cmd/kube-proxy."""
    if wanted.local_mode != "ClusterCIDR":
        return
    missing = _without_network(wanted)
    if len(wanted.families) == 1 and wanted.cluster_cidrs and missing:
        raise ConfigError(
            f"clusterCIDR: {','.join(wanted.cluster_cidrs)} has no {missing[0].label} network, but this node has "
            f"{missing[0].label} only: add one, or turn the other IP family on"
        )


def warn_of_addresses(config: KubeProxyConfiguration, wanted: Settings, node: Node | None) -> None:
    """Log a warning about each configured address that does not fit the Node's families; `node` is None if unknown.
    Source: docs/reference.md "Start" 6 and 9; checkBadConfig and checkBadIPConfig of cmd/kube-proxy."""
    for warning in (
        *_open_nodeports(config, wanted, node),
        *_of_the_other_family(config, wanted, node),
        *_unmasqueraded(wanted, node),
    ):
        log.warning("%s", warning)


def _open_nodeports(config: KubeProxyConfiguration, wanted: Settings, node: Node | None) -> Iterator[str]:
    known = {family for family in wanted.families if not all(map(is_loopback, node_addresses(wanted, node, family)))}
    if not config.node_port_addresses and wanted.nodeport_addresses == EVERY_ADDRESS:
        yield "nodePortAddresses is unset: NodePorts answer on all local addresses, with [primary] on the node's"
        return
    if wanted.nodeport_addresses == (PRIMARY,) and not known:
        yield "no address of this node is known: NodePorts answer on all local addresses"
        return
    named = {family for family in wanted.families if _any_of(family, wanted.nodeport_addresses)}
    named |= known if PRIMARY in wanted.nodeport_addresses else set()
    lists = (*config.networks.values(), pod_cidrs(node))
    dual_stack = any(all(_any_of(family, networks) for family in Family) for networks in lists)
    for family in wanted.families:
        first = family is _first(wanted, node)
        if family not in named and (dual_stack or first):
            why = "the Node's first address is in this family" if first else "the cluster appears to be dual-stack"
            yield (
                f"nodePortAddresses has no {family.label} network, but {why}: NodePorts answer on all local "
                f"{family.label} addresses"
            )


def _of_the_other_family(config: KubeProxyConfiguration, wanted: Settings, node: Node | None) -> Iterator[str]:
    """Yield a sentence for each field that has addresses, but none in the family of the Node's first address."""
    fields: dict[str, Sequence[str]] = {"clusterCIDR": wanted.cluster_cidrs}
    if len(wanted.families) == 1:
        fields |= config.networks
        fields["healthzBindAddress"] = _network_of_server(config.healthz_bind_address)
        fields["metricsBindAddress"] = _network_of_server(config.metrics_bind_address)
    if wanted.local_mode == "ClusterCIDR":
        del fields["clusterCIDR"]
    if wanted.local_mode != "NodeCIDR":
        fields["podCIDRs of the Node"] = pod_cidrs(node)
    first = _first(wanted, node)
    for field, networks in fields.items():
        families = {family for family in Family if _any_of(family, networks)}
        if families and first not in families:
            (other,) = families
            yield f"{field} has {other.label} addresses only, but the Node's first address is an {first.label} address"


def _network_of_server(place: str) -> list[str]:
    text, _ = split_host_port(place) or ("", "")
    address = pack(text)
    return [f"{text}/{8 * len(address)}"] if address is not None and any(address) else []


def _first(wanted: Settings, node: Node | None) -> Family:
    return primary_family(wanted, node) or wanted.families[0]


def _unmasqueraded(wanted: Settings, node: Node | None) -> Iterator[str]:
    """Yield a sentence for each served family without a network in clusterCIDR, except families in which the Node has
    no address."""
    for family in _without_network(wanted) if wanted.local_mode == "ClusterCIDR" else ():
        if node is None or not all(map(is_loopback, node_addresses(wanted, node, family))):
            yield (
                f"detectLocalMode is ClusterCIDR but clusterCIDR names no network of family={family.label}: cluster IP "
                "traffic is not masqueraded"
            )


def _without_network(wanted: Settings) -> list[Family]:
    return [family for family in wanted.families if not _any_of(family, wanted.cluster_cidrs)]


def check_pod_cidrs(wanted: Settings, node: Node | None) -> None:
    """Raise ConfigError if detectLocalMode is NodeCIDR, and none of the Node's podCIDRs is of the primary family, which
    is the family of bindAddress, or else of the Node's first address."""
    cidrs = pod_cidrs(node)
    if wanted.local_mode != "NodeCIDR" or not cidrs:
        return
    primary = _first(wanted, node)
    if not _any_of(primary, cidrs):
        raise ConfigError(
            f"detectLocalMode: NodeCIDR, but podCIDRs {','.join(cidrs)} of Node {wanted.node_name} are not "
            f"{primary.label} as the Node's address: use another mode, or allocate podCIDRs of that family"
        )


def _any_of(family: Family, cidrs: Sequence[str]) -> bool:
    return bool(parse_networks(cidrs, family))
