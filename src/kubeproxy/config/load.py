"""From a configuration file to a valid KubeProxyConfiguration: reading, defaults and checks; and a watch of the file.

Reading is strict first: a field that is unknown or occurs twice is a mistake. As in the Go kube-proxy such a mistake
only leads to a logged notice, and the configuration is then read without the unknown field and with the last of the
duplicates, so that a file made for another release still works.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from kubeproxy.config.decode import decode
from kubeproxy.config.fields import API_VERSION, GROUP, KIND
from kubeproxy.config.messages import Mistake, did_you_mean, listed
from kubeproxy.config.types import KubeProxyConfiguration, with_defaults
from kubeproxy.config.validate import validate
from kubeproxy.config.write import differences
from kubeproxy.config.yaml_text import YamlDocument, yaml_documents
from kubeproxy.errors import ConfigError

logger = logging.getLogger("kubeproxy.config")

_MAX_DEPTH: Final = 50
_MAX_VALUES: Final = 100_000


def load_file(path: str | Path) -> KubeProxyConfiguration:
    """Return the configuration in a YAML or JSON file.

    Raises ConfigError when the file cannot be read, or with the mistakes of load_text after the file's name: on the
    same line when there is one, on a line each when there are several.
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
    """Return the configuration in YAML or JSON text, defaulted and validated, and the mistakes of strict reading.

    Raises ConfigError with a line for each mistake, which starts with the path of its field.
    """
    try:
        tree, duplicates = _tree(text)
        decoded = decode(_checked_type(tree))
    except RecursionError:
        raise ConfigError("cannot be read: nested too deeply") from None
    config = with_defaults(decoded.config, decoded.given)
    wrong = {mistake.path for mistake in decoded.wrong}
    raise_mistakes([*decoded.wrong, *(mistake for mistake in validate(config) if mistake.path not in wrong)])
    return config, [*decoded.strict, *(Mistake(path, "occurs more than once, the last counts") for path in duplicates)]


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
    """Return the first document of YAML text, or JSON text, which YAML's reader takes but for tabs and rare escapes."""
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


_Signature = tuple[int, int, int, int] | None
"""Device, inode, mtime (ns) and size of a file; None for no file."""


class NewConfiguration(Struct, frozen=True):
    """A valid configuration that differs from the running one, and how: lines "path: old -> new"."""

    config: KubeProxyConfiguration
    difference: list[str]


async def watch(
    path: str | Path,
    running: KubeProxyConfiguration,
    resolve: Callable[[KubeProxyConfiguration], KubeProxyConfiguration] = lambda config: config,
    interval: float = 1.0,
    invalid: Callable[[bool], None] = lambda _: None,
) -> AsyncIterator[NewConfiguration]:
    """Yield each valid configuration in the file that differs from the one yielded (or running) before.

    `resolve` applies the flags that outrank the file (Options.resolve). A file that cannot be read or is invalid is
    logged once, with every mistake, and changes nothing; `invalid` is called with its state at each change.

    A Kubernetes ConfigMap volume changes by swapping a symlink above the file, which a watch of the file itself never
    sees (the Go kube-proxy misses it). So the file's status is read every `interval` seconds, through all symlinks,
    which costs microseconds. A new status must last for one interval, so that a half-written file is not read.
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
                if not first:  # load_file has logged the mistakes of the first reading
                    _log_lenient(strict)
                if difference:
                    running = config
                    yield NewConfiguration(config, difference)
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
