"""What a proxy mode is to the rest of the program: what others must know of it, and what it does when it runs.

Each mode has a folder of its name. Its `__init__.py` has the MODE and is light, as it is loaded whatever mode runs;
`mode.py` has the OPERATIONS and is loaded when the mode is the one to run; `cleanup.py` is loaded when something of the
mode is to be removed. Its `cleanup(keeps)` removes all that the mode (ours, or that of the Go kube-proxy) has put into
the kernel, and returns what could not be removed; what the running mode uses under the same name stays. Its
`traces(sight, owns)` says what of it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from importlib import import_module
from typing import Final, NamedTuple, Protocol, TypeVar

from msgspec import Struct

from kubeproxy.backends.examination import Examiner
from kubeproxy.config.modes import ModeConfig
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.kernel.chains import Chain, RuleChain
from kubeproxy.kernel.conntrack.tracked import DESTINATION_TRANSLATED
from kubeproxy.kernel.xtables.xtables import Commands
from kubeproxy.model.addresses import Family
from kubeproxy.model.answer import Packet
from kubeproxy.model.gone import Departed
from kubeproxy.model.plan import Globals, Habits, ServiceName, ServicePlan, ServicePortKey
from kubeproxy.model.world import Settings


class Depth(Enum):
    """How closely a backend looks for what other programs changed.

    A kernel that says that nobody touched anything is taken at its word, at either depth: that costs microseconds.
    """

    QUICK = "quick"
    """What shows without reading every element: chains, rules, counts."""
    THOROUGH = "thorough"
    """Everything; the cost grows with the cluster."""


class ForeignChange(NamedTuple):
    """What another program changed, in words for an operator.

    One that is not `certain` is believed when a second look shows it as well: a dump may catch the kernel's hash
    tables while they grow, and lack some elements then.
    """

    what: str
    certain: bool = True


class Abilities(Struct, frozen=True, kw_only=True):
    """What not every backend can do; None where it cannot."""

    at_once: bool = False
    """Whether a sync costs the same whatever is in it, so that large Services do not wait for each other."""
    programmed: Callable[[], int] | None = None
    """Returns how many Services the kernel has of those that a full sync under way is to bring; on any thread."""
    depart: Callable[[Departed, Callable[[bytes], bool]], bool] | None = None
    """Takes in endpoints that are gone, whose connections the next sync or resync resets; returns whether there is
    anything to write. The second argument says of a packed address whether an endpoint has it, whenever called."""
    ports_of: Callable[[ServicePortKey], Collection[int]] | None = None
    """Returns the listening ports of this proxy that currently receive the connections of a service port. Fast; safe on
    any thread."""
    disturbed: Callable[[], bool] | None = None
    """Returns whether another program is known to have changed what was committed, until a repair or an inspection
    without a difference; on any thread but the event loop's."""


class Backend(Protocol):
    """What a mode does for one family. All calls block and raise ApplyError; none is made beside another one.

    Only `close` may be called on the event loop; the other methods can block for seconds while another program holds
    the kernel's locks.
    """

    family: Family
    abilities: Abilities

    def set_world(self, world: Globals) -> bool:
        """Take changed globals in; return whether a resync is due. Raises ApplyError: then they come once more."""

    def sync(self, changes: Sequence[tuple[ServiceName, tuple[ServicePlan, ...]]]) -> Iterator[int]:
        """Program changed Services, yielding the size of each transaction."""

    def resync(self, wanted: Mapping[ServiceName, tuple[ServicePlan, ...]]) -> Iterator[int]:
        """Make the kernel hold exactly this."""

    def inspect(self, depth: Depth) -> ForeignChange | None:
        """Return how the kernel differs from what was committed; None where nothing shows at this depth."""

    def upkeep(self) -> None:
        """Do what is due without any change: asked for each second, before an inspection."""

    def close(self) -> None:
        """Let go of the kernel; the rules stay."""


Keeps = Callable[[Commands, str, str], bool]
"""Says of a chain of iptables, by its commands, table and name, whether the running mode itself uses it."""


def keeps_nothing(commands: Commands, table: str, chain: str) -> bool:  # noqa: ARG001 - a mode without iptables
    """Return False: none of the chains is in use."""
    return False


M_co = TypeVar("M_co", covariant=True)


class Counter(Protocol):
    """A number that only grows."""

    def inc(self, by: float = 1.0) -> None:
        """Count."""

    def follow(self, function: Callable[[], float]) -> None:
        """Ask this function for the total from now on; it must be quick and not raise."""


class Gauge(Protocol):
    """A number that goes up and down."""

    def set(self, value: float) -> None:
        """Set the number."""


class Labelled(Protocol[M_co]):
    """A metric with labels."""

    def labels(self, *values: str) -> M_co:
        """Return the one with these values."""

    def clear(self) -> None:
        """Forget all, before they are reported anew."""


class Registry(Protocol):
    """Where a mode registers the metrics that it alone has, and gets them back."""

    def counter(self, name: str, text: str, *labels: str) -> Labelled[Counter]:
        """Register a counter with its help and the names of its labels."""

    def gauge(self, name: str, text: str, *labels: str) -> Labelled[Gauge]:
        """Register a gauge."""


class Sight(NamedTuple):
    """The chains that there are on a node: those of nf_tables, and those of iptables, which may be among them."""

    nf_tables: Sequence[Chain]
    xtables: Sequence[RuleChain]


class Trace(NamedTuple):
    """Something in the kernel that a mode has put there, ours or the Go kube-proxy's: what, in words, and its family,
    None for both. `catches` says whether it has rules for a packet as it comes; it raises ApplyError.
    """

    what: str
    family: Family | None
    catches: Callable[[Packet], bool] = lambda _: True


class Weight(NamedTuple):
    """How much a mode writes into the kernel for Services, beside what it writes without any: how many of what."""

    amount: int
    of: str


Weigh = Callable[[Globals, Family, Mapping[ServiceName, tuple[ServicePlan, ...]], Sequence[bytes]], Weight]
"""Weighs the plans of a family, on a node with these packed addresses. Pure."""

Owns = Callable[[str, str], bool]
"""Says of a chain of iptables, by its table and name, whether the running mode itself has one of that name there."""


def owns_nothing(table: str, chain: str) -> bool:  # noqa: ARG001 - a mode without iptables
    """Return False."""
    return False


class Room(NamedTuple):
    """How much is used of something that has a limit in the kernel: its name in words, the figures, why it matters when
    it is full, and what helps then.
    """

    name: str
    used: int
    limit: int
    why: str
    fix: str


def _no_rooms(families: Sequence[Family]) -> Sequence[Room]:  # noqa: ARG001 - has none
    return ()


def _no_sysctls(config: KubeProxyConfiguration) -> list[tuple[str, int]]:  # noqa: ARG001 - needs none
    return []


def _prepare_nothing(config: KubeProxyConfiguration) -> None:
    pass


def _all_of_them(settings: Settings) -> Settings:
    return settings


def _no_strays() -> list[str]:
    return []


class Operations(NamedTuple):
    """What a mode does when it is the one to run.

    `check` raises Unsupported when this node cannot run it, and says how to get what is missing; `look` does so without
    changing anything, so that it notices less. `weigh` says how much plans are in the kernel. `open` makes the
    backends, one a family, that know of no Service yet. `prepare` sets what needs more than CAP_NET_ADMIN, unless it is
    set; --init-only does so for a proxy with less, and then does what `initialize` is for: what a proxy with the rights
    for it does later by itself. `sysctls` are the settings that the mode changes, at the start or later, in addition to
    those of connection tracking. `keeps` says what is not to be removed, of which `owns` tells without looking;
    `remove_strays` removes what this mode itself has left elsewhere, as in another variant of iptables; it returns what
    could not be removed. `within` returns settings without what this kernel cannot do, and says so. `examine` creates
    one examiner per family, which compares the kernel with plans beside the proxy, and cannot write. `rooms` reads what
    may become full there, at a cost that does not grow with it; it raises ApplyError.
    """

    check: Callable[[KubeProxyConfiguration, Sequence[Family]], None]
    look: Callable[[KubeProxyConfiguration, Sequence[Family]], None]
    weigh: Weigh
    open: Callable[[KubeProxyConfiguration, Globals, Registry], Sequence[Backend]]
    examine: Callable[[KubeProxyConfiguration, Globals, Sequence[Family]], Sequence[Examiner]]
    prepare: Callable[[KubeProxyConfiguration], None] = _prepare_nothing
    sysctls: Callable[[KubeProxyConfiguration], Sequence[tuple[str, int]]] = _no_sysctls
    keeps: Keeps = keeps_nothing
    owns: Owns = owns_nothing
    remove_strays: Callable[[], list[str]] = _no_strays
    initialize: Callable[[KubeProxyConfiguration], None] = _prepare_nothing
    within: Callable[[Settings], Settings] = _all_of_them
    rooms: Callable[[Sequence[Family]], Sequence[Room]] = _no_rooms


class FlowsEnd(Enum):
    """Where the connections end that the kernel tracks: at the endpoints, or at the proxy itself."""

    ENDPOINTS = "endpoints"
    PROXY = "proxy"


class Metric(NamedTuple):
    """A metric's name and help."""

    name: str
    text: str


RESTORE_FAILURES: Final = Metric(
    "kubeproxy_sync_proxy_rules_iptables_restore_failures_total", "[ALPHA] Cumulative proxy iptables restore failures"
)
"""What the modes count that write rules by iptables-restore; its label is the family."""


class Deprecation(NamedTuple):
    """What is told of a mode that Kubernetes gives up, as a warning event of the Node: its reason and its note."""

    reason: str
    note: str


class Mode(NamedTuple):
    """One proxy mode, as others must know it before it runs, or when another one does.

    `config` is what the configuration says of it, `room` its package. `interface` is one that it makes, whose
    addresses are Services' and not the node's, `table` its table of nf_tables in each family. `refusals` is a counter
    that the mode has of its own for syncs that the kernel refused, by family. `habits` are in what a client may notice
    which mode runs. `tracked_as` are bits that the status of its connections has in connection tracking; 0 where it
    does not tell them from others. `comparable`: `kube-proxy plan --from-kernel` can compare its rules for all packets.
    """

    config: ModeConfig
    room: str
    habits: Habits = Habits()
    interface: str = ""
    table: str = ""
    flows_end: FlowsEnd = FlowsEnd.ENDPOINTS
    tracked_as: int = DESTINATION_TRANSLATED
    refusals: Metric | None = None
    comparable: bool = False
    deprecation: Deprecation | None = None

    @property
    def name(self) -> str:
        """The name, as in the field `mode` of the configuration."""
        return self.config.name

    def operations(self) -> Operations:
        """Load what the mode does."""
        operations: Operations = import_module(f"{self.room}.mode").OPERATIONS
        return operations

    def decision(self, table: str, chain: str) -> str | None:
        """Return what a chain of netfilter decides, in words, None for one that is not of this mode."""
        words: str | None = import_module(f"{self.room}.cleanup").decision(table, chain)
        return words

    def cleanup(self, keeps: Keeps = keeps_nothing) -> list[str]:
        """Remove what the mode put into the kernel, but for what another one keeps; return what could not be."""
        failures: list[str] = import_module(f"{self.room}.cleanup").cleanup(keeps)
        return failures

    def traces(self, sight: Sight, owns: Owns = owns_nothing) -> list[Trace]:
        """Return what is there of the mode, but for chains that another one `owns`. Changes nothing."""
        traces: list[Trace] = import_module(f"{self.room}.cleanup").traces(sight, owns)
        return traces
