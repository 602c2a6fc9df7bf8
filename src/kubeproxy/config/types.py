"""KubeProxyConfiguration: interprets the fields (fields.py) for the selected proxy mode, converts a configuration to
plain values and files, and compares two configurations."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.json import encode
from msgspec.structs import replace

from kubeproxy.config import fields
from kubeproxy.config.durations import Duration
from kubeproxy.config.modes import DEFAULT, EVERY_ADDRESS, FALLBACK, MODES, ModeConfig
from kubeproxy.errors import ConfigError
from kubeproxy.model.addresses import host_port, pack, without_brackets


class KubeProxyConfiguration(fields.ConfigurationFields, frozen=True, kw_only=True):
    """The whole configuration with all defaults; built without arguments it is the default configuration. An empty mode
    means nftables here, and iptables in the Go kube-proxy. healthzBindAddress and metricsBindAddress are IP:port, or
    empty if a flag disables the server. Only userspace mode reads portRange and udpIdleTimeout."""

    @property
    def active_mode(self) -> str:
        """The name of the mode to run."""
        return self.mode or DEFAULT.name

    @property
    def of_mode(self) -> ModeConfig:
        """The mode to run. An unknown name gives the default mode, so that the check finds further mistakes."""
        return MODES.get(self.mode, DEFAULT)

    @property
    def local_mode(self) -> str:
        """The method that identifies pod traffic; ClusterCIDR by default."""
        return self.detect_local_mode or "ClusterCIDR"

    @property
    def own_addresses(self) -> dict[str, str]:
        """The addresses of the health and the metrics server by field; '' for a disabled server."""
        return {"healthzBindAddress": self.healthz_bind_address, "metricsBindAddress": self.metrics_bind_address}

    @property
    def cluster_cidrs(self) -> tuple[str, ...]:
        """The CIDRs in clusterCIDR: none, one, or one per family."""
        return tuple(self.cluster_cidr.split(",")) if self.cluster_cidr else ()

    @property
    def networks(self) -> dict[str, tuple[str, ...]]:
        """The networks in clusterCIDR and ipvs.excludeCIDRs, by field. In every mode the families of these networks
        determine whether the node is dual-stack."""
        return {"clusterCIDR": self.cluster_cidrs, "ipvs.excludeCIDRs": self.ipvs.exclude_cidrs}

    @property
    def syncs(self) -> fields.IPTables | fields.IPVS | fields.NFTables:
        """The block that contains the active mode's sync periods."""
        block: fields.IPTables | fields.IPVS | fields.NFTables = getattr(self, self.of_mode.syncs)
        return block

    @property
    def masquerades(self) -> fields.IPTables | fields.NFTables:
        """The block that contains the active mode's masquerade settings."""
        block: fields.IPTables | fields.NFTables = getattr(self, self.of_mode.masquerades)
        return block


def with_defaults(config: KubeProxyConfiguration, given: AbstractSet[str]) -> KubeProxyConfiguration:
    """Fill in the defaults that depend on other fields. `given` are the paths of the fields that the user set. If
    bindAddress is IPv6, healthzBindAddress defaults to [::], and metricsBindAddress to [::1]. Addresses without a port
    get their default port. If `mode` is empty, the default mode takes settings from other blocks
    (ModeConfig.completed), unless the configuration is strict."""
    ipv6 = len(pack(config.bind_address) or b"") == 16
    healthz = "[::]" if ipv6 and "healthzBindAddress" not in given else config.healthz_bind_address
    metrics = "[::1]" if ipv6 and "metricsBindAddress" not in given else config.metrics_bind_address
    config = replace(
        config,
        healthz_bind_address=with_port(healthz, fields.HEALTHZ_PORT),
        metrics_bind_address=with_port(metrics, fields.METRICS_PORT),
    )
    if config.strict:
        return made_strict(config)
    return config if config.mode else DEFAULT.completed(config, given)


def with_port(text: str, port: int) -> str:
    """Add a port to an address without a port; return any other text unchanged."""
    bare = without_brackets(text)
    return text if pack(bare) is None else host_port(bare, port)


def made_strict(config: KubeProxyConfiguration) -> KubeProxyConfiguration:
    """Set the field `strict`, and replace an empty `mode` and an unset nftables.minSyncPeriod (0) by the Go
    kube-proxy's defaults. validate() refuses other values that the Go kube-proxy lacks."""
    nftables = replace(config.nftables, min_sync_period=config.nftables.min_sync_period or Duration(1))
    return replace(config, strict=True, mode=config.mode or FALLBACK.name, nftables=nftables)


_OMITTED_AT_DEFAULT = ("udpIdleTimeout", "windowsRunAsService", "strict")  # the Go kube-proxy lacks or omits these


def in_effect(config: KubeProxyConfiguration) -> KubeProxyConfiguration:
    """Fill in empty mode, detectLocalMode and nodePortAddresses. The Go kube-proxy also writes these fields; with them
    the configuration has the same meaning for both proxies, although their default modes differ."""
    usual = config.of_mode.nodeport_addresses
    return replace(
        config,
        mode=config.active_mode,
        detect_local_mode=config.local_mode,
        node_port_addresses=config.node_port_addresses or (usual if usual != EVERY_ADDRESS else ()),
    )


def describe(config: KubeProxyConfiguration) -> dict[str, Any]:
    """Return the configuration as plain values by v1alpha1 JSON names, with apiVersion and kind."""
    return {"apiVersion": fields.API_VERSION, "kind": fields.KIND, **_plain(config)}


def dump(config: KubeProxyConfiguration) -> str:
    """Return the configuration as YAML with sorted keys."""
    import yaml  # noqa: PLC0415 - only --write-config-to needs it

    return yaml.safe_dump(describe(config), sort_keys=True, default_flow_style=False, allow_unicode=True)


def write_file(config: KubeProxyConfiguration, path: str | Path) -> None:
    """Write the configuration as YAML atomically to a file with the permissions 0600. Raises ConfigError, also for a
    symbolic link, with which another user could make root overwrite any file."""
    target = Path(path)
    if target.is_symlink():
        raise ConfigError(f"--write-config-to: {path} is a symbolic link; name the file itself")
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(dump(in_effect(config)))
            fresh.replace(target)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(f"--write-config-to: cannot write {path}: {error.strerror}") from None


def differences(old: KubeProxyConfiguration, new: KubeProxyConfiguration) -> list[str]:
    """Return a line "path: old -> new" (values in JSON) for each field that differs, sorted by path."""
    before, after = dict(_leaves(_plain(old), "")), dict(_leaves(_plain(new), ""))
    paths = sorted(before.keys() | after.keys())
    return [
        f"{path}: {_shown(before, path)} -> {_shown(after, path)}"
        for path in paths
        if before.get(path, _ABSENT) != after.get(path, _ABSENT)
    ]


def with_values(config: KubeProxyConfiguration, values: Mapping[str, Any]) -> KubeProxyConfiguration:
    """Set new values at JSON paths such as "iptables.masqueradeBit"."""
    for path, value in values.items():
        config = _replaced(config, path.split("."), value)
    return config


def _replaced(struct: Struct, path: list[str], value: Any) -> Any:
    attribute, _ = fields.json_fields(type(struct))[path[0]]
    if len(path) > 1:
        value = _replaced(getattr(struct, attribute), path[1:], value)
    return replace(struct, **{attribute: value})


def _plain(config: KubeProxyConfiguration) -> dict[str, Any]:
    found, usual = (json.loads(encode(each, enc_hook=str)) for each in (config, KubeProxyConfiguration()))
    return {name: each for name, each in found.items() if name not in _OMITTED_AT_DEFAULT or each != usual[name]}


_ABSENT = object()


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _leaves(item, f"{path}.{name}" if path else name)
    else:
        yield path, value


def _shown(values: Mapping[str, Any], path: str) -> str:
    return json.dumps(values[path], ensure_ascii=False) if path in values else "unset"
