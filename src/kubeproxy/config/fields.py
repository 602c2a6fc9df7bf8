"""KubeProxyConfiguration of kubeproxy.config.k8s.io/v1alpha1 (Kubernetes 1.36) as frozen structs with defaults. A
struct built without arguments is the default configuration. Attributes are in snake_case; the JSON names are
Kubernetes' names. A comment at a field notes a difference from the Go kube-proxy."""

from __future__ import annotations

from functools import cache
from typing import Any, NewType, get_type_hints

from msgspec import Struct, field
from msgspec.structs import fields

from kubeproxy.config.durations import Duration

GROUP = "kubeproxy.config.k8s.io"
API_VERSION = f"{GROUP}/v1alpha1"
KIND = "KubeProxyConfiguration"

HEALTHZ_PORT = 10256
METRICS_PORT = 10249

Quantity = NewType("Quantity", int)
"""A number of bytes, also written as a Kubernetes resource quantity ("64Ki")."""

_ACRONYMS = {
    "cluster_cidr": "clusterCIDR",
    "exclude_cidrs": "excludeCIDRs",
    "strict_arp": "strictARP",
    "enable_dsr": "enableDSR",
}


def json_name(name: str) -> str:
    """Return the JSON name of an attribute."""
    first, *others = name.split("_")
    return _ACRONYMS.get(name) or first + "".join(word.capitalize() for word in others)


class ConfigStruct(Struct, rename=json_name, frozen=True, kw_only=True):
    """Base class of all parts of the configuration: frozen, only keyword arguments, and Kubernetes' names in JSON."""


@cache
def json_fields(cls: type[Struct]) -> dict[str, tuple[str, Any]]:
    """Return the attribute and type of each field of a struct, by its JSON name."""
    hints = get_type_hints(cls)
    return {info.encode_name: (info.name, hints[info.name]) for info in fields(cls)}


def value_at(struct: Struct, path: str) -> Any:
    """Return the value at a JSON path ("iptables.masqueradeBit")."""
    value: Any = struct
    for name in path.split("."):
        cls: type[Struct] = type(value)
        value = getattr(value, json_fields(cls)[name][0])
    return value


class ClientConnection(ConfigStruct, frozen=True, kw_only=True):
    """Settings of the connection to the API server. If qps or burst is 0, its default applies; a negative qps means no
    limit."""

    kubeconfig: str = ""
    accept_content_types: str = ""
    content_type: str = "application/vnd.kubernetes.protobuf"
    qps: float = 5.0
    burst: int = 10


class OutputRouting(ConfigStruct, frozen=True, kw_only=True):
    """Options of one log format; they need the feature gate LoggingAlphaOptions."""

    split_stream: bool = False
    info_buffer_size: Quantity = Quantity(0)


class LogOptions(ConfigStruct, frozen=True, kw_only=True):
    """Options of the log formats."""

    text: OutputRouting = field(default_factory=OutputRouting)
    json: OutputRouting = field(default_factory=OutputRouting)


class VModuleItem(ConfigStruct, frozen=True, kw_only=True):
    """The log verbosity of source files with names that match a pattern."""

    file_pattern: str = ""
    verbosity: int = 0


class Logging(ConfigStruct, frozen=True, kw_only=True):
    """The LoggingConfiguration that all Kubernetes components share."""

    format: str = "text"
    flush_frequency: Duration = Duration(5)
    verbosity: int = 0
    vmodule: tuple[VModuleItem, ...] = ()
    options: LogOptions = field(default_factory=LogOptions)


class ConntrackSettings(ConfigStruct, frozen=True, kw_only=True):
    """Limits and timeouts of connection tracking. 0 keeps the kernel's value; null means the default."""

    max_per_core: int = 32768
    min: int = 131072
    tcp_established_timeout: Duration = Duration(24 * 3600)
    tcp_close_wait_timeout: Duration = Duration(3600)
    tcp_be_liberal: bool = False
    udp_timeout: Duration = Duration(0)
    udp_stream_timeout: Duration = Duration(0)


class Winkernel(ConfigStruct, frozen=True, kw_only=True):
    """Settings of the Windows proxy, which are parsed and printed, but have no effect on Linux."""

    network_name: str = ""
    source_vip: str = ""
    enable_dsr: bool = False
    root_hns_endpoint_name: str = ""
    forward_health_check_vip: bool = False


class DetectLocal(ConfigStruct, frozen=True, kw_only=True):
    """The names of interfaces that identify traffic of this node's pods."""

    bridge_interface: str = ""
    interface_name_prefix: str = ""


class IPTables(ConfigStruct, frozen=True, kw_only=True):
    """Settings of iptables mode; masqueradeBit and masqueradeAll also apply to ipvs mode."""

    masquerade_bit: int = 14
    masquerade_all: bool = False
    localhost_node_ports: bool = True
    sync_period: Duration = Duration(30)
    min_sync_period: Duration = Duration(1)


class IPVS(ConfigStruct, frozen=True, kw_only=True):
    """Settings of ipvs mode. A timeout of 0 keeps the kernel's value."""

    sync_period: Duration = Duration(30)
    min_sync_period: Duration = Duration(0)
    scheduler: str = ""
    exclude_cidrs: tuple[str, ...] = ()
    strict_arp: bool = False
    tcp_timeout: Duration = Duration(0)
    tcp_fin_timeout: Duration = Duration(0)
    udp_timeout: Duration = Duration(0)


class NFTables(ConfigStruct, frozen=True, kw_only=True):
    """Settings of nftables mode. The default of minSyncPeriod is 0 (in the Go kube-proxy 1 s), because a change takes
    microseconds here, and changes that arrive together are applied together."""

    masquerade_bit: int = 14
    masquerade_all: bool = False
    sync_period: Duration = Duration(30)
    min_sync_period: Duration = Duration(0)


class ConfigurationFields(ConfigStruct, frozen=True, kw_only=True):
    """The fields of KubeProxyConfiguration with the defaults that do not depend on the mode."""

    feature_gates: dict[str, bool] = field(default_factory=dict)
    client_connection: ClientConnection = field(default_factory=ClientConnection)
    logging: Logging = field(default_factory=Logging)
    hostname_override: str = ""
    bind_address: str = "0.0.0.0"  # noqa: S104 - the API's default
    healthz_bind_address: str = f"0.0.0.0:{HEALTHZ_PORT}"
    metrics_bind_address: str = f"127.0.0.1:{METRICS_PORT}"
    bind_address_hard_fail: bool = False
    enable_profiling: bool = False
    show_hidden_metrics_for_version: str = ""
    mode: str = ""
    iptables: IPTables = field(default_factory=IPTables)
    ipvs: IPVS = field(default_factory=IPVS)
    nftables: NFTables = field(default_factory=NFTables)
    winkernel: Winkernel = field(default_factory=Winkernel)
    detect_local_mode: str = ""
    detect_local: DetectLocal = field(default_factory=DetectLocal)
    cluster_cidr: str = ""
    node_port_addresses: tuple[str, ...] = ()
    oom_score_adj: int = -999
    conntrack: ConntrackSettings = field(default_factory=ConntrackSettings)
    config_sync_period: Duration = Duration(15 * 60)
    port_range: str = ""
    udp_idle_timeout: Duration = Duration(0.25)
    windows_run_as_service: bool = False
    strict: bool = False  # disables intended differences from the Go kube-proxy, see docs/migrate.md
