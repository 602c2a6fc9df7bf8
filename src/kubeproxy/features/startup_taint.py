"""Start-up taint: a taint that the proxy removes from its Node after the first full sync (program/startup_taint.py).

See docs/beyond.md "Readiness".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from kubeproxy.features.feature import Feature

_QUALIFIED_NAME: Final = re.compile(
    r"([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
    r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)
"""A key of a label or taint: IsQualifiedName of apimachinery."""


def _mistake(key: str, flags: Mapping[str, Any]) -> str:  # noqa: ARG001 - a Feature's `mistake`
    if key and not _QUALIFIED_NAME.fullmatch(key):
        return f'expected the key of a taint, as example.com/not-ready, got "{key}"'
    return ""


STARTUP_TAINT: Final = Feature[str](
    flag="startup-taint",
    kind="string",
    default="",
    usage="The key of a taint to remove from this Node once everything is programmed the first time. It needs the right"
    " to patch Nodes. (Not in the Go kube-proxy.)",
    off="",
    unset="",
    mistake=_mistake,
)
