"""Examination of iptables mode in a process of its own: the differences between rules and plans, by Service.

Chains are compared as iptables-save prints them. Those that seem to differ are compared again: the node's own iptables
writes and prints the desired rules in an empty network namespace.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from kubeproxy.backends.examination import Finding, Kind, Plans
from kubeproxy.backends.iptables import found, skeleton
from kubeproxy.backends.iptables.backend import SHARED
from kubeproxy.backends.iptables.contents import Contents
from kubeproxy.backends.iptables.found import MOST, Chains, FoundTable, Place, Printer, Suspect, as_printed, as_saved
from kubeproxy.backends.iptables.names import EXT, FW, SEP, SERVICE_PREFIXES, SVC, SVL
from kubeproxy.backends.iptables.render import INVALID_COUNTER, LOCALHOST_COUNTER, Detail, Style
from kubeproxy.backends.iptables.restores import declarations
from kubeproxy.backends.iptables.skeleton import CANARY, RuleSettings
from kubeproxy.backends.state import Wording, findings
from kubeproxy.errors import ApplyError, Unsupported
from kubeproxy.kernel.proc.empty_network import in_empty_network
from kubeproxy.kernel.xtables import iptables_variant, nfacct, xtables
from kubeproxy.kernel.xtables.xtables import Commands, target_of
from kubeproxy.kernel.xtables.xtables_lock import nobodys_lock
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import ServiceName, ServicePlan

Tables = Mapping[str, FoundTable]

_DESTINATION: Final = re.compile(r"--to-destination (\S+)")
_COMMENT: Final = re.compile(r'--comment "?([^" ]+)')
_ADDRESS: Final = re.compile(r" -d (\S+)/(?:32|128) ")
_PROTOCOL: Final = re.compile(r" -p (\w+) ")
_PORT: Final = re.compile(r" --dport (\d+)")
_ROLES: Final = {
    SVC: "the choice among all endpoints",
    SVL: "the choice among the endpoints of this node",
    EXT: "what its external addresses and NodePorts lead to",
    FW: "the source ranges of its load balancer addresses",
}


class IptablesExaminer:
    """See backends.examination.Examiner."""

    remembered = None

    def __init__(self, commands: Commands, settings: RuleSettings, style: Style, printed: Printer) -> None:
        self.family = commands.family
        self._commands = commands
        self._settings = settings
        self._style = style
        self._printed = printed
        self._caveats: list[str] = []

    def close(self) -> None:
        """Do nothing: no socket is open."""

    def caveats(self) -> Iterable[str]:
        """Return the parts that could not be compared, with the reasons."""
        return self._caveats

    def some(self, plans: Plans) -> Iterator[Finding]:
        """See Examiner. iptables-legacy lists whole tables only: its other commands take the lock of the proxy."""
        contents = self._contents(plans)
        own = {chain for name in contents.entries for chain in contents.chains_of(name, Detail.FULL)}
        own |= {chain for name in contents.entries for chain in self._unwanted(contents, name)}
        asked = {table: {chain for place, chain in SHARED if place == table} for table in ("filter", "nat")}
        asked["nat"] |= own
        tables = {table: found.read_some(self._commands, table, names) for table, names in asked.items()}
        suspects = [*self._own(contents, tables["nat"]), *self._dispatched(contents, tables, plans.keys())]
        yield from self._confirmed(suspects, _Words(self.family, contents, tables["nat"].rules))

    def everything(self, wanted: Plans) -> Iterator[Finding]:
        """See Examiner."""
        contents = self._contents(wanted)
        tables = {table: found.read(self._commands, table, lambda _: True) for table in skeleton.CANARY_TABLES}
        for table, seen in tables.items():
            if CANARY not in seen.chains:
                few = len(seen.chains) < len(SHARED)
                what = "all of our chains" if few else "the chain by which a flush is noticed"
                yield Finding(None, Kind.MISSING, what, f"chain {CANARY} of table {table} ({self.family.label})")
        suspects = [
            *self._own(contents, tables["nat"]),
            *self._dispatched(contents, tables, None),
            *found.shared_suspects(skeleton.fixed_chains(self._settings), tables),
            *self._stale(contents, tables["nat"]),
        ]
        yield from self._confirmed(suspects, _Words(self.family, contents, tables["nat"].rules))
        for jump in skeleton.JUMPS:
            kubelets = jump.target == skeleton.KUBELET_FIREWALL
            if not tables[jump.table].has_jump(jump) and (self._settings.localhost or not kubelets):
                where = f"chain {jump.chain} of table {jump.table} ({self.family.label})"
                yield Finding(None, Kind.MISSING, f"the jump to {jump.target}", where)

    def _contents(self, plans: Plans) -> Contents:
        contents = Contents(self._style)
        contents.load({name: self._ours(its) for name, its in plans.items()})
        return contents

    def _ours(self, plans: Iterable[ServicePlan]) -> tuple[ServicePlan, ...]:
        return tuple(plan for plan in plans if plan.key.family is self.family)

    # -- what seems to differ ---------------------------------------------------------------------------------------

    def _own(self, contents: Contents, nat: FoundTable) -> Iterator[Suspect]:
        """Yield the chains of Services that are missing, differ, or should not exist."""
        yield from found.own_suspects(contents, nat)
        for name in contents.entries:
            for chain in self._unwanted(contents, name):
                if present := nat.present(chain):
                    yield Suspect(("nat", chain), name, "", present)

    def _unwanted(self, contents: Contents, name: ServiceName) -> Iterator[str]:
        wanted = contents.chains_of(name, Detail.SPARSE)
        for end in contents.entries[name].suffixes:
            yield from (prefix + end for prefix in (SVC, SVL, EXT, FW) if prefix + end not in wanted)

    def _dispatched(self, contents: Contents, tables: Tables, names: Iterable[ServiceName] | None) -> Iterator[Suspect]:
        """Yield, by Service, missing and surplus rules of shared chains; of these Services, or of all."""
        asked = frozenset(names) if names is not None else None
        for position, (table, chain) in enumerate(SHARED):
            present = list(tables[table].rules.get(chain, ()))
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
                    lacking = "".join(missing.get(whose, ()))
                    yield Suspect((table, chain), whose, lacking, extra.get(whose, ()), ordered=False)

    def _without_last(self, present: list[str]) -> tuple[list[str], Suspect | None]:
        """Return the rules of KUBE-SERVICES without its jumps to KUBE-NODEPORTS, and a Suspect if those differ."""
        wanted = skeleton.nodeport_rules(self._settings)
        rules = [rule for rule in present if not rule.endswith(" -j KUBE-NODEPORTS\n")]
        last = [rule for rule in present if rule.endswith(" -j KUBE-NODEPORTS\n")]
        at_the_end = present[len(rules) :] == last
        printed = as_saved(wanted, self.family).splitlines(keepends=True)
        suspect = Suspect(("nat", "KUBE-SERVICES"), None, wanted, last if at_the_end else present)
        return rules, None if at_the_end and sorted(last) == sorted(printed) else suspect

    def _stale(self, contents: Contents, nat: FoundTable) -> Iterator[Suspect]:
        """Yield chains with a Service's prefix that belong to no Service, except empty ones: rules may lead to them."""
        own = {chain for name in contents.entries for chain in contents.chains_of(name, Detail.SPARSE)}
        own |= {chain for name in contents.entries for chain in self._unwanted(contents, name)}
        for chain in nat.chains - own:
            if chain.startswith(SERVICE_PREFIXES) and (present := nat.present(chain)):
                yield Suspect(("nat", chain), None, "", present)

    def _confirmed(self, suspects: Sequence[Suspect], words: _Words) -> Iterator[Finding]:
        """Yield the differences between the suspects and the desired rules as this node's iptables prints them."""
        for start in range(0, len(suspects), MOST):
            some = suspects[start : start + MOST]
            try:
                printed = [(suspect, wanted) for suspect, wanted, _ in as_printed(some, self._printed)]
            except (Unsupported, ApplyError) as error:
                self._caveats.append(f"how iptables prints our rules is taken from version 1.8.9 ({error})")
                printed = [(s, as_saved(s.wanted, self.family).splitlines(keepends=True)) for s in some]
            for suspect, wanted in printed:
                yield from words.differences(suspect, wanted)


def owner_of(rule: str) -> ServiceName | None:
    """Return the Service that a rule of a shared chain names in its comment, None for none."""
    named = _COMMENT.search(rule)
    namespace, slash, rest = named[1].partition("/") if named else ("", "", "")
    return (namespace, rest.partition(":")[0]) if slash else None


class _Words:
    """The words for differences of one family's rules, from the desired contents and the found nat table."""

    def __init__(self, family: Family, contents: Contents, nat: Chains) -> None:
        self._family = family
        self._contents = contents
        self._nat = nat

    def differences(self, suspect: Suspect, wanted: Sequence[str]) -> Iterator[Finding]:
        """Yield the differences between a chain's found rules and the desired ones as iptables-save prints them."""
        service, present, where = suspect.service, suspect.present, self._where(suspect.place)
        chain = suspect.place[1]
        if present is None or (not wanted and chain.startswith(SERVICE_PREFIXES)):
            yield Finding(service, Kind.MISSING if present is None else Kind.EXTRA, self._chain(chain, service), where)
            return
        missing, extra = Counter(wanted) - Counter(present), Counter(present) - Counter(wanted)
        lacking = {(service, self._what(rule, service)): rule for rule in missing}
        surplus = {(service, self._what(rule, service)): rule for rule in extra}
        yield from findings({suspect.place: surplus}, {service: {suspect.place: lacking}}, self)
        if suspect.ordered and not missing and not extra and list(wanted) != list(present):
            yield Finding(service, Kind.DIFFERENT, "the order of the rules", where)

    def owner(self, place: Place, key: tuple[ServiceName | None, str]) -> ServiceName | None:  # noqa: ARG002
        """See state.StateWords."""
        return key[0]

    def wording(
        self, place: Place, key: tuple[ServiceName | None, str], wanted: str | None, present: str | None
    ) -> Wording:
        """See state.StateWords."""
        return Wording(key[1], self._where(place), (wanted or "").strip(), (present or "").strip())

    def _where(self, place: Place) -> str:
        table, chain = place
        return f"chain {chain} of table {table} ({self._family.label})"

    def _chain(self, chain: str, service: ServiceName | None) -> str:
        if chain.startswith(SEP):
            return self._endpoint(chain, service)
        return next((role for prefix, role in _ROLES.items() if chain.startswith(prefix)), f"chain {chain}")

    def _what(self, rule: str, service: ServiceName | None) -> str:
        """Return the subject of a rule: an endpoint, a frontend, or the target."""
        target, port, protocol = target_of(rule.strip()), _PORT.search(rule), _PROTOCOL.search(rule)
        if target.startswith(SEP):
            return self._endpoint(target, service)
        if port is None or protocol is None or service is None or rule.startswith(tuple(f"-A {p}" for p in _ROLES)):
            return f"the rule to {target or 'nowhere'}"
        address = _ADDRESS.search(rule)
        where = f"[{address[1]}]" if address and ":" in address[1] else address[1] if address else ""
        front = f"{where}:{port[1]}/{protocol[1]}" if where else f"NodePort {port[1]}/{protocol[1]}"
        return f"{front}, {_outcome(target)}"

    def _endpoint(self, chain: str, service: ServiceName | None) -> str:
        rules = "".join(self._nat.get(chain, ()))
        if service is not None:
            rules = self._contents.chains_of(service, Detail.SPARSE).get(chain, rules)
        destination = _DESTINATION.search(rules)
        return f"endpoint {destination[1]}" if destination else f"the endpoint of chain {chain}"


def _outcome(target: str) -> str:
    return {"REJECT": "refused", "DROP": "dropped", "ACCEPT": "let in"}.get(target, "forwarded")


def printer(commands: Commands) -> Printer:
    """Return a Printer that writes the rules in an empty network namespace and reads them back."""

    def printed(table: str, chains: Mapping[str, str]) -> Chains:
        rules = "".join(chains.values())
        targets = {target_of(line) for line in rules.splitlines()}
        names = chains.keys() | {target for target in targets if target.startswith("KUBE-")}
        text = f"*{table}\n{declarations(sorted(names))}{rules}COMMIT\n"

        def write() -> Chains:
            for counter in (INVALID_COUNTER, LOCALHOST_COUNTER):
                nfacct.ensure(counter)
            commands.restore([text])
            return found.read(commands, table, lambda _: True).rules

        with nobodys_lock():
            return in_empty_network(write)

    return printed


def in_use(family: Family) -> Commands:
    """Return the commands of the variant that has our chains, else of this node's variant. Raises ApplyError.

    Cheap with many rules, too: it reads the mangle table only, which has one chain of ours.
    """
    there = [c for c in map(xtables.commands, xtables.installed_for(family)) if CANARY in _names(c)]
    return there[0] if len(there) == 1 else iptables_variant.commands(family, iptables_variant.chosen())


def _names(commands: Commands) -> Collection[str]:
    """Return the chains of the mangle table, in which a kube-proxy has one chain."""
    try:
        table = commands.table("mangle")
    except ApplyError:
        return ()
    return table.chains if table is not None else ()
