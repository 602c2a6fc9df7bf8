"""Defaults that depend on other fields; all fixed ones are the structs' own."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from msgspec.structs import replace

from kubeproxy.config import modes
from kubeproxy.config.addresses import is_ipv6, with_port
from kubeproxy.config.fields import HEALTHZ_PORT, METRICS_PORT
from kubeproxy.config.types import KubeProxyConfiguration


def with_defaults(config: KubeProxyConfiguration, given: AbstractSet[str]) -> KubeProxyConfiguration:
    """The configuration with the remaining defaults; given names the fields (JSON paths) that are set and stay.

    - healthzBindAddress and metricsBindAddress are [::] and [::1] when bindAddress is IPv6, and get their port
      when they have none.
    - With mode empty, the default mode takes what it wants from other blocks (ModeConfig.completed).
    """
    ipv6 = is_ipv6(config.bind_address)
    healthz, metrics = config.healthz_bind_address, config.metrics_bind_address
    if ipv6 and "healthzBindAddress" not in given:
        healthz = "[::]"
    if ipv6 and "metricsBindAddress" not in given:
        metrics = "[::1]"
    config = replace(
        config,
        healthz_bind_address=with_port(healthz, HEALTHZ_PORT),
        metrics_bind_address=with_port(metrics, METRICS_PORT),
    )
    return config if config.mode else modes.DEFAULT.completed(config, given)
