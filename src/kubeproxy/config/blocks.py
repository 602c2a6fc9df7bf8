"""The blocks of KubeProxyConfiguration that hold the settings of one proxy mode: shapes and defaults."""

from __future__ import annotations

from kubeproxy.config.durations import Duration
from kubeproxy.config.struct import ConfigStruct


class IPTables(ConfigStruct, frozen=True, kw_only=True):
    """Settings of iptables mode; masqueradeBit and masqueradeAll also govern ipvs mode."""

    masquerade_bit: int = 14
    masquerade_all: bool = False
    localhost_node_ports: bool = True
    sync_period: Duration = Duration(30)
    min_sync_period: Duration = Duration(1)


class IPVS(ConfigStruct, frozen=True, kw_only=True):
    """Settings of ipvs mode. A timeout of 0 leaves the kernel's value."""

    sync_period: Duration = Duration(30)
    min_sync_period: Duration = Duration(0)
    scheduler: str = ""
    exclude_cidrs: tuple[str, ...] = ()
    strict_arp: bool = False
    tcp_timeout: Duration = Duration(0)
    tcp_fin_timeout: Duration = Duration(0)
    udp_timeout: Duration = Duration(0)


class NFTables(ConfigStruct, frozen=True, kw_only=True):
    """Settings of nftables mode.

    minSyncPeriod defaults to 0, not to the 1 s of the Go kube-proxy: a change costs microseconds here, and changes
    that arrive together are applied together.
    """

    masquerade_bit: int = 14
    masquerade_all: bool = False
    sync_period: Duration = Duration(30)
    min_sync_period: Duration = Duration(0)
