"""What a proxy mode is to the rest of the program. Each room has a `mode.py` with one MODE of this kind.

Beside it is a `cleanup.py`, which is loaded in other modes as well: its `cleanup()` removes all that the mode (ours, or
that of the Go kube-proxy) has put into the kernel, and returns what could not be removed; what other modes may be using
under the same name stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Literal, NamedTuple, Protocol

from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.kernel.xtables import Commands
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import Globals, ServiceName, ServicePlan


class Depth(Enum):
    """How closely a backend looks for what other programs changed.

    A kernel that says that nobody touched anything is taken at its word, at either depth: that costs microseconds.
    """

    QUICK = "quick"
    """What shows without reading every element: chains, rules, counts."""
    THOROUGH = "thorough"
    """Everything; the cost grows with the cluster."""


class Difference(NamedTuple):
    """What another program changed, in words for an operator.

    One that is not `certain` is believed when a second look shows it as well: a dump may catch the kernel's hash
    tables while they grow, and lack some elements then.
    """

    what: str
    certain: bool = True


class Backend(Protocol):
    """What a mode does for one family. All calls block and raise ApplyError; none is made beside another one."""

    family: Family
    blocking: bool
    """Whether a sync of few changes may take long as well, so that it must not hold the event loop."""

    def set_world(self, world: Globals) -> bool:
        """Take changed globals in; return whether a resync is due."""

    def sync(self, changes: Sequence[tuple[ServiceName, tuple[ServicePlan, ...]]]) -> Iterator[int]:
        """Program changed Services, yielding the size of each transaction."""

    def resync(self, wanted: Mapping[ServiceName, tuple[ServicePlan, ...]]) -> Iterator[int]:
        """Make the kernel hold exactly this."""

    def inspect(self, depth: Depth) -> Difference | None:
        """Return how the kernel differs from what was committed; None where nothing shows at this depth."""

    def upkeep(self) -> None:
        """Do what is due without any change: asked for each second, before an inspection."""

    def close(self) -> None:
        """Let go of the kernel; the rules stay."""


PacketCounter = Literal["invalid dropped", "localhost accepted"]
"""What iptables rules count: packets that conntrack cannot place, NodePort connections to loopback."""


class Report(Protocol):
    """Where a backend says what only its mode has. Called from any thread; must return at once and not raise."""

    def restore_failed(self, family: Family, *, partial: bool) -> None:
        """iptables-restore refused a sync."""

    def rules(self, family: Family, table: str, total: int, last: int) -> None:
        """So many iptables rules are in a table, and so many were in the last sync."""

    def waited(self, family: Family, seconds: float) -> None:
        """A sync waited so long for the lock of iptables, which another program held."""

    def counts(self, counter: PacketCounter, read: Callable[[], float]) -> None:
        """Ask this function from now on for what the kernel has counted; it must be quick and not raise."""


def _prepare_nothing(config: KubeProxyConfiguration) -> None:
    pass


def _keeps_nothing(commands: Commands, table: str, chain: str) -> bool:  # noqa: ARG001 - a mode without iptables
    return False


class Mode(NamedTuple):
    """One proxy mode.

    `check` raises Unsupported when this node cannot run it, and says how to get what is missing. `open` makes the
    backends, one a family, that know of no Service yet. `keeps` says of a chain of iptables, by its table, whether
    the running mode itself uses it. `prepare` sets what needs more than CAP_NET_ADMIN, unless it is set; --init-only
    does so for a proxy with less.
    """

    name: str
    check: Callable[[KubeProxyConfiguration, Sequence[Family]], None]
    open: Callable[[KubeProxyConfiguration, Globals, Report], Sequence[Backend]]
    keeps: Callable[[Commands, str, str], bool] = _keeps_nothing
    prepare: Callable[[KubeProxyConfiguration], None] = _prepare_nothing
