"""Defaults that depend on other fields; all fixed ones are the structs' own, in types.py."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from msgspec.structs import replace

from kubeproxy.config.addresses import is_ipv6, with_port
from kubeproxy.config.types import HEALTHZ_PORT, METRICS_PORT, IPTables, KubeProxyConfiguration, NFTables

_INHERITED = {"masqueradeBit": "masquerade_bit", "syncPeriod": "sync_period", "minSyncPeriod": "min_sync_period"}


def with_defaults(config: KubeProxyConfiguration, given: AbstractSet[str]) -> KubeProxyConfiguration:
    """The configuration with the remaining defaults; given names the fields (JSON paths) that are set and stay.

    - healthzBindAddress and metricsBindAddress are [::] and [::1] when bindAddress is IPv6, and get their port
      when they have none.
    - With mode empty, nftables settings that are not given come from the iptables block where that differs from its
      own defaults (see KubeProxyConfiguration).
    """
    ipv6 = is_ipv6(config.bind_address)
    healthz, metrics = config.healthz_bind_address, config.metrics_bind_address
    if ipv6 and "healthzBindAddress" not in given:
        healthz = "[::]"
    if ipv6 and "metricsBindAddress" not in given:
        metrics = "[::1]"
    return replace(
        config,
        healthz_bind_address=with_port(healthz, HEALTHZ_PORT),
        metrics_bind_address=with_port(metrics, METRICS_PORT),
        nftables=config.nftables if config.mode else _inherited(config, given),
    )


def _inherited(config: KubeProxyConfiguration, given: AbstractSet[str]) -> NFTables:
    usual = IPTables()
    values = {
        attribute: getattr(config.iptables, attribute)
        for name, attribute in _INHERITED.items()
        if f"nftables.{name}" not in given and getattr(config.iptables, attribute) != getattr(usual, attribute)
    }
    masquerade_all = config.nftables.masquerade_all or config.iptables.masquerade_all
    return replace(config.nftables, **values, masquerade_all=masquerade_all)
