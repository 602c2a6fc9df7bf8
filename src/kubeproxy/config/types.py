"""KubeProxyConfiguration: its fields (fields.py), and what they mean in the proxy mode that it selects."""

from __future__ import annotations

from kubeproxy.config import modes
from kubeproxy.config.durations import Duration
from kubeproxy.config.fields import ConfigurationFields
from kubeproxy.config.modes.description import ModeConfig


class KubeProxyConfiguration(ConfigurationFields, frozen=True, kw_only=True):
    """The whole configuration, with every default filled in; built without arguments it is the default one.

    An empty mode means nftables here, where it means iptables in the Go kube-proxy; the nftables settings that are
    not given are then taken from the iptables block, so that a configuration made for the other default keeps its
    meaning. healthzBindAddress and metricsBindAddress are IP:port, or empty (only by flag) for no such server.
    portRange and udpIdleTimeout are read by userspace mode alone.
    """

    @property
    def active_mode(self) -> str:
        """The name of the mode to run."""
        return self.mode or modes.DEFAULT.name

    @property
    def of_mode(self) -> ModeConfig:
        """What the configuration knows of the mode to run."""
        return modes.named(self.mode)

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
        """The fields with networks of both families or one, whatever the mode: they show whether IP is dual-stack."""
        return {"clusterCIDR": self.cluster_cidrs, "ipvs.excludeCIDRs": self.ipvs.exclude_cidrs}

    @property
    def sync_period(self) -> Duration:
        """syncPeriod of the active mode."""
        return self.of_mode.sync_block(self).sync_period

    @property
    def min_sync_period(self) -> Duration:
        """minSyncPeriod of the active mode."""
        return self.of_mode.sync_block(self).min_sync_period

    @property
    def masquerade_all(self) -> bool:
        """masqueradeAll of the active mode."""
        return self.of_mode.masquerade_block(self).masquerade_all

    @property
    def masquerade_bit(self) -> int:
        """masqueradeBit of the active mode."""
        return self.of_mode.masquerade_block(self).masquerade_bit
