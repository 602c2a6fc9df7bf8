"""A feature that the Go kube-proxy lacks: its flag, its annotations, and the modes that support it. Pure.

Light to import, as the table of flags is made from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from kubeproxy.errors import ConfigError

if TYPE_CHECKING:
    from msgspec import Struct

T = TypeVar("T")


class Features(NamedTuple):
    """The features of a node: the values of those that are set, by flag, and the mode. Mode "" supports all."""

    values: Mapping[str, Any] = {}
    mode: str = ""


class HasFeatures(Protocol):
    """Anything that carries the features of a node: model.world.Settings, model.plan.Globals."""

    @property
    def features(self) -> Features:
        """The node's features."""


P = TypeVar("P", bound="Struct")


class Feature(NamedTuple, Generic[T]):
    """One feature. It has no other setting than its flag, which also counts beside --config.

    `kind` and `default` are those of config.flags.Flag, `usage` is its help. `modes` support the feature, None: all of
    them. In other modes its value is `off`, and the proxy reports that the flag has no effect. `unset` is the value
    without the flag. `annotations` are the names of the annotations that the feature reads.

    `mistake` returns the reason to refuse a value of the flag, given all flags, or "". `read` parses the text into the
    value.
    """

    flag: str
    kind: Literal["bool", "int32", "string"]
    default: str
    usage: str
    off: T
    unset: T
    modes: frozenset[str] | None = None
    annotations: tuple[str, ...] = ()
    mistake: Callable[[Any, Mapping[str, Any]], str] = lambda _value, _flags: ""
    read: Callable[[Any], T] = lambda value: value

    def supported(self, mode: str) -> bool:
        """Return whether a mode supports the feature."""
        return not mode or self.modes is None or mode in self.modes

    def value(self, node: HasFeatures) -> T:
        """Return the value of the feature on a node."""
        features = node.features
        return self.among(features.values) if self.supported(features.mode) else self.off

    def among(self, values: Mapping[str, Any]) -> T:
        """Return the value of the feature among those that are set."""
        value: T = values.get(self.flag, self.unset)
        return value

    def on(self, node: P, value: T) -> P:
        """Return the settings or globals of a node with another value of the feature."""
        from msgspec import structs  # noqa: PLC0415 - not for --help

        features: Features = getattr(node, "features")  # noqa: B009 - of HasFeatures
        values = {**features.values, self.flag: value}
        return structs.replace(node, features=features._replace(values=values))

    def checked(self, flags: Mapping[str, Any]) -> T:
        """Return the value that the flags set. Raises ConfigError."""
        value = flags[self.flag]
        if reason := self.mistake(value, flags):
            raise ConfigError(f"--{self.flag}: {reason}")
        return self.read(value)
