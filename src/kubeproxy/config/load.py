"""From a file or text to a valid KubeProxyConfiguration: reading, defaults and checks in their order.

Reading is strict first: a field that is unknown or occurs twice is a mistake. As in the Go kube-proxy such a mistake
only leads to a logged notice, and the configuration is then read without the unknown field and with the last of the
duplicates, so that a file made for another release still works.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from kubeproxy.config.decode import decode
from kubeproxy.config.defaults import with_defaults
from kubeproxy.config.fields import API_VERSION, GROUP, KIND
from kubeproxy.config.messages import Mistake, did_you_mean, listed
from kubeproxy.config.tree import parse
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.config.validate import validate
from kubeproxy.errors import ConfigError

logger = logging.getLogger("kubeproxy.config")


def load_file(path: str | Path) -> KubeProxyConfiguration:
    """The configuration in a YAML or JSON file.

    ConfigError when the file cannot be read, or with the mistakes of load_text after the file's name: on the same line
    when there is one, on a line each when there are several.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"cannot read the configuration file {path}: {reason}") from None
    try:
        return load_text(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {listed(str(error))}") from None


def load_text(text: str) -> KubeProxyConfiguration:
    """The configuration in YAML or JSON text, as read_text has it; what a strict reading refuses is logged."""
    config, strict = read_text(text)
    log_lenient(strict)
    return config


def read_text(text: str) -> tuple[KubeProxyConfiguration, list[Mistake]]:
    """The configuration in YAML or JSON text, defaulted and validated, and what a strict reading would refuse.

    ConfigError holds one line for each mistake, all of them, each starting with the path of its field.
    """
    tree, duplicates = parse(text)
    decoded = decode(_checked_type(tree))
    config = with_defaults(decoded.config, decoded.given)
    wrong = {mistake.path for mistake in decoded.wrong}
    raise_mistakes([*decoded.wrong, *(mistake for mistake in validate(config) if mistake.path not in wrong)])
    return config, [*decoded.strict, *(Mistake(path, "occurs more than once, the last counts") for path in duplicates)]


def log_lenient(strict: list[Mistake]) -> None:
    """Log what was passed over in reading; nothing when there is nothing."""
    if strict:
        logger.warning(
            "The configuration was read leniently, as strict reading failed: %s", "; ".join(map(str, strict))
        )


def raise_mistakes(mistakes: list[Mistake]) -> None:
    """Raise one ConfigError for all mistakes, a line each; nothing when there are none."""
    if mistakes:
        raise ConfigError("\n".join(map(str, mistakes)))


def _checked_type(tree: Any) -> dict[str, Any]:
    """The tree without apiVersion and kind; ConfigError when it is not a KubeProxyConfiguration v1alpha1."""
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
