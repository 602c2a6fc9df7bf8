"""Reads a configuration file, completes and checks it, and watches the file. As in the Go kube-proxy, a file for
another release still works: an unknown field is ignored, the last value of a repeated field is used, and the log
reports both (*mistakes of strict reading*). Wrong types are errors. All mistakes are collected with their paths, and
reported together."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from msgspec import Struct, convert

from kubeproxy.config.durations import Duration
from kubeproxy.config.fields import API_VERSION, GROUP, KIND, Quantity, VModuleItem, json_fields
from kubeproxy.config.messages import Mistake, did_you_mean, listed
from kubeproxy.config.modes import MODES
from kubeproxy.config.pflag import parse_quantity
from kubeproxy.config.types import KubeProxyConfiguration, differences, with_defaults
from kubeproxy.config.validate import validate
from kubeproxy.config.yaml_text import YamlDocument, yaml_documents
from kubeproxy.errors import ConfigError

logger = logging.getLogger("kubeproxy.config")

_MAX_DEPTH: Final = 50
_MAX_VALUES: Final = 100_000


def load_file(path: str | Path) -> KubeProxyConfiguration:
    """Return the configuration in a YAML or JSON file. Raises ConfigError for an unreadable or invalid file; the
    message names the file, and lists several mistakes on separate lines."""
    try:
        text = _content(Path(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot read the configuration file {path}: {reason}") from None
    try:
        return load_text(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {listed(str(error))}") from None


def load_text(text: str) -> KubeProxyConfiguration:
    """Return the configuration in YAML or JSON text; log the mistakes of strict reading. Raises ConfigError."""
    config, strict = read_text(text)
    _log_lenient(strict)
    return config


def read_text(text: str) -> tuple[KubeProxyConfiguration, list[Mistake]]:
    """Return the configuration in YAML or JSON text, completed and validated, and the mistakes of strict reading.
    Raises ConfigError with one line per mistake; a line starts with the path of its field."""
    try:
        tree, duplicates = _tree(text)
        decoded = decode(_checked_type(tree))
    except RecursionError:
        raise ConfigError("cannot be read: nested too deeply") from None
    config = with_defaults(decoded.config, decoded.given)
    wrong = {mistake.path for mistake in decoded.wrong}
    raise_mistakes([*decoded.wrong, *(mistake for mistake in validate(config) if mistake.path not in wrong)])
    return config, [
        *decoded.strict,
        *(Mistake(path, "occurs more than once, the last value is used") for path in duplicates),
    ]


def raise_mistakes(mistakes: list[Mistake]) -> None:
    """Raise a ConfigError with one line per mistake, if there is a mistake."""
    if mistakes:
        raise ConfigError("\n".join(map(str, mistakes)))


def _log_lenient(strict: list[Mistake]) -> None:
    if strict:
        logger.warning(
            "The configuration was read leniently, as strict reading failed: %s", "; ".join(map(str, strict))
        )


def _tree(text: str) -> YamlDocument:
    """Return the first document of YAML or JSON text. (YAML parsers accept JSON, except tabs and rare escapes.)"""
    is_json = text.lstrip().startswith("{")
    try:
        documents = yaml_documents(text.replace("\t", " ") if is_json else text, _MAX_DEPTH, _MAX_VALUES)
        return next(documents, YamlDocument(None, []))
    except ValueError as error:
        if is_json:
            with suppress(ValueError, RecursionError):
                return YamlDocument(json.loads(text), [])
        raise ConfigError(f"cannot be read as YAML or JSON: {error}") from None


def _checked_type(tree: Any) -> dict[str, Any]:
    if not isinstance(tree, dict):
        raise ConfigError(f"not a configuration: expected a map of fields with apiVersion: {API_VERSION}")
    wanted = {"apiVersion": API_VERSION, "kind": KIND}
    for name, value in wanted.items():
        found = tree.get(name)
        if not found:
            raise ConfigError(f"{name}: missing; add {name}: {value}")
        if found != value:
            hint = did_you_mean(str(found), frozenset((value,)))
            if name == "apiVersion" and str(found).startswith(f"{GROUP}/"):
                hint = "; this release reads v1alpha1 only"
            raise ConfigError(f'{name}: expected {value}, got "{found}"{hint}')
    return {name: value for name, value in tree.items() if name not in wanted}


_Signature = tuple[int, int, int, int] | None  # device, inode, mtime (ns) and size of a file; None if it is missing


async def watch(
    path: str | Path,
    running: KubeProxyConfiguration,
    resolve: Callable[[KubeProxyConfiguration], KubeProxyConfiguration] = lambda config: config,
    interval: float = 1.0,
    invalid: Callable[[bool], None] = lambda _: None,
) -> AsyncIterator[list[str]]:
    """Watch a file; for each new valid configuration in it, yield its differences as lines "path: old -> new".

    `resolve` applies the flags that take precedence over the file (Options.resolve). An unreadable or invalid file is
    logged once with all mistakes, and nothing is yielded. At each change of the file, `invalid` is called with True if
    the file is invalid.

    The kubelet updates a ConfigMap volume by replacing a symbolic link above the file, which a watch of the file itself
    does not notice (the Go kube-proxy misses such changes). Therefore the file's status is read every `interval`
    seconds through all links, which takes microseconds. A new status must last for one interval, so that no
    half-written file is read."""
    file = Path(path)
    seen: _Signature = None
    previous = _signature(file)
    rejected: str | None = None
    first = True
    while True:
        current = _signature(file)
        if current != seen and current == previous:
            seen = current
            try:
                config, strict = read_text(_content(file))
                config = resolve(config)
            except (OSError, UnicodeDecodeError, ConfigError) as error:
                invalid(True)
                if str(error) != rejected:
                    logger.error("The changed configuration file %s is not used: %s", file, error)
                rejected = str(error)
            else:
                rejected = None
                invalid(False)
                difference = differences(running, config)
                if not first:  # at the start, load_file has logged the mistakes
                    _log_lenient(strict)
                if difference:
                    running = config
                    yield difference
            first = False
        previous = current
        await asyncio.sleep(interval)


def _content(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def _signature(file: Path) -> _Signature:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


class Decoded(NamedTuple):
    """A decoded configuration: its valid fields, and the mistakes in other fields."""

    config: KubeProxyConfiguration
    given: frozenset[str]  # the paths of the fields with a value other than null
    wrong: list[Mistake]  # the mistakes in invalid fields
    strict: list[Mistake]  # the mistakes of strict reading


_UNSET_WHEN_EMPTY = """
    bindAddress healthzBindAddress metricsBindAddress configSyncPeriod udpIdleTimeout
    clientConnection.contentType clientConnection.qps clientConnection.burst logging.format logging.flushFrequency
"""
UNSET_WHEN_EMPTY = frozenset(_UNSET_WHEN_EMPTY.split()).union(*(mode.unset_when_empty for mode in MODES.values()))
"""Fields in which "", 0 or 0s means unset (kube-proxy's v1alpha1 defaults); in other fields zero is a value."""

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
"""The descriptions of types in messages."""


def decode(tree: Mapping[str, Any]) -> Decoded:
    """Decode the fields of a KubeProxyConfiguration, without apiVersion and kind. A null field counts as missing."""
    reading = _Reading()
    config = reading.struct(KubeProxyConfiguration, tree, "")
    return Decoded(config, frozenset(reading.given), reading.wrong, reading.strict)


class _Reading:
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
        """Convert a value to a type. Raises ValueError."""
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
    try:
        if kind is Duration:
            return Duration.parse(convert(value, str))
        if kind is Quantity:
            return value if type(value) is int and value >= 0 else parse_quantity(convert(value, str))
        return convert(value, kind)
    except ValueError as error:
        place = re.search(r"\$(\[\d+\])", str(error))  # the index of an invalid entry in a list
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
