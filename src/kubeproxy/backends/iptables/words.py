"""What the rules of iptables mode mean, in words for an operator, and the words for rules that differ. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from kubeproxy.backends.examination import Finding, Kind
from kubeproxy.backends.iptables.audit import Place
from kubeproxy.backends.iptables.contents import Contents
from kubeproxy.backends.iptables.names import EXT, FW, SEP, SERVICE_PREFIXES, SVC, SVL
from kubeproxy.backends.iptables.reading import Chains
from kubeproxy.backends.iptables.render import Detail
from kubeproxy.kernel.xtables.xtables import target_of
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import ServiceName

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


def owner_of(rule: str) -> ServiceName | None:
    """Return the Service that a rule of a shared chain names in its comment, None for none."""
    named = _COMMENT.search(rule)
    namespace, slash, rest = named[1].partition("/") if named else ("", "", "")
    return (namespace, rest.partition(":")[0]) if slash else None


class Words:
    """The words for one family's rules, given what there should be and what there is of the nat table."""

    def __init__(self, family: Family, contents: Contents, nat: Chains) -> None:
        self._family = family
        self._contents = contents
        self._nat = nat

    def differences(
        self,
        place: Place,
        service: ServiceName | None,
        wanted: Sequence[str],
        present: Sequence[str] | None,
        *,
        ordered: bool,
    ) -> Iterator[Finding]:
        """Yield in what a chain's rules differ; `present` is None when there is no such chain."""
        table, chain = place
        where = f"chain {chain} of table {table} ({self._family.label})"
        if present is None or (not wanted and chain.startswith(SERVICE_PREFIXES)):
            kind = Kind.MISSING if present is None else Kind.EXTRA
            yield Finding(service, kind, self._chain(chain, service), where)
            return
        missing, extra = Counter(wanted) - Counter(present), Counter(present) - Counter(wanted)
        lacking = {self._what(rule, service): rule for rule in missing}
        surplus = {self._what(rule, service): rule for rule in extra}
        for what, rule in lacking.items():
            if what in surplus:
                yield Finding(service, Kind.DIFFERENT, what, where, rule.strip(), surplus[what].strip())
            else:
                yield Finding(service, Kind.MISSING, what, where, rule.strip())
        for what, rule in surplus.items():
            if what not in lacking:
                yield Finding(service, Kind.EXTRA, what, where, present=rule.strip())
        if ordered and not missing and not extra and list(wanted) != list(present):
            yield Finding(service, Kind.DIFFERENT, "the order of the rules", where)

    def _chain(self, chain: str, service: ServiceName | None) -> str:
        if chain.startswith(SEP):
            return self._endpoint(chain, service)
        return next((role for prefix, role in _ROLES.items() if chain.startswith(prefix)), f"chain {chain}")

    def _what(self, rule: str, service: ServiceName | None) -> str:
        """Return what a rule is about: an endpoint, a frontend, or what else it says."""
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
