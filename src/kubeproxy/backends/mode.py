"""The interface of a proxy mode: properties, which are read in every mode, and operations, which only the running mode
performs.

Each mode has a folder with its name. `__init__.py` defines MODE and imports little, because it is loaded in every mode;
`mode.py` defines OPERATIONS and is loaded if the mode runs; `cleanup.py` is loaded to find or remove objects of the
mode. `cleanup(keeps)` removes the kernel objects of the mode, ours or the Go kube-proxy's, and returns the failures.
`cleanup` keeps the objects that the running mode uses under the same name. `traces(sight, owns)` returns the mode's
objects in the kernel."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from enum import Enum
from importlib import import_module
from typing import Any, Final, NamedTuple, Protocol

from msgspec import Struct

from kubeproxy.backends.state import Examiner, NamedPlans, Plans
from kubeproxy.config.modes import ModeConfig
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.kernel.chains import Chain, RuleChain
from kubeproxy.kernel.conntrack.tracked import DESTINATION_TRANSLATED
from kubeproxy.kernel.xtables.xtables import Commands
from kubeproxy.model.addresses import Family
from kubeproxy.model.answer import Packet
from kubeproxy.model.gone import Departed
from kubeproxy.model.plan import Globals, Habits, ServicePortKey
from kubeproxy.model.world import Settings
from kubeproxy.registry import MetricRegistry


class Depth(Enum):
    """The depth of a backend's search for changes by other programs. If the kernel reports that no other program has
    changed anything, a search of any depth takes only microseconds."""

    QUICK = "quick"
    """Find only changes that can be found without reading every element: changes of chains and rules, and of the number
    of elements."""
    THOROUGH = "thorough"
    """Find all changes; the cost grows with the cluster."""


class ForeignChange(NamedTuple):
    """A change by another program, described for operators. If a change is not `certain`, a second inspection must
    confirm it, because a dump may lack elements while the kernel's hash tables grow."""

    what: str
    certain: bool = True


class Abilities(Struct, frozen=True, kw_only=True):
    """The optional abilities of a backend; None for an ability that the backend lacks."""

    at_once: bool = False
    """Whether a large sync costs as much as a small sync, so that large Services need not be written separately."""
    programmed: Callable[[], int] | None = None
    """Returns the number of Services that the current full sync has written so far; safe on any thread."""
    depart: Callable[[Departed, Callable[[bytes], bool]], bool] | None = None
    """A function that receives gone endpoints; the next sync or resync resets their connections. Returns whether there
    are changes to write. The second argument is a function that returns whether an endpoint currently has a packed
    address."""
    ports_of: Callable[[ServicePortKey], Collection[int]] | None = None
    """Returns the ports on which this proxy listens for connections of a service port. Fast; safe on any thread."""
    disturbed: Callable[[], bool] | None = None
    """Returns whether another program has changed committed state. The result remains True until a repair, or until an
    inspection finds no difference. Safe on any thread except the event loop's."""
    suspects: Callable[[], Collection[bytes]] | None = None
    """Returns the endpoints (keys as in model.ejection) that did not answer a client within the last seconds. The
    kernel records such endpoints only if the globals request it. Raises ApplyError; safe on any thread, but only one
    call at a time. """


class Backend(Protocol):
    """The implementation of a mode for one family. A call raises ApplyError if it fails. Only one call runs at a time.
    Only `close` may be called on the event loop; the other methods can block for seconds while another program holds
    the kernel's locks."""

    family: Family
    abilities: Abilities

    def set_world(self, world: Globals) -> bool:
        """Set the globals; return whether a resync is needed. After ApplyError the caller repeats the call."""

    def sync(self, changes: Sequence[NamedPlans]) -> Iterator[int]:
        """Program changed Services, yielding the size of each transaction."""

    def resync(self, wanted: Plans) -> Iterator[int]:
        """Make the kernel's state equal to these plans, yielding the size of each transaction."""

    def inspect(self, depth: Depth) -> ForeignChange | None:
        """Return a difference between kernel and committed state; None if an inspection of this depth finds no
        difference."""

    def upkeep(self) -> None:
        """Do periodic work; called once a second, before an inspection."""

    def close(self) -> None:
        """Close the sockets; the rules are not removed."""


Keeps = Callable[[Commands, str, str], bool]
"""Returns whether the running mode uses the iptables chain with these commands, table and name."""


def keeps_nothing(*_: object) -> bool:
    """Return False: no chain is in use."""
    return False


class Sight(NamedTuple):
    """The chains of nf_tables and the chains of iptables on a node; chains of iptables-nft are in both groups."""

    nf_tables: Sequence[Chain]
    xtables: Sequence[RuleChain]


class Trace(NamedTuple):
    """A kernel object of a mode, ours or the Go kube-proxy's: its description, and its family (None for both families).
    `catches` returns whether the object affects an incoming packet: rules of the table or chains match the packet, or
    the interface of ipvs mode has the packet's destination address. If the second argument is True, `catches` ignores
    objects that a packet passes after its translation by this proxy. `catches` raises ApplyError."""

    what: str
    family: Family | None
    catches: Callable[[Packet, bool], bool] = lambda *_: True
    alone: str = "Services of these rules keep the last endpoints that the proxy wrote"
    """The effect of the objects while no proxy runs."""
    program: str = ""
    """The iptables command that lists the object, if the object consists of chains of iptables."""


class Weight(NamedTuple):
    """The number of kernel objects that a mode writes for Services, and a plural noun for the objects."""

    amount: int
    of: str


Weigh = Callable[[Globals, Family, Plans, Sequence[bytes]], Weight]
"""Returns the number of kernel objects for a family's plans on a node with these packed addresses. Pure."""

Owns = Callable[[str, str], bool]
"""Returns whether the running mode has an iptables chain of this table and name, in any variant of iptables."""


class Room(NamedTuple):
    """A kernel table with a limit: name, use, limit, and the consequence and the fix when the table is full."""

    name: str
    used: int
    limit: int
    why: str
    fix: str


def _nothing(*_: object) -> Any:
    return ()


class Operations(NamedTuple):
    """The operations of the running mode.

    `check` raises Unsupported, with the missing requirement and its remedy, if this node cannot run the mode. `look`
    makes the same checks without changing the node, so it detects fewer problems. `weigh`: see Weigh. `open` creates
    the backends, one per family, without Services. `prepare` changes settings that need more than CAP_NET_ADMIN.
    `sysctls` returns the sysctls that the mode changes, at the start or later, in addition to those of conntrack;
    --init-only writes all sysctls of the mode, for a proxy with fewer rights. `owns`: see Owns; `commands` returns the
    iptables commands that the mode uses. `remove_displaced` removes rules of this mode in other places, such as another
    variant of iptables, and returns the failures. `within` returns the settings without the features that this kernel
    lacks, and logs the removed features. `examine` creates one examiner per family, for a separate process that cannot
    write. `rooms` reads the tables with a limit, at a constant cost; `rooms` raises ApplyError."""

    check: Callable[[KubeProxyConfiguration, Sequence[Family]], None]
    look: Callable[[KubeProxyConfiguration, Sequence[Family]], None]
    weigh: Weigh
    open: Callable[[KubeProxyConfiguration, Globals, MetricRegistry], Sequence[Backend]]
    examine: Callable[[KubeProxyConfiguration, Globals, Sequence[Family]], Sequence[Examiner]]
    prepare: Callable[[KubeProxyConfiguration], None] = _nothing
    sysctls: Callable[[KubeProxyConfiguration], Sequence[tuple[str, int]]] = _nothing
    owns: Owns = keeps_nothing
    commands: Callable[[Family], Commands] | None = None
    remove_displaced: Callable[[], list[str]] = list
    within: Callable[[Settings], Settings] = lambda settings: settings
    rooms: Callable[[Sequence[Family]], Sequence[Room]] = _nothing

    def keeps(self, commands: Commands, table: str, chain: str) -> bool:
        """Return whether the mode uses a chain. Raises Unsupported, or ApplyError."""
        if self.commands is None or not self.owns(table, chain):
            return False
        return commands.name == self.commands(commands.family).name


class FlowsEnd(Enum):
    """The destination of clients' connections in connection tracking: the endpoint, or the proxy."""

    ENDPOINTS = "endpoints"
    PROXY = "proxy"


class Metric(NamedTuple):
    """A metric's name and help."""

    name: str
    text: str


RESTORE_FAILURES: Final = Metric(
    "kubeproxy_sync_proxy_rules_iptables_restore_failures_total", "[ALPHA] Cumulative proxy iptables restore failures"
)
"""The counter of modes that write rules by iptables-restore; the label is the family."""


class Deprecation(NamedTuple):
    """The reason and the note of the Node's warning event for a mode that Kubernetes is removing."""

    reason: str
    note: str


class Mode(NamedTuple):
    """The properties of a proxy mode.

    `config` is the mode's part of the configuration, `room` its Python package. `interface` is the name of an interface
    of the mode, with addresses of Services. `table` is the name of the mode's nf_tables table in each family.
    `refusals` is the mode's counter of syncs that the kernel refused, by family. `habits` are the differences between
    modes that clients can observe. `tracked_as` are the status bits of the mode's connections in connection tracking,
    or 0 if no bits distinguish these connections. `comparable`: `kube-proxy plan --from-kernel` can compare the mode's
    rules for all packets."""

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
        """The mode's name, as the configuration's field `mode` spells it."""
        return self.config.name

    def operations(self) -> Operations:
        """Import the mode's operations."""
        operations: Operations = import_module(f"{self.room}.mode").OPERATIONS
        return operations

    def decision(self, table: str, chain: str) -> str | None:
        """Return a text about a netfilter chain's decision; None if the chain does not belong to this mode."""
        words: str | None = import_module(f"{self.room}.cleanup").decision(table, chain)
        return words

    def cleanup(self, keeps: Keeps = keeps_nothing) -> list[str]:
        """Remove the mode's objects from the kernel, except chains that another mode keeps; return the failures."""
        failures: list[str] = import_module(f"{self.room}.cleanup").cleanup(keeps)
        return failures

    def traces(self, sight: Sight, owns: Owns = keeps_nothing) -> list[Trace]:
        """Return the mode's objects in the kernel, except chains that another mode `owns`. Changes nothing."""
        traces: list[Trace] = import_module(f"{self.room}.cleanup").traces(sight, owns)
        return traces
