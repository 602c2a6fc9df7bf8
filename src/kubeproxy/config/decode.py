"""Plain values to the configuration's structs: checks names and types, not values.

Every mistake is collected with its path, so that all are reported at once. Wrong types are errors. Unknown fields are
strict errors, as Kubernetes calls them: reported apart, so that the caller can ignore them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from msgspec import Struct, convert

from kubeproxy.config.durations import Duration
from kubeproxy.config.fields import Quantity, VModuleItem, json_fields
from kubeproxy.config.messages import Mistake, did_you_mean
from kubeproxy.config.modes import MODES
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.config.values import parse_quantity


class Decoded(NamedTuple):
    """The configuration without the fields that are wrong, its mistakes, and those of strict reading.

    `given` has the paths of the fields that are set to a value other than null.
    """

    config: KubeProxyConfiguration
    given: frozenset[str]
    wrong: list[Mistake]
    strict: list[Mistake]


_UNSET_WHEN_EMPTY = """
    bindAddress healthzBindAddress metricsBindAddress configSyncPeriod udpIdleTimeout
    clientConnection.contentType clientConnection.qps clientConnection.burst logging.format logging.flushFrequency
"""
UNSET_WHEN_EMPTY = frozenset(_UNSET_WHEN_EMPTY.split()).union(*(mode.unset_when_empty for mode in MODES.values()))
"""Fields in which "", 0 or 0s counts as unset (kube-proxy's v1alpha1 defaults); elsewhere zero is a value."""

_UNSIGNED = frozenset(("logging.verbosity", "logging.vmodule[].verbosity"))

_EXPECTED: Mapping[Any, str] = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    Duration: 'a duration like "30s" or "1h30m"',
    Quantity: 'a number of bytes like 512 or "64Ki"',
    tuple[str, ...]: "a list of text",
    dict[str, bool]: "a map of feature gates to true or false",
    tuple[VModuleItem, ...]: "a list of maps with filePattern and verbosity",
}
"""The description of each type in messages."""


def decode(tree: Mapping[str, Any]) -> Decoded:
    """Decode the fields of a KubeProxyConfiguration, without apiVersion and kind; null counts as absent everywhere."""
    reading = _Reading()
    config = reading.struct(KubeProxyConfiguration, tree, "")
    return Decoded(config, frozenset(reading.given), reading.wrong, reading.strict)


class _Reading:
    """One pass over a tree, collecting mistakes."""

    def __init__(self) -> None:
        self.given: set[str] = set()
        self.wrong: list[Mistake] = []
        self.strict: list[Mistake] = []

    def struct(self, cls: type[Struct], tree: Mapping[str, Any], path: str) -> Any:
        known = json_fields(cls)
        values: dict[str, Any] = {}
        for name, value in tree.items():
            here = f"{path}.{name}" if path else name
            if name not in known:
                self.strict.append(Mistake(here, "unknown field" + did_you_mean(name, known.keys())))
            elif value is not None:
                attribute, kind = known[name]
                try:
                    decoded = self.value(kind, value, here)
                except ValueError as error:
                    self.wrong.append(Mistake(here, str(error)))
                    continue
                if decoded or here not in UNSET_WHEN_EMPTY:
                    values[attribute] = decoded
                    self.given.add(here)
        return cls(**values)

    def value(self, kind: Any, value: Any, path: str) -> Any:
        """Return a value of a type. Raises ValueError."""
        if isinstance(kind, type) and issubclass(kind, Struct):
            if not isinstance(value, dict):
                raise _unexpected("a map of fields", value)
            return self.struct(kind, value, path)
        if kind == tuple[VModuleItem, ...]:
            if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
                raise _unexpected(_EXPECTED[kind], value)
            return tuple(self.struct(VModuleItem, item, f"{path}[{index}]") for index, item in enumerate(value))
        if path == "logging.flushFrequency" and type(value) is int:
            return Duration.from_nanoseconds(value)
        if kind is int:
            unsigned = re.sub(r"\[\d+\]", "[]", path) in _UNSIGNED
            return _integer(value, *(0, (1 << 32) - 1) if unsigned else (-(1 << 31), (1 << 31) - 1))
        return _plain(kind, value)


def _plain(kind: Any, value: Any) -> Any:
    """Return a value of a type that is no struct. Raises ValueError."""
    try:
        if kind is Duration:
            return Duration.parse(convert(value, str))
        if kind is Quantity:
            return value if type(value) is int and value >= 0 else parse_quantity(convert(value, str))
        return convert(value, kind)
    except ValueError as error:
        place = re.search(r"\$(\[\d+\])", str(error))  # of a wrong entry in a list
        hint = " (put it in quotes)" if kind is str and isinstance(value, int | float) else ""
        raise _unexpected(_EXPECTED[kind], value, f", see {place[1]}" if place else hint) from None


def _integer(value: Any, low: int, high: int) -> int:
    if type(value) is float and value.is_integer():  # Helm writes 1048576 as 1.048576e+06; Kubernetes reads it
        value = int(value)
    number: int = _plain(int, value)
    if not low <= number <= high:
        raise ValueError(f"expected a whole number from {low} to {high}, got {number}")
    return number


def _unexpected(expected: str, value: Any, hint: str = "") -> ValueError:
    shown = json.dumps(value, ensure_ascii=False, default=str)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return ValueError(f"expected {expected}, got {shown}{hint}")
