"""iptables mode beside the proxy: in what the rules differ from plans, Service by Service.

Chains are compared as text, as iptables-save prints them; those that seem to differ are compared once more with how the
node's own iptables prints what we write. In chains that all Services share the order of Services is free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kubeproxy.backends.examination import Finding, Kind, Plans
from kubeproxy.backends.iptables import skeleton
from kubeproxy.backends.iptables.audit import MOST, Place, as_saved
from kubeproxy.backends.iptables.backend import SHARED
from kubeproxy.backends.iptables.contents import Contents
from kubeproxy.backends.iptables.names import EXT, FW, SERVICE_PREFIXES, SVC, SVL
from kubeproxy.backends.iptables.reading import Chains, Printer, Reading
from kubeproxy.backends.iptables.render import Detail, Style
from kubeproxy.backends.iptables.skeleton import Settings
from kubeproxy.backends.iptables.words import Words, owner_of
from kubeproxy.errors import ApplyError, Unsupported
from kubeproxy.model.plan import ServiceName, ServicePlan

Tables = Mapping[str, Chains]


class Suspect(NamedTuple):
    """A chain of a Service, or of all, that does not read as was expected; `ordered` says whether order counts."""

    place: Place
    service: ServiceName | None
    wanted: Sequence[str]
    present: Sequence[str] | None
    ordered: bool = True


class IptablesExaminer:
    """See backends.examination.Examiner."""

    remembered = None

    def __init__(self, reading: Reading, settings: Settings, style: Style, printed: Printer) -> None:
        self.family = reading.family
        self._reading = reading
        self._settings = settings
        self._style = style
        self._printed = printed
        self._caveats: list[str] = []

    def close(self) -> None:
        """Let go of the kernel: nothing is held."""

    def caveats(self) -> Iterable[str]:
        """Return what could not be compared, and why."""
        return self._caveats

    def some(self, plans: Plans) -> Iterator[Finding]:
        """See Examiner. iptables-legacy lists whole tables only."""
        contents = self._contents(plans)
        own = {chain for name in contents.entries for chain in contents.chains_of(name, Detail.FULL)}
        ends = {end for entry in contents.entries.values() for end in entry.suffixes}
        own |= {prefix + end for prefix in (SVC, SVL, EXT, FW) for end in ends}
        shared = {table: {chain for place, chain in SHARED if place == table} for table in ("filter", "nat")}
        tables = {
            "filter": self._reading.some("filter", shared["filter"]),
            "nat": self._reading.some("nat", shared["nat"] | own),
        }
        words = Words(self.family, contents, tables["nat"])
        suspects = [*self._own(contents, tables["nat"]), *self._dispatched(contents, tables, plans.keys())]
        yield from self._confirmed(suspects, words)

    def everything(self, wanted: Plans) -> Iterator[Finding]:
        """See Examiner."""
        contents = self._contents(wanted)
        tables = {table: self._reading.everything(table) for table in skeleton.CANARY_TABLES}
        flushed = [table for table, chains in tables.items() if skeleton.CANARY not in chains]
        for table in flushed:
            what = "all of our chains" if len(tables[table]) < len(SHARED) else "the chain by which a flush is noticed"
            yield Finding(None, Kind.MISSING, what, f"chain {skeleton.CANARY} of table {table} ({self.family.label})")
        words = Words(self.family, contents, tables["nat"])
        suspects = [
            *self._own(contents, tables["nat"]),
            *self._dispatched(contents, tables, None),
            *self._fixed(tables),
            *self._stale(contents, tables["nat"]),
        ]
        yield from self._confirmed(suspects, words)
        yield from self._jumps(tables)

    def _contents(self, plans: Plans) -> Contents:
        contents = Contents(self._style)
        contents.load({name: self._ours(its) for name, its in plans.items()})
        return contents

    def _ours(self, plans: Iterable[ServicePlan]) -> tuple[ServicePlan, ...]:
        return tuple(plan for plan in plans if plan.key.family is self.family)

    # -- what seems to differ ---------------------------------------------------------------------------------------

    def _own(self, contents: Contents, nat: Chains) -> Iterator[Suspect]:
        """Yield the chains of Services that are not there as they are written."""
        for name in contents.entries:
            sparse: Mapping[str, str] | None = None
            for chain, rules in contents.chains_of(name, Detail.FULL).items():
                present = nat.get(chain)
                if present is not None and "".join(present) == as_saved(rules, self.family):
                    continue
                # A large cluster says less of endpoints, and what is said may be older than that.
                sparse = sparse if sparse is not None else contents.chains_of(name, Detail.SPARSE)
                wanted = sparse[chain] if present and not any(" -> " in rule for rule in present) else rules
                if present is None or "".join(present) != as_saved(wanted, self.family):
                    yield Suspect(("nat", chain), name, wanted.splitlines(keepends=True), present)
            for chain in self._unwanted(contents, name):
                if present := nat.get(chain):
                    yield Suspect(("nat", chain), name, (), present)

    def _unwanted(self, contents: Contents, name: ServiceName) -> Iterator[str]:
        wanted = contents.chains_of(name, Detail.SPARSE)
        for end in contents.entries[name].suffixes:
            yield from (prefix + end for prefix in (SVC, SVL, EXT, FW) if prefix + end not in wanted)

    def _dispatched(self, contents: Contents, tables: Tables, names: Iterable[ServiceName] | None) -> Iterator[Suspect]:
        """Yield, by Service, the rules of shared chains that are not there, or nobody's; of these Services, or all."""
        asked = frozenset(names) if names is not None else None
        for position, (table, chain) in enumerate(SHARED):
            present = list(tables[table].get(chain, ()))
            if (table, chain) == ("nat", "KUBE-SERVICES"):
                present, last = self._without_last(present)
                if asked is None and last is not None:
                    yield last
            left = Counter(present)
            missing: dict[ServiceName | None, list[str]] = {}
            for name, entry in contents.entries.items():
                for rule in (line for part in entry.shared for line in part[position].splitlines(keepends=True)):
                    printed = as_saved(rule, self.family)
                    if left[printed] > 0:
                        left[printed] -= 1
                    else:
                        missing.setdefault(name, []).append(rule)
            extra: dict[ServiceName | None, list[str]] = {}
            for rule in left.elements():
                owner = owner_of(rule)
                extra.setdefault(owner if owner in contents.entries or (asked and owner in asked) else None, []).append(
                    rule
                )
            for whose in missing.keys() | extra.keys():
                if asked is None or whose in asked:
                    there = extra.get(whose, ())
                    yield Suspect((table, chain), whose, missing.get(whose, ()), there, ordered=False)

    def _without_last(self, present: list[str]) -> tuple[list[str], Suspect | None]:
        """Return the rules of KUBE-SERVICES without those at its end, which lead to NodePorts, and if they differ."""
        wanted = skeleton.nodeport_rules(self._settings).splitlines(keepends=True)
        rules = [rule for rule in present if not rule.endswith(" -j KUBE-NODEPORTS\n")]
        last = [rule for rule in present if rule.endswith(" -j KUBE-NODEPORTS\n")]
        at_the_end = present[len(rules) :] == last
        printed = [as_saved(rule, self.family) for rule in wanted]
        suspect = Suspect(("nat", "KUBE-SERVICES"), None, wanted, last if at_the_end else present)
        return rules, None if at_the_end and sorted(last) == sorted(printed) else suspect

    def _fixed(self, tables: Tables) -> Iterator[Suspect]:
        """Yield the chains that no Service changes which are not as they are written."""
        for (table, chain), rules in skeleton.fixed_chains(self._settings).items():
            present = tables[table].get(chain)
            if present is None or "".join(present) != as_saved(rules, self.family):
                yield Suspect((table, chain), None, rules.splitlines(keepends=True), present)

    def _stale(self, contents: Contents, nat: Chains) -> Iterator[Suspect]:
        """Yield the chains of Services that are nobody's and have rules: empty ones may have to stay for others."""
        own = {chain for name in contents.entries for chain in contents.chains_of(name, Detail.SPARSE)}
        own |= {chain for name in contents.entries for chain in self._unwanted(contents, name)}
        for chain in nat.keys() - own:
            if chain.startswith(SERVICE_PREFIXES) and nat[chain]:
                yield Suspect(("nat", chain), None, (), nat[chain])

    def _jumps(self, tables: Tables) -> Iterator[Finding]:
        for jump in skeleton.JUMPS:
            if jump.target == skeleton.KUBELET_FIREWALL and not self._settings.localhost:
                continue
            if f"-A {jump.rule}\n" not in tables[jump.table].get(jump.chain, ()):
                where = f"chain {jump.chain} of table {jump.table} ({self.family.label})"
                yield Finding(None, Kind.MISSING, f"the jump to {jump.target}", where)

    # -- what does differ -------------------------------------------------------------------------------------------

    def _confirmed(self, suspects: Sequence[Suspect], words: Words) -> Iterator[Finding]:
        """Yield what differs when the suspects are compared with how our rules are printed here."""
        for table in ("filter", "nat"):
            ours = [suspect for suspect in suspects if suspect.place[0] == table]
            for start in range(0, len(ours), MOST):
                some = ours[start : start + MOST]
                for suspect, wanted in zip(some, self._as_printed(table, some), strict=True):
                    yield from words.differences(
                        suspect.place, suspect.service, wanted, suspect.present, ordered=suspect.ordered
                    )

    def _as_printed(self, table: str, suspects: Sequence[Suspect]) -> list[Sequence[str]]:
        texts = {f"KUBE-SEP-LOOK-{n}": s for n, s in enumerate(suspects) if s.wanted}
        written = {
            copy: "".join(suspect.wanted).replace(f"-A {suspect.place[1]} ", f"-A {copy} ")
            for copy, suspect in texts.items()
        }
        try:
            printed = self._printed(table, written) if written else {}
        except (Unsupported, ApplyError) as error:
            self._caveats.append(f"how iptables prints our rules is taken from version 1.8.9 ({error})")
            return [[as_saved(rule, self.family) for rule in suspect.wanted] for suspect in suspects]
        return [
            [rule.replace(f"-A {copy} ", f"-A {suspect.place[1]} ") for rule in printed.get(copy, ())]
            for n, suspect in enumerate(suspects)
            for copy in (f"KUBE-SEP-LOOK-{n}",)
        ]
