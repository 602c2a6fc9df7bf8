"""iptables mode, one family: remembers the written rules, and turns changed plans into the input of iptables-restore.

A sync writes the changed chains of Services, and a chain that all Services share only when its rules changed: a restore
with --noflush leaves the chains alone that it does not name. Blocking calls; the engine runs them in a thread. Source:
kube-proxy v1.36 pkg/proxy/iptables/proxier.go.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Final, NamedTuple, Self

from kubeproxy.backends.ahead import Ahead
from kubeproxy.backends.iptables import skeleton
from kubeproxy.backends.iptables.audit import Audit
from kubeproxy.backends.iptables.contents import Changes, Contents, ContentsChange, OwnChains, Plans
from kubeproxy.backends.iptables.found import FoundTable, Place, read
from kubeproxy.backends.iptables.metrics import Metrics, make_counters
from kubeproxy.backends.iptables.names import SERVICE_PREFIXES
from kubeproxy.backends.iptables.render import Style
from kubeproxy.backends.iptables.restores import (
    Work,
    declarations,
    foundation,
    jumps,
    once,
    one_restore,
    several_restores,
)
from kubeproxy.backends.iptables.skeleton import CANARY_TABLES, RuleSettings, SharedChain, StartOptions
from kubeproxy.backends.iptables.stale import Removal, Stale
from kubeproxy.backends.iptables.watch import Watch, watch
from kubeproxy.backends.mode import Abilities, Depth, ForeignChange
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.proc.sysctl import write_sysctl
from kubeproxy.kernel.xtables.nft_compat import writer_of
from kubeproxy.kernel.xtables.xtables import Commands, RestoreError, Writer, chain_of
from kubeproxy.kernel.xtables.xtables_lock import NotReleasedError, Waited
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import FamilyGlobals, Globals, ServiceName

log = logging.getLogger("kubeproxy.iptables")

FULL_PERIOD: Final = 3600.0  # seconds; kube-proxy's FullSyncPeriod
ROUTE_LOCALNET: Final = "net/ipv4/conf/all/route_localnet"

SHARED: Final = (
    ("filter", "KUBE-SERVICES"),
    ("filter", "KUBE-EXTERNAL-SERVICES"),
    ("filter", "KUBE-NODEPORTS"),
    ("filter", "KUBE-PROXY-FIREWALL"),
    ("nat", "KUBE-SERVICES"),
    ("nat", "KUBE-NODEPORTS"),
)
"""Table and chain of each field of a Dispatch."""

_NAT_SERVICES, _NAT_NODEPORTS = 4, 5


class IptablesBackend:
    """Programs one family. `sync` writes changes; `resync` writes everything and removes chains without a Service."""

    abilities = Abilities(at_once=True)

    def __init__(
        self,
        commands: Commands,
        world: Globals,
        options: StartOptions,
        metrics: Metrics,
        watching: Watch,
        writer: Writer,
    ) -> None:
        self.family: Family = commands.family
        self._commands = commands
        self._writer = writer
        self._options = options
        self._metrics = metrics
        self._world = world
        self._settings = self._settings_of(world)
        self._contents = Contents(self._style())
        self._nodeport_rules = ""  # as written last
        self._watch = watching
        self._audit = Audit(commands, self._restore_text)
        self._stale = Stale(commands, self._writer.chains_at_once, self._restore_text)
        self._fixed: dict[Place, SharedChain] = {}  # chains that no Service changes, as written last
        self._harmed: frozenset[ServiceName] = frozenset()  # Services to repair, if only their own chains differ
        self._written_settings: RuleSettings | None = None  # by the last full sync
        self._unwanted: list[str] = []  # stale chains that the last full sync found
        self._full_due = 0.0
        self._counts: dict[int, int] = {}  # rules in each shared chain, by its place in SHARED
        self._loopback_tried = False

    @classmethod
    def open(cls, commands: Commands, world: Globals, options: StartOptions, metrics: Metrics) -> Self:
        """Return a backend for the network namespace of the caller. Raises ApplyError."""
        return cls(commands, world, options, metrics, watch(commands), writer_of(commands))

    def close(self) -> None:
        """Close the sockets; the rules stay."""
        self._watch.close()
        self._writer.close()

    def set_world(self, world: Globals) -> bool:
        """Take changed globals; return whether they change rules of all Services, so that a resync is needed."""
        before, style = self._settings, self._style()
        self._world = world
        self._settings = self._settings_of(world)
        # New NodePort addresses alone change one shared chain, which the next sync writes.
        return before._replace(nodeport_ips=self._settings.nodeport_ips) != self._settings or style != self._style()

    def _settings_of(self, world: Globals) -> RuleSettings:
        return settings_of(self._commands, world, self._options)

    def _style(self) -> Style:
        return style_of(self._settings, self._world)

    # -- what changed -----------------------------------------------------------------------------------------------

    def sync(self, changes: Changes) -> Iterator[int]:
        """Program changed Services; yield the number of lines after each restore. Raises ApplyError."""
        if time.monotonic() >= self._full_due and not self._contents.is_large:
            yield from self._resync(self._with(changes))
            return
        delta = self._contents.delta(changes)
        shared = set(delta.shared)
        if skeleton.nodeport_rules(self._settings) != self._nodeport_rules:
            shared.add(_NAT_SERVICES)
        if not (delta.written or delta.deleted or shared):
            self._contents.take(delta)
            return
        lines = self._shared(shared, delta)
        guards, after = self._guarded(lines, delta)
        work = Work(delta.written, {}, guards, after, {}, lambda: delta.deleted)
        nat = 0
        try:
            for piece in self._pieces(work):
                self._restore(piece.restore, piece.commits, partial=True)
                nat += piece.rules
                yield piece.rules
        except RestoreError:
            if not delta.deleted:
                raise
            yield from self._write_all(self._with(changes), Removal.AFTERWARDS)
            return
        self._contents.take(delta)
        nat -= f"\n{guards}{after['filter']}".count("\n-A ")
        self._written({"filter": lines["filter"].count("\n-A "), "nat": nat})

    def _with(self, changes: Changes) -> dict[ServiceName, Plans]:
        """Return the plans of all Services, with changes."""
        return {name: entry.plans for name, entry in self._contents.entries.items()} | dict(changes)

    def _shared(self, positions: Iterable[int], delta: ContentsChange | None) -> dict[str, str]:
        """Return, by table, the lines that write the shared chains at these positions."""
        made: dict[str, list[str]] = {"filter": [], "nat": []}
        lines = {"filter": "", "nat": ""}
        for position in sorted(positions):
            table, chain = SHARED[position]
            rules = self._contents.shared(position, delta)
            if position == _NAT_SERVICES:
                rules += skeleton.nodeport_rules(self._settings)
            self._counts[position] = rules.count("\n")
            made[table].append(chain)
            lines[table] += rules
        return {table: declarations(chains) + lines[table] for table, chains in made.items()}

    def _guarded(self, lines: Mapping[str, str], delta: ContentsChange) -> tuple[str, dict[str, str]]:
        """Return the lines for the filter table before nat changes, and the lines for both tables at the end."""
        if not any(SHARED[position][0] == "filter" for position in delta.lost):
            return lines["filter"], {"nat": lines["nat"], "filter": ""}
        gained = [rules for position, rules in delta.gained.items() if SHARED[position][0] == "filter"]
        return "".join([rule for rules in gained for rule in rules]), dict(lines)

    # -- everything -------------------------------------------------------------------------------------------------

    def resync(self, wanted: Mapping[ServiceName, Plans]) -> Iterator[int]:
        """Make the rules equal to these plans; yield the number of lines after each restore. Raises ApplyError."""
        harmed, self._harmed = self._harmed, frozenset()
        if harmed and time.monotonic() < self._full_due and self._is_same_world():
            yield from self._repair(harmed, wanted)
        else:
            yield from self._resync(wanted)

    def _resync(self, wanted: Mapping[ServiceName, Plans]) -> Iterator[int]:
        if self._options.counters is None:
            self._options = self._options._replace(counters=make_counters(self._metrics))
            self._settings = self._settings_of(self._world)
        removal = Removal.TOGETHER
        while True:
            try:
                yield from self._write_all(wanted, removal)
                return
            except RestoreError as error:
                if self._settings.counters and "nfacct" in error.said:
                    # A kernel can have the counters without the match (CONFIG_NETFILTER_XT_MATCH_NFACCT).
                    log.warning("Going on without packet counters family=%s error=%r", self.family.label, str(error))
                    self._options = self._options._replace(counters=False)
                    self._settings = self._settings_of(self._world)
                elif removal is Removal.TOGETHER and self._unwanted:
                    removal = Removal.AFTERWARDS
                else:
                    raise

    def _is_same_world(self) -> bool:
        """Return whether the inputs of all Services' rules are those of the last full sync."""
        written = self._written_settings
        return (
            written is not None
            and written._replace(nodeport_ips=self._settings.nodeport_ips) == self._settings
            and self._contents.style == self._style()
        )

    def _repair(self, harmed: Iterable[ServiceName], wanted: Mapping[ServiceName, Plans]) -> Iterator[int]:
        """Write the chains of the changed Services again, the only ones that differ, and sync the rest."""
        for piece in self._pieces(Work(map(self._contents.own_of, harmed), {}, "", {}, {}, list)):
            self._restore(piece.restore, piece.commits, partial=True)
            yield piece.rules
        changes = [(name, plans) for name, plans in wanted.items() if plans != self._contents.plans(name)]
        yield from self.sync(changes + [(name, ()) for name in self._contents.entries if name not in wanted])

    def _write_all(self, wanted: Mapping[ServiceName, Plans], removal: Removal) -> Iterator[int]:
        """Read the tables, and write the chains that differ."""
        with self._watch.reading():
            found = {table: self._read(table) for table in CANARY_TABLES}
        self._contents = Contents(self._style())
        self._contents.load(wanted)
        self._unwanted = []
        kept: set[str] = set()
        last = {"filter": 0, "nat": 0}

        def own() -> Iterator[OwnChains]:
            for chains in self._contents.own_chains():
                kept.update(chains)
                differing = {chain: rules for chain, rules in chains.items() if not found["nat"].holds(chain, rules)}
                if differing:
                    text = "".join(differing.values())
                    last["nat"] += text.count("\n")
                    yield OwnChains(differing.keys(), text)

        def stale() -> list[str]:
            left = sorted(found["nat"].chains - kept, reverse=True)
            # With several restores, a chain cannot be removed before the chains that jump to it.
            self._unwanted = [chain for prefix in SERVICE_PREFIXES for chain in left if chain.startswith(prefix)]
            if removal is Removal.AFTERWARDS:
                return []
            return [chain for chain in self._unwanted if chain not in self._stale.used]

        work = self._everything(own(), stale, found)
        for table in last:
            last[table] += f"{work.before.get(table, '')}{work.after.get(table, '')}".count("-A ")
        yield from self._write(work)
        self._stale.remove([c for c in self._unwanted if removal is Removal.AFTERWARDS or c in self._stale.used])
        self._full_due = time.monotonic() + FULL_PERIOD
        self._fixed = skeleton.fixed_chains(self._settings)
        self._written_settings = self._settings
        self._written(last)

    def _write(self, work: Work) -> Iterator[int]:
        if self._commands.uses_nft:
            with Ahead(self._run) as ahead:
                for piece in self._pieces(work):
                    yield from ahead.commit(piece)
                yield from ahead.settled()
            return
        first = next(iter(work.own), None)
        if first is None:
            for piece in self._pieces(work._replace(own=())):
                yield self._run(piece)
            return
        work = work._replace(own=chain([first], work.own))
        self._restore(lambda: self._commands.restore(one_restore(work)), len(work.before), partial=False)
        yield self._contents.nat_rules

    def _everything(
        self, own: Iterator[OwnChains], stale: Callable[[], list[str]], found: Mapping[str, FoundTable]
    ) -> Work:
        before = {table: foundation(table, found[table], self._settings) for table in CANARY_TABLES}
        missing = {table: jumps(table, found[table]) for table in ("filter", "nat")}
        differing = []
        for position, (table, name) in enumerate(SHARED):
            wanted = self._shared_chain(position, skeleton.nodeport_rules(self._settings))
            self._counts[position] = wanted.text.count("\n")
            if not found[table].holds_shared(name, wanted):
                differing.append(position)
        after = self._shared(differing, None)
        rules = [line for line in after["filter"].splitlines(keepends=True) if line.startswith("-A ")]
        guards = [rule for rule in rules if chain_of(rule) in found["filter"].chains]
        return Work(own, before, "".join(guards), after, missing, stale)

    def _read(self, table: str) -> FoundTable:
        try:
            return read(self._commands, table)
        except ApplyError as error:
            log.info("Writing all of table %s, as it cannot be read: %s", table, error)
            return self._watch.present(table)

    def _shared_chain(self, position: int, last: str) -> SharedChain:
        """Return the shared chain at a position; `last` is the end of KUBE-SERVICES, the rules for NodePorts."""
        return SharedChain(self._contents.blocks(position), last if position == _NAT_SERVICES else "")

    # -- the kernel -------------------------------------------------------------------------------------------------

    def _pieces(self, work: Work) -> Iterator[_Piece]:
        several = self._commands.uses_nft
        for text in several_restores(work, self._writer.chains_at_once) if several else once(work):
            yield _Piece(self._writer.prepared(text), text.count("COMMIT\n"), text.count("\n-A "))

    def _run(self, piece: _Piece) -> int:
        self._restore(piece.restore, piece.commits, partial=False)
        return piece.rules

    def _restore_text(self, text: str) -> None:
        self._restore(self._writer.prepared(text), text.count("COMMIT\n"), partial=True)

    def _restore(self, restore: Callable[[], Waited], commits: int, *, partial: bool) -> None:
        try:
            with self._watch.own_change(commits):
                waited = restore()
        except ApplyError as error:
            self._harmed = frozenset()
            self._metrics.restore_failed(self.family, partial=partial)
            if isinstance(error, NotReleasedError):
                self._metrics.waited(self.family, error.waited.seconds)
            raise
        if waited.seconds:
            log.info("Waited for the iptables lock seconds=%.1f holder=%r", waited.seconds, waited.holder)
            self._metrics.waited(self.family, waited.seconds)

    def _written(self, last: Mapping[str, int]) -> None:
        """Update metrics and watch after a sync; `last` maps each table to the number of rules that the sync wrote."""
        self._nodeport_rules = skeleton.nodeport_rules(self._settings)
        self._watch.expect({SHARED[position]: count for position, count in self._counts.items()})
        total = {"filter": skeleton.forward_rules(self._settings).count("\n"), "nat": 4 + self._contents.nat_rules}
        for position, count in self._counts.items():
            total[SHARED[position][0]] += count
        for table, count in total.items():
            self._metrics.rules(self.family, table, count, last[table])
        if not self._loopback_tried and self._settings.localhost and self._counts.get(_NAT_NODEPORTS):
            self._loopback_tried = True
            self._allow_loopback()

    def _allow_loopback(self) -> None:
        """Let NodePorts answer on loopback: once, with the first NodePort, after the rule that excludes others."""
        try:
            if write_sysctl(ROUTE_LOCALNET, 1):
                log.info(
                    "Set route_localnet=1 for NodePorts on localhost; iptables.localhostNodePorts: false, or "
                    "nodePortAddresses without loopback, leaves it alone"
                )
        except ApplyError as error:
            log.warning("NodePorts do not answer on localhost: %s", error)

    # -- what other programs do -------------------------------------------------------------------------------------

    def upkeep(self) -> None:
        """Do nothing: the hourly full sync runs together with the first change after it is due."""

    def inspect(self, depth: Depth) -> ForeignChange | None:  # noqa: ARG002 - audits have a pace of their own
        """See backends.mode.Backend. One short request, unless another program touched our chains.

        After such a change an audit reads the rules, at intervals.
        """
        if self._watch.touched():
            if change := self._watch.inspect():
                return change
            self._audit.suspect(self._watch.rest, self._watch.places)
        if not self._audit.due():
            return None
        harm = self._audit.look(self._contents, self._common())
        self._harmed = harm.services if harm is not None else frozenset()
        return harm.change if harm is not None else None

    def touched(self) -> bool:
        """Return whether an inspection would do more than ask whether another program touched our chains."""
        return self._watch.touched() or self._audit.due()

    def _common(self) -> dict[Place, SharedChain]:
        """Return the chains that belong to no single Service, as written last."""
        shared = {place: self._shared_chain(at, self._nodeport_rules) for at, place in enumerate(SHARED)}
        return shared | self._fixed


def settings_of(commands: Commands, world: Globals, options: StartOptions) -> RuleSettings:
    """Return the inputs of a family's shared rules, apart from the Services."""
    family = commands.family
    ips = (world.of(family) or FamilyGlobals()).nodeport_ips
    return RuleSettings(
        family=family,
        mark=world.masquerade_mark,
        localhost=family is Family.IPV4 and options.localhost(ips),
        liberal=options.liberal,
        counters=bool(options.counters),
        random_fully=commands.version >= (1, 6, 2),
        nodeport_ips=ips,
    )


def style_of(settings: RuleSettings, world: Globals) -> Style:
    """Return the parts that the rules of all Services of a family have in common."""
    detector = (world.of(settings.family) or FamilyGlobals()).detector
    return Style.of(settings.family, detector, localhost_counter=settings.localhost and settings.counters)


class _Piece(NamedTuple):
    """A restore that is ready to run, with its number of transactions and of appended rules."""

    restore: Callable[[], Waited]
    commits: int
    rules: int
