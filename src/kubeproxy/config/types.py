"""KubeProxyConfiguration: its fields (fields.py), with their meaning in the proxy mode that it selects."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from msgspec.structs import replace

from kubeproxy.config.addresses import is_ipv6, with_port
from kubeproxy.config.durations import Duration
from kubeproxy.config.fields import HEALTHZ_PORT, IPVS, METRICS_PORT, ConfigurationFields, IPTables, NFTables
from kubeproxy.config.modes import DEFAULT, MODES, ModeConfig


class KubeProxyConfiguration(ConfigurationFields, frozen=True, kw_only=True):
    """The whole configuration, with every default filled in; built without arguments it is the default one.

    An empty mode means nftables here, iptables in the Go kube-proxy. healthzBindAddress and metricsBindAddress are
    IP:port, or empty (only by flag) for no such server. Only userspace mode reads portRange and udpIdleTimeout.
    """

    @property
    def active_mode(self) -> str:
        """The name of the mode to run."""
        return self.mode or DEFAULT.name

    @property
    def of_mode(self) -> ModeConfig:
        """The mode to run; the default one for an unknown name, so that checks go on after that mistake."""
        return MODES.get(self.mode, DEFAULT)

    @property
    def local_mode(self) -> str:
        """How pod traffic is recognised: ClusterCIDR (the default), NodeCIDR, BridgeInterface, InterfaceNamePrefix."""
        return self.detect_local_mode or "ClusterCIDR"

    @property
    def cluster_cidrs(self) -> tuple[str, ...]:
        """The parts of clusterCIDR: none, one, or one of each family."""
        return tuple(self.cluster_cidr.split(",")) if self.cluster_cidr else ()

    @property
    def networks(self) -> dict[str, tuple[str, ...]]:
        """The networks in clusterCIDR and ipvs.excludeCIDRs, in every mode: their families show a dual-stack node."""
        return {"clusterCIDR": self.cluster_cidrs, "ipvs.excludeCIDRs": self.ipvs.exclude_cidrs}

    @property
    def sync_period(self) -> Duration:
        """syncPeriod of the active mode."""
        return self._syncs.sync_period

    @property
    def min_sync_period(self) -> Duration:
        """minSyncPeriod of the active mode."""
        return self._syncs.min_sync_period

    @property
    def masquerade_all(self) -> bool:
        """masqueradeAll of the active mode."""
        return self._masquerades.masquerade_all

    @property
    def masquerade_bit(self) -> int:
        """masqueradeBit of the active mode."""
        return self._masquerades.masquerade_bit

    @property
    def _syncs(self) -> IPTables | IPVS | NFTables:
        block: IPTables | IPVS | NFTables = getattr(self, self.of_mode.syncs)
        return block

    @property
    def _masquerades(self) -> IPTables | NFTables:
        block: IPTables | NFTables = getattr(self, self.of_mode.masquerades)
        return block


def with_defaults(config: KubeProxyConfiguration, given: AbstractSet[str]) -> KubeProxyConfiguration:
    """Return the configuration with the defaults that depend on other fields; `given` has the paths of the fields set.

    - healthzBindAddress and metricsBindAddress are [::] and [::1] when bindAddress is IPv6, and get their port
      when they have none.
    - With mode empty, the default mode takes settings from other blocks (ModeConfig.completed).
    """
    ipv6 = is_ipv6(config.bind_address)
    healthz = "[::]" if ipv6 and "healthzBindAddress" not in given else config.healthz_bind_address
    metrics = "[::1]" if ipv6 and "metricsBindAddress" not in given else config.metrics_bind_address
    config = replace(
        config,
        healthz_bind_address=with_port(healthz, HEALTHZ_PORT),
        metrics_bind_address=with_port(metrics, METRICS_PORT),
    )
    return config if config.mode else DEFAULT.completed(config, given)
