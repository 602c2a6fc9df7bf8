"""A configuration to plain values, to a file, and compared with another. What is written reads back as the same."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from kubeproxy.config.decode import json_fields
from kubeproxy.config.durations import Duration
from kubeproxy.config.fields import API_VERSION, KIND
from kubeproxy.config.modes import EVERY_ADDRESS
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.errors import ConfigError

_OMITTED_AT_DEFAULT = frozenset(
    ("udpIdleTimeout", "windowsRunAsService")
)  # unknown to, or omitted by, the Go kube-proxy


def in_effect(config: KubeProxyConfiguration) -> KubeProxyConfiguration:
    """The configuration with what its empty fields mean: the mode that runs, how pods are recognised, NodePorts.

    So it says the same to the Go kube-proxy, whose default mode is another one, and which shows and writes it so too.
    """
    usual = config.of_mode.nodeport_addresses
    return replace(
        config,
        mode=config.active_mode,
        detect_local_mode=config.local_mode,
        node_port_addresses=config.node_port_addresses or (usual if usual != EVERY_ADDRESS else ()),
    )


def describe(config: KubeProxyConfiguration) -> dict[str, Any]:
    """The whole configuration as plain values under its v1alpha1 JSON names, apiVersion and kind included."""
    return {"apiVersion": API_VERSION, "kind": KIND, **_plain(config)}


def dump(config: KubeProxyConfiguration) -> str:
    """The whole configuration as YAML with sorted keys, which load_text reads back."""
    import yaml  # noqa: PLC0415 - only --write-config-to needs it

    return yaml.safe_dump(describe(config), sort_keys=True, default_flow_style=False, allow_unicode=True)


def write_file(config: KubeProxyConfiguration, path: str | Path) -> None:
    """Write the configuration as YAML, for its owner alone, whole or not at all; ConfigError when that cannot be done.

    A symbolic link is refused: root would write to wherever somebody made it point.
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
    """Each field that differs, as a line "path: old -> new" in JSON notation, sorted by path."""
    before, after = dict(_leaves(_plain(old), "")), dict(_leaves(_plain(new), ""))
    paths = sorted(before.keys() | after.keys())
    return [
        f"{path}: {_shown(before, path)} -> {_shown(after, path)}"
        for path in paths
        if before.get(path, _ABSENT) != after.get(path, _ABSENT)
    ]


def with_values(config: KubeProxyConfiguration, values: Mapping[str, Any]) -> KubeProxyConfiguration:
    """The configuration with the fields at the given JSON paths ("iptables.masqueradeBit") replaced."""
    for path, value in values.items():
        config = _replaced(config, path.split("."), value)
    return config


def _replaced(struct: Struct, path: list[str], value: Any) -> Any:
    attribute, _ = json_fields(type(struct))[path[0]]
    if len(path) > 1:
        value = _replaced(getattr(struct, attribute), path[1:], value)
    return replace(struct, **{attribute: value})


def _plain(value: Any) -> Any:
    if isinstance(value, Struct):
        fields = json_fields(type(value))
        defaults = type(value)()
        return {
            name: _plain(getattr(value, attribute))
            for name, (attribute, _) in fields.items()
            if name not in _OMITTED_AT_DEFAULT or getattr(value, attribute) != getattr(defaults, attribute)
        }
    if isinstance(value, Duration):
        return str(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


_ABSENT = object()


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _leaves(item, f"{path}.{name}" if path else name)
    else:
        yield path, value


def _shown(values: Mapping[str, Any], path: str) -> str:
    return json.dumps(values[path], ensure_ascii=False) if path in values else "unset"
