"""The configuration: command line and KubeProxyConfiguration file, read, defaulted, checked, written and watched.

Knows nothing of the node or the API; imports only kubeproxy.errors. The names below are loaded on first use, so that
the flag parser (kube-proxy --version, --help) starts without the configuration's structs. The watch of the file is
kubeproxy.config.watch.watch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kubeproxy.config.durations import Duration
    from kubeproxy.config.fields import GROUP
    from kubeproxy.config.load import load_file, load_text
    from kubeproxy.config.options import Options, build_options
    from kubeproxy.config.types import KubeProxyConfiguration
    from kubeproxy.config.write import describe, differences, dump, write_file

__all__ = [
    "GROUP",
    "Duration",
    "KubeProxyConfiguration",
    "Options",
    "build_options",
    "describe",
    "differences",
    "dump",
    "load_file",
    "load_text",
    "write_file",
]

_HOMES = {
    "Duration": "durations",
    "load_file": "load",
    "load_text": "load",
    "Options": "options",
    "build_options": "options",
    "GROUP": "fields",
    "KubeProxyConfiguration": "types",
    "describe": "write",
    "differences": "write",
    "dump": "write",
    "write_file": "write",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
