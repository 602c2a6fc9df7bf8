"""YAML or JSON text to plain values, remembering which keys occur twice. Nothing here knows the configuration.

Scalars get the types that Kubernetes' YAML reader gives them: dates and base-60 numbers stay text.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from kubeproxy.config.yaml_text import check_bounds, place
from kubeproxy.errors import ConfigError

_MAX_DEPTH = 50
_MAX_NODES = 100_000
_TOO_DEEP = "not a configuration: nested too deeply or too large"
_POWER_OF_TEN = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+")
"""A number to Kubernetes' YAML reader, as Helm writes 1000000, and text to ours: it wants a dot."""
_TEXT_TAGS = frozenset(("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:str", "tag:yaml.org,2002:value"))


class Tree(NamedTuple):
    """Plain values (dict, list, str, int, float, bool, None) and the paths of the keys that occur more than once."""

    value: Any
    duplicates: list[str]


class _Pairs(list[tuple[str, Any]]):
    """A mapping before its keys are made unique."""


def parse(text: str) -> Tree:
    """The first document of the text, which is JSON or YAML; ConfigError with the place where it is neither."""
    pairs: Any = None
    if text.lstrip().startswith("{"):
        try:
            pairs = json.loads(text, object_pairs_hook=_Pairs, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            pairs = None  # YAML's flow style starts like JSON, and its reader names the place of a mistake
    if pairs is None:
        pairs = _compose(text)
    duplicates: list[str] = []
    return Tree(_unique(pairs, "", duplicates), duplicates)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _unique(value: Any, path: str, duplicates: list[str], depth: int = 0) -> Any:
    if depth > _MAX_DEPTH:
        raise ConfigError(_TOO_DEEP)
    if isinstance(value, _Pairs):
        fields: dict[str, Any] = {}
        for key, item in value:
            here = f"{path}.{key}" if path else key
            if key in fields:
                duplicates.append(here)
            fields[key] = _unique(item, here, duplicates, depth + 1)
        return fields
    if isinstance(value, list):
        return [_unique(item, f"{path}[{index}]", duplicates, depth + 1) for index, item in enumerate(value)]
    return value


def _compose(text: str) -> Any:
    import yaml  # noqa: PLC0415 - a start without a configuration file does not need it

    reader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        check_bounds(yaml.parse(text, Loader=reader), _MAX_DEPTH, _MAX_NODES)
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML or JSON: {place(error)}") from None
    except ValueError as error:
        raise ConfigError(f"not a configuration: {error}") from None
    loader = reader(text)
    try:
        node = loader.get_node() if loader.check_node() else None
        return None if node is None else _Builder(loader).build(node, 0)
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML or JSON: {place(error)}") from None
    finally:
        loader.dispose()


class _Builder:
    """Turns YAML nodes to values, within bounds: aliases can make a small text an endless tree."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.nodes = 0

    def build(self, node: Any, depth: int) -> Any:
        self.nodes += 1
        if depth > _MAX_DEPTH or self.nodes > _MAX_NODES:
            raise ConfigError(_TOO_DEEP)
        if node.id == "mapping":
            self.loader.flatten_mapping(node)
            return _Pairs((self.key(key), self.build(value, depth + 1)) for key, value in node.value)
        if node.id == "sequence":
            return [self.build(item, depth + 1) for item in node.value]
        return self.scalar(node)

    def key(self, node: Any) -> str:
        if node.id != "scalar":
            line = node.start_mark.line + 1
            raise ConfigError(f"not a configuration: line {line}: a key must be text")
        return str(node.value)

    def scalar(self, node: Any) -> Any:
        base_60 = ":" in node.value and node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        if not node.style and _POWER_OF_TEN.fullmatch(node.value):
            return float(node.value)
        if node.tag in _TEXT_TAGS or base_60:
            return node.value
        try:
            return self.loader.construct_object(node)
        except ValueError as error:
            line = node.start_mark.line + 1
            raise ConfigError(f"not valid YAML or JSON: line {line}: {error}") from None
