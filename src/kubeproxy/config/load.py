"""Reads a configuration file into a valid KubeProxyConfiguration, with defaults and checks, and watches the file.

Reading is strict at first: a field that is unknown or occurs twice is a mistake. As in the Go kube-proxy, such a
mistake only causes a log message, and the configuration is read without the unknown field and with the last of the
duplicates, so that a file for another release still works. Wrong types are errors. Every mistake is collected with its
path, so that all mistakes are reported at once.
"""

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
    """Return the configuration in a YAML or JSON file. Raises ConfigError when the file cannot be read, or with the
    mistakes of load_text after the file's name: one on the same line, several on separate lines.
    """
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
    """Return the configuration in YAML or JSON text, as read_text does; log the mistakes of strict reading."""
    config, strict = read_text(text)
    _log_lenient(strict)
    return config


def read_text(text: str) -> tuple[KubeProxyConfiguration, list[Mistake]]:
    """Return two values: the configuration in YAML or JSON text, defaulted and validated, and the mistakes of strict
    reading. Raises ConfigError with a line for each mistake, which starts with the path of its field.
    """
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
    """Raise one ConfigError with a line for each mistake, if there are any."""
    if mistakes:
        raise ConfigError("\n".join(map(str, mistakes)))


def _log_lenient(strict: list[Mistake]) -> None:
    if strict:
        logger.warning(
            "The configuration was read leniently, as strict reading failed: %s", "; ".join(map(str, strict))
        )


def _tree(text: str) -> YamlDocument:
    """Return the first document of YAML, or of JSON, which YAML parsers accept except tabs and rare escapes."""
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
    """Return the tree without apiVersion and kind. Raises ConfigError unless these are as expected."""
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


_Signature = tuple[int, int, int, int] | None  # device, inode, mtime (ns) and size of a file; None for no file


async def watch(
    path: str | Path,
    running: KubeProxyConfiguration,
    resolve: Callable[[KubeProxyConfiguration], KubeProxyConfiguration] = lambda config: config,
    interval: float = 1.0,
    invalid: Callable[[bool], None] = lambda _: None,
) -> AsyncIterator[list[str]]:
    """Yield the differences, as lines "path: old -> new", of each valid configuration in the file from the one before.

    `resolve` applies the flags that take precedence over the file (Options.resolve). A file that cannot be read or is
    invalid is logged once, with every mistake, and changes nothing; `invalid` is called at each change of the file,
    with whether the file is invalid.

    A Kubernetes ConfigMap volume changes by swapping a symlink above the file. A watch of the file itself does not
    report this (the Go kube-proxy misses such changes). So the file's status is read every `interval` seconds, through
    all symlinks, which takes microseconds. A new status must last for one interval, so that a half-written file is not
    read.
    """
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
                if not first:  # load_file logged the mistakes when it read the file for the first time
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
    """The configuration without the invalid fields, and the mistakes."""

    config: KubeProxyConfiguration
    given: frozenset[str]  # the paths of the fields that are set to a value other than null
    wrong: list[Mistake]  # in the invalid fields
    strict: list[Mistake]  # of strict reading


_UNSET_WHEN_EMPTY = """
    bindAddress healthzBindAddress metricsBindAddress configSyncPeriod udpIdleTimeout
    clientConnection.contentType clientConnection.qps clientConnection.burst logging.format logging.flushFrequency
"""
UNSET_WHEN_EMPTY = frozenset(_UNSET_WHEN_EMPTY.split()).union(*(mode.unset_when_empty for mode in MODES.values()))
"""Fields in which "", 0 or 0s counts as unset (kube-proxy's v1alpha1 defaults); in other fields zero is a value."""

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
        place = re.search(r"\$(\[\d+\])", str(error))  # of an invalid entry in a list
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
