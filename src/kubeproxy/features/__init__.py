"""The features that the Go kube-proxy lacks, each declared once. The flags, the settings, the check of the mode and the
warning about flags without effect are derived from these declarations: see CONTRIBUTING.md "A new feature". The module
is pure, because the model imports it, and fast to import, because the table of flags imports it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from socket import IPPROTO_TCP, IPPROTO_UDP
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, Protocol, TypeVar

from kubeproxy.errors import ConfigError

if TYPE_CHECKING:
    from msgspec import Struct

T = TypeVar("T")


class Features(NamedTuple):
    """The inputs of a node's features: the values of the flags that are set, and the mode ("" supports all features).
    `strict` disables all features."""

    values: Mapping[str, Any] = {}
    mode: str = ""
    strict: bool = False


class HasFeatures(Protocol):
    """An object that contains a node's features: model.world.Settings or model.plan.Globals."""

    @property
    def features(self) -> Features:
        """The node's features."""


P = TypeVar("P", bound="Struct")


class Feature(NamedTuple, Generic[T]):
    """A feature that the Go kube-proxy lacks. The only setting of a feature is its flag, which also applies with
    --config.

    `default` is the flag's value if the flag is not given, and its type is the type of the flag; `usage` is the flag's
    help. `modes` are the modes that support the feature; None means all. In other modes the feature has the value
    `off`, and the proxy reports that the flag has no effect. `annotations` are the names of the annotations that the
    feature reads. `mistake` gets a value of the flag, and all flags; it returns the reason to refuse the value, or "".
    `read` converts the flag's value into the feature's value."""

    flag: str
    default: bool | int | str
    usage: str
    off: T
    modes: frozenset[str] | None = None
    annotations: tuple[str, ...] = ()
    mistake: Callable[[Any, Mapping[str, Any]], str] = lambda _value, _flags: ""
    read: Callable[[Any], T] = lambda value: value

    @property
    def kind(self) -> str:
        """The type of the flag, as in config.flags.Flag."""
        return {bool: "bool", int: "int32", str: "string"}[type(self.default)]

    def supported(self, mode: str) -> bool:
        """Return whether a mode supports the feature."""
        return not mode or self.modes is None or mode in self.modes

    def value(self, node: HasFeatures) -> T:
        """Return the value of the feature on a node."""
        values, mode, strict = node.features
        return self.among(values) if self.supported(mode) and not strict else self.off

    def among(self, values: Mapping[str, Any]) -> T:
        """Return the feature's value in a mapping of values by flag."""
        return values[self.flag] if self.flag in values else self.read(self.default)

    def on(self, node: P, value: T) -> P:
        """Return a copy of a node's settings or globals in which this feature has the value `value`."""
        from msgspec import structs  # noqa: PLC0415 - --help does not need it

        features: Features = getattr(node, "features")  # noqa: B009 - of HasFeatures
        values = {**features.values, self.flag: value}
        return structs.replace(node, features=features._replace(values=values))

    def checked(self, flags: Mapping[str, Any]) -> T:
        """Return the value that the flags set. Raises ConfigError."""
        value = flags[self.flag]
        if reason := self.mistake(value, flags):
            raise ConfigError(f"--{self.flag}: {reason}")
        return self.read(value)


_NFTABLES: Final = frozenset({"nftables"})


def _negative(value: int, flags: Mapping[str, Any]) -> str:  # noqa: ARG001 - a Feature's `mistake`
    return f"must not be negative, got {value}" if value < 0 else ""


# Start-up taint: removed from the Node after the first full sync (program/startup_taint.py).

_LABEL_VALUE: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_QUALIFIED_NAME: Final = re.compile(
    r"([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?" + _LABEL_VALUE.pattern
)
"""A key of a label or taint: IsQualifiedName of apimachinery."""


def _no_taint_key(key: str, flags: Mapping[str, Any]) -> str:  # noqa: ARG001 - a Feature's `mistake`
    if key and not _QUALIFIED_NAME.fullmatch(key):
        return f'expected the key of a taint, as example.com/not-ready, got "{key}"'
    return ""


STARTUP_TAINT: Final = Feature[str](
    flag="startup-taint",
    default="",
    usage="The key of a taint that is removed from this Node after the first full sync. The proxy needs the"
    " right to patch Nodes. (Not in the Go kube-proxy.)",
    off="",
    mistake=_no_taint_key,
)

# Connection counters: the kernel counts the connections of each endpoint (backends/nftables/counting.py).

CONNECTION_COUNTERS: Final = Feature[bool](
    flag="connection-counters",
    default=False,
    usage="Count the connections of each endpoint in the kernel; nftables mode only. The counters use"
    " memory on nodes with many processors. (Not in the Go kube-proxy.)",
    off=False,
    modes=_NFTABLES,
)

# Resets of connections to endpoints that terminated and were deleted (backends/nftables/gone.py).

RESETS: Final = Feature[bool](
    flag="reset-gone-endpoints",
    default=False,
    usage="Reset connections of a Service's clients to deleted endpoints that were terminating; nftables mode "
    "only. (Not in the Go kube-proxy.)",
    off=False,
    modes=_NFTABLES,
)

# Fast forwarding: long connections bypass all rules by a flowtable (backends/nftables/forwarding.py).


class Forwarding(NamedTuple):
    """The protocols of connections that bypass all rules (none: the feature is off), and the number of client packets
    after which a connection bypasses the rules. See docs/beyond.md "Fast forwarding"."""

    after: int = 0
    protocols: tuple[int, ...] = ()


def _no_forwarding(after: int, flags: Mapping[str, Any]) -> str:
    if after and flags.get("reset-gone-endpoints"):
        return "cannot be used with --reset-gone-endpoints: fast forwarded connections bypass the rules of that flag"
    return _negative(after, flags)


FAST_FORWARDING: Final = Feature[Forwarding](
    flag="fast-forward-after",
    default=0,
    usage="Let connections of Services bypass all rules after this number of client packets, by a flowtable of the"
    " kernel; nftables mode only. 0 for never. (Not in the Go kube-proxy.)",
    off=Forwarding(),
    modes=_NFTABLES,
    mistake=_no_forwarding,
    read=lambda after: Forwarding(after, (IPPROTO_TCP, IPPROTO_UDP)) if after else Forwarding(),
)

# The kind of refusal of connections to a Service without endpoints (backends/nftables/ruleset.py).

REFUSAL_RESETS: Final = Feature[bool](
    flag="refuse-with-reset",
    default=True,
    usage="Refuse IPv4 TCP connections to Services without endpoints by a reset, not by an ICMP error, because the"
    " kernel limits the rate of ICMP errors to a client; nftables mode only. (Not in the Go kube-proxy.)",
    off=False,
    modes=_NFTABLES,
)

# Weights, draining, slow start, Maglev: annotations decide how connections are shared (model/balancing.py).

ENTRIES: Final = 1 << 20
"""The default limit of entries in the kernel for weights and Maglev tables, for all Services of a node together."""

BALANCING: Final = Feature[int](
    flag="balancing-entries",
    default=ENTRIES,
    usage="The limit of entries in the kernel for weights and consistent hashing, for all Services together; one "
    "namespace gets at most a quarter of the limit. Older Services get entries first; connections of Services "
    "without entries are shared evenly. 0 ignores these annotations; nftables mode only. (Not in the Go kube-proxy.)",
    off=0,
    modes=_NFTABLES,
    annotations=(
        "kube-proxy-py/weight",
        "kube-proxy-py/weights",
        "kube-proxy-py/slow-start",
        "kube-proxy-py/algorithm",
        "service.cilium.io/lb-algorithm",
        "service.cilium.io/weight",
    ),
    mistake=_negative,
)

# The Services of this proxy, if another Service proxy runs on the node (KEP-2447; api/source.py, model/compile.py).


def _no_label_value(name: str, flags: Mapping[str, Any]) -> str:  # noqa: ARG001 - a Feature's `mistake`
    return "" if not name or _LABEL_VALUE.fullmatch(name) else f'expected the value of a label, got "{name}"'


PROXY_NAME: Final = Feature[str](
    flag="service-proxy-name",
    default="",
    usage="Serve only the Services whose label service.kubernetes.io/service-proxy-name has this value; without this"
    " flag, only the Services without the label. (Not in the Go kube-proxy.)",
    off="",
    mistake=_no_label_value,
)

# Annotations of Cilium for the addresses and the clients of a Service (model/cilium.py).

CILIUM: Final = Feature[bool](
    flag="cilium-annotations",
    default=False,
    usage="Obey Cilium's annotations service.cilium.io/type and service.cilium.io/src-ranges-policy of Services."
    " (Not in the Go kube-proxy.)",
    off=False,
    annotations=("service.cilium.io/type", "service.cilium.io/src-ranges-policy"),
)

# Ejection: endpoints that do not answer this node get no new connections (model/ejection.py).

Ejecting = Literal["never", "requested", "always"]
"""The Services with ejection of failing endpoints: none, Services with the annotation value `on`, or all Services
except those with the value `off`."""

EJECTION: Final = Feature[Ejecting](
    flag="eject-failing-endpoints",
    default=False,
    usage="Send no new connections to endpoints that do not answer this node, until they answer again; without the"
    " flag, this applies only to Services with the annotation kube-proxy-py/eject: on; nftables mode only. (Not in the"
    " Go kube-proxy.)",
    off="never",
    modes=_NFTABLES,
    annotations=("kube-proxy-py/eject",),
    read=lambda on: "always" if on else "requested",
)

# Ranges of ports: an annotation adds ranges to a Service's addresses (model/port_ranges.py).

PORT_RANGES: Final = Feature[int](
    flag="port-ranges",
    default=16,
    usage="The limit of port ranges that the annotation kube-proxy-py/port-ranges adds to a Service. 0 ignores the"
    " annotation; nftables mode only. (Not in the Go kube-proxy.)",
    off=0,
    modes=_NFTABLES,
    annotations=("kube-proxy-py/port-ranges",),
    mistake=_negative,
)

FEATURES: Final[dict[str, Feature[Any]]] = {
    feature.flag: feature
    for feature in (
        STARTUP_TAINT,
        CONNECTION_COUNTERS,
        RESETS,
        FAST_FORWARDING,
        REFUSAL_RESETS,
        BALANCING,
        PROXY_NAME,
        CILIUM,
        EJECTION,
        PORT_RANGES,
    )
}
"""All features, by flag."""


def values(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the features by flag, for the flags that are set. Raises ConfigError."""
    return {name: feature.checked(flags) for name, feature in FEATURES.items() if name in flags}
