"""The iptables backend of one family: converts changed plans to the input of iptables-restore. A sync writes only the
chains of changed Services, and shared chains with changed rules; a restore with --noflush does not change other chains.
Calls block; the engine runs them in a thread. Source: kube-proxy v1.36 pkg/proxy/iptables/proxier.go."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final, NamedTuple, Self

from kubeproxy.backends.ahead import Ahead
from kubeproxy.backends.iptables import restores, skeleton
from kubeproxy.backends.iptables.contents import Contents, ContentsChange, OwnChains, rule_count
from kubeproxy.backends.iptables.found import FoundTable, read
from kubeproxy.backends.iptables.metrics import Metrics, make_counters
from kubeproxy.backends.iptables.watch import Audit, Watch, watch
from kubeproxy.backends.mode import Abilities, Depth, ForeignChange
from kubeproxy.backends.state import NamedPlans, Plans
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.proc.sysctl import write_sysctl
from kubeproxy.kernel.xtables.nft_compat import RuleWriter
from kubeproxy.kernel.xtables.xtables import Commands, Incompatible, RestoreError, chain_of, target_of
from kubeproxy.kernel.xtables.xtables_lock import NotReleasedError, Waited
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import Globals

log = logging.getLogger("kubeproxy.iptables")

FULL_PERIOD: Final = 3600.0  # seconds; kube-proxy's FullSyncPeriod
ROUTE_LOCALNET: Final = "net/ipv4/conf/all/route_localnet"


class IptablesBackend:
    """Programs one family. `sync` writes changes; `resync` writes everything and removes chains without a Service."""

    abilities = Abilities(at_once=True)

    def __init__(
        self,
        commands: Commands,
        world: Globals,
        options: skeleton.StartOptions,
        metrics: Metrics,
        watching: Watch,
        writer: RuleWriter,
    ) -> None:
        self.family: Family = commands.family
        self._commands = commands
        self._writer = writer
        self._metrics = metrics
        self._settings = skeleton.RuleSettings.of(self.family, world, options)
        self._contents = Contents(self._settings)
        self._watch = watching
        self._audit = Audit(commands, self._change)
        self._used: frozenset[str] = frozenset()  # chains that belong to no Service and could not be deleted
        self._full_due = 0.0
        self._counts: dict[skeleton.Place, int] = {}  # number of rules in each shared chain
        self._loopback_tried = False

    @classmethod
    def open(cls, commands: Commands, world: Globals, options: skeleton.StartOptions, metrics: Metrics) -> Self:
        """Return a backend for the network namespace of the caller. Raises ApplyError."""
        return cls(commands, world, options, metrics, watch(commands), RuleWriter.open(commands))

    def close(self) -> None:
        """Close the sockets; the rules are not removed."""
        self._watch.close()
        self._writer.close()

    def set_world(self, world: Globals) -> bool:
        """Set the globals; return whether a resync is needed because rules of all Services change."""
        before = self._settings
        self._settings = skeleton.RuleSettings.of(self.family, world, before.options)
        return not self._settings.is_like(before)

    # -- changes --------------------------------------------------------------------------------------------------

    def sync(self, changes: Sequence[NamedPlans]) -> Iterator[int]:
        """Program changed Services; after each restore, yield the number of lines. Raises ApplyError."""
        if time.monotonic() >= self._full_due and self._contents.commented:
            yield from self.resync(self._with(changes))
            return
        delta = self._contents.delta(changes, self._settings)
        shared = delta.gained.keys() | delta.lost
        if not (delta.written or delta.deleted or shared):
            self._contents.take(delta)
            return
        lines = self._lines({p: self._contents.shared(p, delta) for p in skeleton.SHARED if p in shared})
        guards, after = _guarded(lines, delta)
        try:
            for piece in self._pieces(restores.Work(delta.written, {}, guards, after, {}, delta.deleted)):
                yield self._run(piece, partial=True)
        except RestoreError:
            if not delta.deleted:
                raise
            yield from self.resync(self._with(changes))
            return
        self._contents.take(delta)
        last = {table: text.count("\n-A ") for table, text in lines.items()}
        self._written({**last, "nat": last["nat"] + sum(map(rule_count, delta.written))})

    def _with(self, changes: Sequence[NamedPlans]) -> Plans:
        return {name: entry.plans for name, entry in self._contents.entries.items()} | dict(changes)

    def _lines(self, shared: Mapping[skeleton.Place, skeleton.SharedChain]) -> dict[str, str]:
        """Return the lines that write these chains, by table; count the chains' rules."""
        self._counts |= {place: chain.text.count("\n") for place, chain in shared.items()}
        found = {}
        for table in ("filter", "nat"):
            chains = {name: chain.text for (its, name), chain in shared.items() if its == table}
            found[table] = restores.declarations(chains) + "".join(chains.values())
        return found

    # -- everything -----------------------------------------------------------------------------------------------

    def resync(self, wanted: Plans) -> Iterator[int]:
        """Write the rules of exactly these plans; after each restore, yield the number of lines. Raises ApplyError."""
        if self._settings.options.counters is None:
            self._use_counters(make_counters(self._metrics))
        try:
            yield from self._write_all(wanted)
        except RestoreError as error:
            if not self._settings.options.counters or "nfacct" not in error.stderr:
                raise
            # A kernel may support nfacct counters, but lack the iptables match nfacct
            # (CONFIG_NETFILTER_XT_MATCH_NFACCT).
            log.warning("Continuing without packet counters family=%s error=%r", self.family.label, str(error))
            self._use_counters(False)
            yield from self._write_all(wanted)

    def _use_counters(self, counters: bool | None) -> None:
        self._settings = self._settings._replace(options=self._settings.options._replace(counters=counters))

    def _write_all(self, wanted: Plans) -> Iterator[int]:
        with self._watch.reading():
            found = {table: self._read(table) for table in skeleton.CANARY_TABLES}
        self._contents = Contents(self._settings)  # frees memory before the next line
        self._contents = Contents(self._settings, wanted)
        kept: set[str] = set()
        last = {"filter": 0, "nat": 0}

        def own() -> Iterator[OwnChains]:
            for chains in self._contents.own_chains():
                kept.update(chains)
                if differing := {name: rules for name, rules in chains.items() if not found["nat"].holds(name, rules)}:
                    last["nat"] += rule_count(differing)
                    yield differing

        work = self._everything(own(), found)
        for table in last:
            last[table] += f"{work.before.get(table, '')}{work.after.get(table, '')}".count("-A ")
        yield from self._write(work)
        self._remove(
            [name for name in sorted(found["nat"].chains - kept) if name.startswith(skeleton.SERVICE_PREFIXES)]
        )
        self._full_due = time.monotonic() + FULL_PERIOD
        self._written(last)

    def _write(self, work: restores.Work) -> Iterator[int]:
        if self._commands.uses_nft:
            with Ahead(self._run) as ahead:
                for piece in self._pieces(work):
                    yield from ahead.commit(piece)
                yield from ahead.settled()
            return
        pieces = restores.one_restore(work)
        if (first := next(pieces, None)) is not None:
            text = chain([first], pieces)
            self._run(_Piece(lambda: self._commands.restore(text)))
            yield self._contents.nat_rules

    def _remove(self, chains: Sequence[str]) -> None:
        """Empty the chains of deleted Services, delete the chains to which no rule jumps, and log each remaining chain
        once. iptables refuses a whole restore that deletes a chain to which another program's rule jumps."""
        if not chains:
            self._used = frozenset()
            return
        self._change_each(chains, restores.declarations)
        try:
            lines = [line for line in self._commands.saved("nat") if line[:1] == "-"]
        except Incompatible:  # the jumps are unknown: iptables refuses the deletion of a chain to which a rule jumps
            lines = []
        used = frozenset(chains).intersection(target_of(line.rstrip()) for line in lines)
        for name in sorted(used - self._used):
            log.warning(
                "Leaving an empty chain that belongs to no Service, because rules of another program jump to it "
                "chain=%s family=%s",
                name,
                self.family.label,
            )
        self._used = used
        self._change_each([name for name in chains if name not in used], restores.removals)

    def _change_each(self, chains: Sequence[str], lines: Callable[[Iterable[str]], str]) -> None:
        most = self._writer.chains_at_once
        for start in range(0, len(chains), most):
            self._change(f"*nat\n{lines(chains[start : start + most])}COMMIT\n")

    def _everything(self, own: Iterator[OwnChains], found: Mapping[str, FoundTable]) -> restores.Work:
        before = {table: restores.foundation(table, found[table], self._settings) for table in skeleton.CANARY_TABLES}
        missing = {table: restores.jumps(table, found[table]) for table in ("filter", "nat")}
        wanted = {place: self._contents.shared(place) for place in skeleton.SHARED}
        self._counts = {place: shared.text.count("\n") for place, shared in wanted.items()}
        after = self._lines({p: shared for p, shared in wanted.items() if not found[p[0]].holds_shared(p[1], shared)})
        rules = [line for line in after["filter"].splitlines(keepends=True) if line.startswith("-A ")]
        guards = [rule for rule in rules if chain_of(rule) in found["filter"].chains]
        return restores.Work(own, before, "".join(guards), after, missing)

    def _read(self, table: str) -> FoundTable:
        try:
            return read(self._commands, table)
        except ApplyError as error:
            log.info("Writing all of table %s, because the table cannot be read: %s", table, error)
            return self._watch.present(table)

    # -- the kernel -----------------------------------------------------------------------------------------------

    def _pieces(self, work: restores.Work) -> Iterator[_Piece]:
        if self._commands.uses_nft:
            texts = restores.several_restores(work, self._writer.chains_at_once)
        else:
            texts = filter(None, ["".join(restores.one_restore(work))])
        for text in texts:
            yield self._piece(text)

    def _piece(self, text: str) -> _Piece:
        return _Piece(self._writer.prepared(text), text.count("COMMIT\n"), text.count("\n-A "))

    def _run(self, piece: _Piece, *, partial: bool = False) -> int:
        try:
            with self._watch.own_change(piece.commits):
                waited = piece.restore()
        except ApplyError as error:
            self._metrics.restore_failed(self.family, partial=partial)
            if isinstance(error, NotReleasedError):
                self._metrics.waited(self.family, error.waited.seconds)
            raise
        if waited.seconds:
            log.info("Waited for the iptables lock seconds=%.1f holder=%r", waited.seconds, waited.holder)
            self._metrics.waited(self.family, waited.seconds)
        return piece.rules

    def _change(self, text: str) -> None:
        self._run(self._piece(text), partial=True)

    def _written(self, last: Mapping[str, int]) -> None:
        """Update metrics and watch after a sync; `last` maps each table to the number of rules that the sync wrote."""
        total = {"filter": 0, "nat": self._contents.nat_rules}
        for place, shared in skeleton.fixed_chains(self._settings).items():
            total[place[0]] += shared.text.count("\n")
        for (table, _), count in self._counts.items():
            total[table] += count
        for table, count in total.items():
            self._metrics.rules(self.family, table, count, last[table])
        if not self._loopback_tried and self._settings.localhost and self._counts.get(skeleton.NAT_NODEPORTS):
            self._loopback_tried = True
            self._allow_loopback()

    def _allow_loopback(self) -> None:
        """Set route_localnet as soon as there is a NodePort. The rule that protects loopback from other hosts is
        already written."""
        try:
            if write_sysctl(ROUTE_LOCALNET, 1):
                log.info(
                    "Set route_localnet=1 for NodePorts on localhost; iptables.localhostNodePorts: false, or "
                    "nodePortAddresses without loopback, prevents this change"
                )
        except ApplyError as error:
            log.warning("NodePorts do not answer on localhost: %s", error)

    # -- changes by other programs --------------------------------------------------------------------------------

    def upkeep(self) -> None:
        """Do nothing: the only periodic work is the hourly full sync, which waits for the next change."""

    def inspect(self, depth: Depth) -> ForeignChange | None:  # noqa: ARG002 - audits have their own interval
        """See backends.mode.Backend. The inspection is one short request, unless another program changed our chains.
        After such a change an audit reads the rules; between two audits there is a pause."""
        if self._watch.touched():
            if change := self._watch.inspect():
                return change
            self._audit.suspect(self._watch.rest, self._watch.places)
        return self._audit.look(self._contents) if self._audit.due() else None

    def touched(self) -> bool:
        """Return whether the next inspection reads chains or rules."""
        return self._watch.touched() or self._audit.due()


def _guarded(lines: Mapping[str, str], delta: ContentsChange) -> tuple[str, Mapping[str, str]]:
    """Return two values: the lines to write to the filter table before the nat table changes, and the lines to write
    to both tables afterwards."""
    if not any(table == "filter" for table, _ in delta.lost):
        return lines["filter"], {"nat": lines["nat"]}
    gained = [rules for (table, _), rules in delta.gained.items() if table == "filter"]
    return "".join([rule for rules in gained for rule in rules]), lines


class _Piece(NamedTuple):
    restore: Callable[[], Waited]
    commits: int = 0
    rules: int = 0
