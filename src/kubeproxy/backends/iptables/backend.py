"""iptables mode, one family: keeps what was written, and turns changed plans into the input of iptables-restore.

A sync writes the chains that changed, and a chain that all Services share only when its rules did: what a restore
with --noflush does not name stays. Blocking calls; the engine runs them in a thread.
Source: kube-proxy v1.36 pkg/proxy/iptables/proxier.go.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from kubeproxy.backends.ahead import Ahead
from kubeproxy.backends.iptables import skeleton
from kubeproxy.backends.iptables.contents import Changes, Contents, Delta, Plans
from kubeproxy.backends.iptables.names import SERVICE_PREFIXES
from kubeproxy.backends.iptables.options import Options
from kubeproxy.backends.iptables.render import Style
from kubeproxy.backends.iptables.restores import Chains, Work, declarations, once, one_restore, several_restores
from kubeproxy.backends.iptables.skeleton import Present, Settings
from kubeproxy.backends.iptables.watch import Watch, watch
from kubeproxy.backends.mode import Report
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.nft_compat import NftCompat
from kubeproxy.kernel.sysctl import write_sysctl
from kubeproxy.kernel.xtables import Commands, RestoreError, Writer
from kubeproxy.kernel.xtables_lock import Waited
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
"""Where each part of a Dispatch goes."""

_NAT_SERVICES, _NAT_NODEPORTS = 4, 5


class IptablesBackend:
    """Programs one family. `sync` writes what changed, `resync` everything, and removes what belongs to no Service."""

    blocking = True

    def __init__(
        self,
        commands: Commands,
        world: Globals,
        options: Options,
        report: Report,
        watching: Watch | None = None,
        writer: Writer | None = None,
    ) -> None:
        self.family: Family = commands.family
        self._commands = commands
        self._writer = writer or writer_of(commands)
        self._options = options
        self._report = report
        self._world = world
        self._settings = self._settings_of(world)
        self._contents = Contents(self._style())
        self._nodeport_rules = ""  # as written last
        self._watch = watching or watch(commands)
        self._full_due = 0.0
        self._counts: dict[int, int] = {}  # rules in each shared chain, by its place in SHARED
        self._loopback_tried = False

    def close(self) -> None:
        """Let go of the kernel; the rules stay."""
        self._watch.close()
        self._writer.close()

    def set_world(self, world: Globals) -> bool:
        """Take changed globals in; return whether rules of all Services are others now, so that a resync is due."""
        before, style = self._settings, self._style()
        self._world = world
        self._settings = self._settings_of(world)
        # Other addresses alone change one shared chain, which the next sync sees.
        return before._replace(nodeport_ips=self._settings.nodeport_ips) != self._settings or style != self._style()

    def _settings_of(self, world: Globals) -> Settings:
        ips = (world.of(self.family) or FamilyGlobals()).nodeport_ips
        return Settings(
            family=self.family,
            mark=world.masquerade_mark,
            localhost=self.family is Family.IPV4 and self._options.localhost(ips),
            liberal=self._options.liberal,
            counters=self._options.counters,
            random_fully=self._commands.version >= (1, 6, 2),
            nodeport_ips=ips,
        )

    def _style(self) -> Style:
        detector = (self._world.of(self.family) or FamilyGlobals()).detector
        counted = self._settings.localhost and self._settings.counters
        return Style.of(self.family, detector, localhost_counter=counted)

    # -- what changed -----------------------------------------------------------------------------------------------

    def sync(self, changes: Changes) -> Iterator[int]:
        """Program changed Services; yield the number of lines after each restore. Raises ApplyError."""
        if time.monotonic() >= self._full_due:
            wanted = {name: entry.plans for name, entry in self._contents.entries.items()} | dict(changes)
            yield from self.resync(wanted)
            return
        delta = self._contents.delta(changes)
        shared = set(delta.shared)
        if skeleton.nodeport_rules(self._settings) != self._nodeport_rules:
            shared.add(_NAT_SERVICES)
        if not (delta.written or delta.deleted or shared):
            self._contents.take(delta)
            return
        lines = self._shared(shared, delta)
        work = Work(delta.written, {}, lines, {}, lambda: delta.deleted)
        rules = 0
        for piece in self._pieces(work):
            self._restore(piece.restore, piece.commits, partial=True)
            rules += piece.rules
            yield piece.rules
        self._contents.take(delta)
        in_filter = lines["filter"].count("\n-A ")
        self._written(last={"filter": in_filter, "nat": rules - in_filter})

    def _shared(self, positions: Iterable[int], delta: Delta | None) -> dict[str, str]:
        """Return, by table, what writes these of the shared chains."""
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

    # -- everything -------------------------------------------------------------------------------------------------

    def resync(self, wanted: Mapping[ServiceName, Plans]) -> Iterator[int]:
        """Make the kernel hold exactly this; yield the number of lines after each restore. Raises ApplyError."""
        try:
            yield from self._write_all(wanted)
        except RestoreError as error:
            if not (self._settings.counters and "nfacct" in error.said):
                raise
            # A kernel may have the counters without the match (CONFIG_NETFILTER_XT_MATCH_NFACCT).
            log.warning("Going on without packet counters family=%s error=%r", self.family.label, str(error))
            self._options = self._options._replace(counters=False)
            self._settings = self._settings_of(self._world)
            yield from self._write_all(wanted)

    def _write_all(self, wanted: Mapping[ServiceName, Plans]) -> Iterator[int]:
        present = {table: self._watch.present(table) for table in ("filter", "nat")}
        self._contents = Contents(self._style())
        self._contents.load(wanted)
        kept: set[str] = set()

        def own() -> Iterator[Chains]:
            for chains in self._contents.own_chains():
                kept.update(chains.names)
                yield chains

        def stale() -> list[str]:
            found = present["nat"].chains - kept
            return sorted((chain for chain in found if chain.startswith(SERVICE_PREFIXES)), reverse=True)

        work = self._everything(own(), stale, present)
        if self._commands.uses_nft:
            with Ahead(self._run) as ahead:
                for piece in self._pieces(work):
                    yield from ahead.commit(piece)
                yield from ahead.settled()
        else:
            self._restore(lambda: self._commands.restore(one_restore(work)), len(work.before), partial=False)
            yield self._contents.nat_rules
        self._full_due = time.monotonic() + FULL_PERIOD
        self._written(last=None)

    def _everything(
        self, own: Iterator[Chains], stale: Callable[[], list[str]], present: Mapping[str, Present]
    ) -> Work:
        settings = self._settings
        canary = declarations([skeleton.CANARY])
        firewall = [] if skeleton.KUBELET_FIREWALL in present["filter"].chains else [skeleton.KUBELET_FIREWALL]
        before = {
            "mangle": canary,
            "filter": canary
            + declarations(["KUBE-FORWARD", *firewall])
            + skeleton.kubelet_rules(settings, present["filter"])
            + skeleton.forward_rules(settings),
            "nat": canary + declarations(["KUBE-POSTROUTING", "KUBE-MARK-MASQ"]) + skeleton.masquerade_rules(settings),
        }
        jumps = {table: skeleton.jumps(table, present[table]) for table in ("filter", "nat")}
        return Work(own, before, self._shared(range(len(SHARED)), None), jumps, stale)

    # -- the kernel -------------------------------------------------------------------------------------------------

    def _pieces(self, work: Work) -> Iterator[_Piece]:
        several = self._commands.uses_nft
        for text in several_restores(work, self._writer.chains_at_once) if several else once(work):
            yield _Piece(self._writer.prepared(text), text.count("COMMIT\n"), text.count("\n-A "))

    def _run(self, piece: _Piece) -> int:
        self._restore(piece.restore, piece.commits, partial=False)
        return piece.rules

    def _restore(self, restore: Callable[[], Waited], commits: int, *, partial: bool) -> None:
        try:
            with self._watch.own_change(commits):
                waited = restore()
        except ApplyError:
            self._report.restore_failed(self.family, partial=partial)
            raise
        if waited.seconds:
            log.info("Waited for the iptables lock seconds=%.1f holder=%r", waited.seconds, waited.holder)
            self._report.waited(self.family, waited.seconds)

    def _written(self, last: Mapping[str, int] | None) -> None:
        """Do what follows from a sync; `last` are the rules it wrote by table, None for all of them."""
        self._nodeport_rules = skeleton.nodeport_rules(self._settings)
        self._watch.expect({SHARED[position]: count for position, count in self._counts.items()})
        total = {"filter": skeleton.forward_rules(self._settings).count("\n"), "nat": 4 + self._contents.nat_rules}
        for position, count in self._counts.items():
            total[SHARED[position][0]] += count
        for table, count in total.items():
            self._report.rules(self.family, table, count, count if last is None else last[table])
        if not self._loopback_tried and self._settings.localhost and self._counts.get(_NAT_NODEPORTS):
            self._loopback_tried = True
            self._allow_loopback()

    def _allow_loopback(self) -> None:
        """Let NodePorts answer on loopback: once, and only when there is one, after the rule that keeps others out."""
        try:
            if write_sysctl(ROUTE_LOCALNET, 1):
                log.info(
                    "Set route_localnet=1 for NodePorts on localhost; iptables.localhostNodePorts: false, or "
                    "nodePortAddresses without loopback, leaves it alone"
                )
        except ApplyError as error:
            log.warning("NodePorts do not answer on localhost: %s", error)

    # -- drift ------------------------------------------------------------------------------------------------------

    def touched(self) -> bool:
        """Return whether another program may have changed our rules; costs one short request."""
        return self._watch.touched()

    def drift(self) -> str:
        """Return what another program did to our chains, '' for nothing."""
        return self._watch.drift()

    def element_drift(self) -> str:
        """Return '': `drift` looks at all that it can without reading every rule."""
        return ""


def writer_of(commands: Commands) -> Writer:
    """Return what changes a variant's rules fastest."""
    return NftCompat(commands) if commands.uses_nft else commands


class _Piece(NamedTuple):
    """A restore that is ready to be run, how many transactions it is, and how many rules it appends."""

    restore: Callable[[], Waited]
    commits: int
    rules: int
