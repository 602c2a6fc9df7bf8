"""The examiner of iptables mode: compares the rules with plans, Service by Service, in a separate process. Rules are
compared as iptables-save prints them. Chains that seem to differ are compared again: the node's own iptables writes and
prints the desired rules in an empty network namespace."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from kubeproxy.backends.iptables import found, skeleton
from kubeproxy.backends.iptables.contents import Contents
from kubeproxy.backends.iptables.found import MOST, Chains, FoundTable, Printer, Suspect, as_printed, as_saved
from kubeproxy.backends.iptables.restores import declarations
from kubeproxy.backends.state import Examiner, Finding, Kind, Plans, Wording, findings, of_family
from kubeproxy.errors import ApplyError, Unsupported
from kubeproxy.kernel.proc.capability import in_empty_network
from kubeproxy.kernel.xtables import xtables
from kubeproxy.kernel.xtables.recent import seen_ago
from kubeproxy.kernel.xtables.xtables import Commands, target_of
from kubeproxy.kernel.xtables.xtables_lock import nobodys_lock
from kubeproxy.model.addresses import PORT_BYTES, Family, pack, place_of_text
from kubeproxy.model.plan import Policy, ServiceName, ServicePlan

Tables = Mapping[str, FoundTable]

_KEPT: Final = re.compile(r"--rcheck .* -j (\S+)")
_DESTINATION: Final = re.compile(r"--to-destination (\S+)")
_COMMENT: Final = re.compile(r'--comment "?([^" ]+)')
_ADDRESS: Final = re.compile(r" -d (\S+)/(?:32|128) ")
_PROTOCOL: Final = re.compile(r" -p (\w+) ")
_PORT: Final = re.compile(r" --dport (\d+)")
_ROLES: Final = {
    skeleton.SVC: "the choice among all endpoints",
    skeleton.SVL: "the choice among the endpoints of this node",
    skeleton.EXT: "the targets of its external addresses and NodePorts",
    skeleton.FW: "the source ranges of its load balancer addresses",
}


class IptablesExaminer(Examiner):
    """See backends.state.Examiner."""

    def __init__(self, commands: Commands, settings: skeleton.RuleSettings, printer: Printer) -> None:
        super().__init__(commands.family)
        self._commands = commands
        self._settings = settings
        self._printer = printer

    def some(self, plans: Plans) -> Iterator[Finding]:
        """See Examiner. iptables-legacy lists whole tables, because its other commands take the iptables lock."""
        contents = self._contents(plans)
        asked = {table: {chain for place, chain in skeleton.SHARED if place == table} for table in ("filter", "nat")}
        asked["nat"] |= _possible(contents, _own_chains(contents)).keys()
        tables = {table: found.read_some(self._commands, table, names) for table, names in asked.items()}
        suspects = [
            *self._own(contents, tables["nat"]),
            *(suspect for suspect in self._shared(contents, tables, plans) if suspect.service is not None),
        ]
        yield from self._confirmed(suspects, contents, tables)

    def everything(self, wanted: Plans) -> Iterator[Finding]:
        """See Examiner."""
        contents = self._contents(wanted)
        tables = {table: found.read(self._commands, table, lambda _: True) for table in skeleton.CANARY_TABLES}
        for table, seen in tables.items():
            if skeleton.CANARY not in seen.chains:
                few = len(seen.chains) < len(skeleton.SHARED)
                what = "all of our chains" if few else "the canary chain, which a flush deletes"
                yield Finding(None, Kind.MISSING, what, _where((table, skeleton.CANARY), self.family))
        suspects = [
            *self._own(contents, tables["nat"]),
            *self._shared(contents, tables, wanted),
            *found.shared_suspects(skeleton.fixed_chains(self._settings), tables),
        ]
        yield from self._confirmed(suspects, contents, tables)
        for jump in skeleton.JUMPS:
            kubelets = jump.target == skeleton.KUBELET_FIREWALL
            if not tables[jump.table].has_jump(jump) and (self._settings.localhost or not kubelets):
                where = _where((jump.table, jump.chain), self.family)
                yield Finding(None, Kind.MISSING, f"the jump to {jump.target}", where)

    def remembered(self, plan: ServicePlan, client: bytes, policy: Policy) -> Iterator[bytes]:
        """See Examiner. The kernel picks the first endpoint whose entry for the client has not timed out."""
        name = (plan.key.namespace, plan.key.name)
        contents = self._contents({name: (plan,)})
        chains = contents.chains_of(name, commented=False)
        prefix = skeleton.SVL if policy is Policy.LOCAL else skeleton.SVC
        for sep in _KEPT.findall(chains.get(prefix + contents.entries[name].suffixes[0], "")):
            ago, destination = seen_ago(sep, client), _DESTINATION.search(chains[sep])
            if ago is not None and ago <= plan.affinity and destination is not None:
                host, port = place_of_text(destination[1])
                yield (pack(host) or b"") + PORT_BYTES[port]
                return

    def _contents(self, plans: Plans) -> Contents:
        return Contents(self._settings, of_family(plans, self.family))

    # -- suspected differences ------------------------------------------------------------------------------------

    def _own(self, contents: Contents, nat: FoundTable) -> Iterator[Suspect]:
        """Yield the chains of Services that are missing, seem to differ, or should not exist. An empty surplus chain is
        allowed, because rules of other programs may jump to it."""
        yield from found.own_suspects(contents, nat)
        own = _own_chains(contents)
        owners = _possible(contents, own)
        for chain in sorted(nat.chains - own.keys()):
            if chain.startswith(skeleton.SERVICE_PREFIXES) and (present := nat.present(chain)):
                yield Suspect(("nat", chain), owners.get(chain), "", present)

    def _shared(self, contents: Contents, tables: Tables, asked: Plans) -> Iterator[Suspect]:
        """Yield missing and surplus rules of shared chains, by chain and Service. The comment of a surplus rule names a
        Service; if the caller did not ask about that Service, the rule is reported without a Service."""
        for place in skeleton.SHARED:
            present = list(tables[place[0]].rules.get(place[1], ()))
            wanted: list[tuple[ServiceName | None, str]] = [
                (name, part.get(place, "")) for name, entry in contents.entries.items() for part in entry.shared
            ]
            if place == skeleton.NAT_SERVICES:
                wanted.append((None, skeleton.nodeport_rules(self._settings)))
                if (right := sorted(present, key=_goes_last)) != present:
                    yield Suspect(place, None, "".join(right), present)
            left = Counter(present)
            lacking: defaultdict[ServiceName | None, list[str]] = defaultdict(list)
            surplus: defaultdict[ServiceName | None, list[str]] = defaultdict(list)
            for name, rule in ((name, rule) for name, rules in wanted for rule in rules.splitlines(keepends=True)):
                printed = as_saved(rule, self.family)
                if left[printed] > 0:
                    left[printed] -= 1
                else:
                    lacking[name].append(rule)
            for rule in left.elements():
                owner = owner_of(rule)
                surplus[owner if owner in asked else None].append(rule)
            for service in lacking.keys() | surplus.keys():
                yield Suspect(place, service, "".join(lacking[service]), surplus[service], ordered=False)

    def _confirmed(self, suspects: Sequence[Suspect], contents: Contents, tables: Tables) -> Iterator[Finding]:
        words = _Words(self.family, contents, tables["nat"].rules)
        for start in range(0, len(suspects), MOST):
            some = suspects[start : start + MOST]
            try:
                printed = [(suspect, wanted) for suspect, wanted, _ in as_printed(some, self._printer)]
            except (Unsupported, ApplyError) as error:
                self.caveats.append(f"the rules are compared as iptables 1.8.9 prints them ({error})")
                printed = [(s, as_saved(s.wanted, self.family).splitlines(keepends=True)) for s in some]
            for suspect, wanted in printed:
                yield from words.differences(suspect, wanted)


def _own_chains(contents: Contents) -> dict[str, ServiceName]:
    return {chain: name for name in contents.entries for chain in contents.chains_of(name, commented=False)}


def _possible(contents: Contents, own: dict[str, ServiceName]) -> dict[str, ServiceName]:
    """Return the Service of each chain that a Service has now, or would have with other traffic policies."""
    ends = [(end, name) for name, entry in contents.entries.items() for end in entry.suffixes]
    possible = {prefix + end: name for end, name in ends for prefix in _ROLES}
    return possible | own


def _goes_last(rule: str) -> bool:
    return rule.endswith(" -j KUBE-NODEPORTS\n")


def _where(place: skeleton.Place, family: Family) -> str:
    return f"chain {place[1]} of table {place[0]} ({family.label})"


def owner_of(rule: str) -> ServiceName | None:
    """Return the Service named in the comment of a rule of a shared chain; None without a name."""
    named = _COMMENT.search(rule)
    namespace, slash, rest = named[1].partition("/") if named else ("", "", "")
    return (namespace, rest.partition(":")[0]) if slash else None


class _Words:
    def __init__(self, family: Family, contents: Contents, nat: Chains) -> None:
        self._family = family
        self._contents = contents
        self._nat = nat

    def differences(self, suspect: Suspect, wanted: Sequence[str]) -> Iterator[Finding]:
        """Yield the differences between a chain's found rules and the desired rules as iptables-save prints them."""
        service, present, where = suspect.service, suspect.present, _where(suspect.place, self._family)
        chain = suspect.place[1]
        if present is None or (not wanted and chain.startswith(skeleton.SERVICE_PREFIXES)):
            yield Finding(service, Kind.MISSING if present is None else Kind.EXTRA, self._chain(chain, service), where)
            return
        missing, extra = Counter(wanted) - Counter(present), Counter(present) - Counter(wanted)
        lacking = {(service, self._what(rule, service)): rule for rule in missing}
        surplus = {(service, self._what(rule, service)): rule for rule in extra}
        yield from findings({suspect.place: surplus}, {service: {suspect.place: lacking}}, self)
        if suspect.ordered and not missing and not extra and list(wanted) != list(present):
            yield Finding(service, Kind.DIFFERENT, "the order of the rules", where)

    def owner(self, place: skeleton.Place, key: tuple[ServiceName | None, str]) -> ServiceName | None:  # noqa: ARG002
        return key[0]

    def wording(
        self, place: skeleton.Place, key: tuple[ServiceName | None, str], wanted: str | None, present: str | None
    ) -> Wording:
        return Wording(key[1], _where(place, self._family), (wanted or "").strip(), (present or "").strip())

    def _chain(self, chain: str, service: ServiceName | None) -> str:
        if chain.startswith(skeleton.SEP):
            return self._endpoint(chain, service)
        return next((role for prefix, role in _ROLES.items() if chain.startswith(prefix)), f"chain {chain}")

    def _what(self, rule: str, service: ServiceName | None) -> str:
        target, port, protocol = target_of(rule.strip()), _PORT.search(rule), _PROTOCOL.search(rule)
        if target.startswith(skeleton.SEP):
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
            rules = self._contents.chains_of(service, commented=False).get(chain, rules)
        destination = _DESTINATION.search(rules)
        return f"endpoint {destination[1]}" if destination else f"the endpoint of chain {chain}"


def _outcome(target: str) -> str:
    return {"REJECT": "refused", "DROP": "dropped", "ACCEPT": "let in"}.get(target, "forwarded")


def printed(commands: Commands, table: str, chains: Mapping[str, str]) -> Chains:
    """Write rules in an empty network namespace, and read them back; see Printer."""
    rules = "".join(chains.values())
    targets = {target_of(line) for line in rules.splitlines()}
    names = chains.keys() | {target for target in targets if target.startswith("KUBE-")}
    text = f"*{table}\n{declarations(sorted(names))}{rules}COMMIT\n"

    def write() -> Chains:
        for counter in (skeleton.INVALID_COUNTER, skeleton.LOCALHOST_COUNTER):
            xtables.ensure_counter(counter)
        commands.restore([text])
        return found.read(commands, table, lambda _: True).rules

    with nobodys_lock():
        return in_empty_network(write)
