"""Writes a configuration as plain values or to a file, and compares two. load.py reads the same configuration back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.json import encode
from msgspec.structs import replace

from kubeproxy.config.fields import API_VERSION, KIND, json_fields
from kubeproxy.config.modes import EVERY_ADDRESS
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.errors import ConfigError

_OMITTED_AT_DEFAULT = ("udpIdleTimeout", "windowsRunAsService")  # unknown to, or omitted by, the Go kube-proxy


def in_effect(config: KubeProxyConfiguration) -> KubeProxyConfiguration:
    """Return the configuration with empty fields filled in: the mode, how pods are recognised, NodePort addresses.

    So it means the same to the Go kube-proxy, whose default mode is another one, and which writes these fields too.
    """
    usual = config.of_mode.nodeport_addresses
    return replace(
        config,
        mode=config.active_mode,
        detect_local_mode=config.local_mode,
        node_port_addresses=config.node_port_addresses or (usual if usual != EVERY_ADDRESS else ()),
    )


def describe(config: KubeProxyConfiguration) -> dict[str, Any]:
    """Return the configuration as plain values under its v1alpha1 JSON names, with apiVersion and kind."""
    return {"apiVersion": API_VERSION, "kind": KIND, **_plain(config)}


def dump(config: KubeProxyConfiguration) -> str:
    """Return the configuration as YAML with sorted keys."""
    import yaml  # noqa: PLC0415 - only --write-config-to needs it

    return yaml.safe_dump(describe(config), sort_keys=True, default_flow_style=False, allow_unicode=True)


def write_file(config: KubeProxyConfiguration, path: str | Path) -> None:
    """Write the configuration as YAML, completely or not at all, with mode 0600. Raises ConfigError.

    A symbolic link is refused: another user could have root overwrite any file.
    """
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
    """Return a line "path: old -> new" in JSON notation for each field that differs, sorted by path."""
    before, after = dict(_leaves(_plain(old), "")), dict(_leaves(_plain(new), ""))
    paths = sorted(before.keys() | after.keys())
    return [
        f"{path}: {_shown(before, path)} -> {_shown(after, path)}"
        for path in paths
        if before.get(path, _ABSENT) != after.get(path, _ABSENT)
    ]


def with_values(config: KubeProxyConfiguration, values: Mapping[str, Any]) -> KubeProxyConfiguration:
    """Return the configuration with new values at JSON paths ("iptables.masqueradeBit")."""
    for path, value in values.items():
        config = _replaced(config, path.split("."), value)
    return config


def _replaced(struct: Struct, path: list[str], value: Any) -> Any:
    attribute, _ = json_fields(type(struct))[path[0]]
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
