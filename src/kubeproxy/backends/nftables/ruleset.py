"""The desired table without elements: sets, base chains, static rules, and chains shared by Services. Pure: computes
the table's definition from the globals and chain names. Rules are written in nft syntax and then compiled. The number
of rules does not depend on the number of Services. Hooks and priorities are those of the Go kube-proxy v1.36."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Final

from kubeproxy.backends.nftables import affinity, failing, forwarding, gone, layout, port_ranges
from kubeproxy.backends.nftables.layout import CLASSES, TABLE, ChainName, SetId
from kubeproxy.backends.rules import pods_in_nft
from kubeproxy.features import CONNECTION_COUNTERS, FAST_FORWARDING, REFUSAL_RESETS, RESETS
from kubeproxy.kernel.nftables import compiling, messages, tables
from kubeproxy.kernel.nftables.nfnetlink import exclusive
from kubeproxy.model.addresses import Family
from kubeproxy.model.maglev import SEED
from kubeproxy.model.plan import FamilyGlobals, Globals, HashKey, Loopback

COMMENT: Final = "rules of kube-proxy"
"""Beginning of our table's comment. The comment of the Go kube-proxy's table is "rules for kube-proxy"."""

_SERVICE: Final = "{ip} daddr . meta l4proto . th dport"
_NODEPORT: Final = "meta l4proto . th dport"
_TRANSPORTS: Final = "tcp, udp, sctp"
_LOOPBACK: Final = {Family.IPV4: "127.0.0.0/8", Family.IPV6: "::1"}
_SAMPLES: Final = ("cluster", "policy-local", "local-pick")
_NODEPORTS: Final = (
    SetId.EXTERNAL_NODEPORTS,
    SetId.POLICY_LOCAL_NODEPORTS,
    SetId.STICKY_NODEPORTS,
    SetId.NO_ENDPOINT_NODEPORTS,
    SetId.NO_LOCAL_ENDPOINT_NODEPORTS,
)
"""The sets and maps that together contain all NodePorts."""


SOURCE_RANGES: Final = "source-ranges"
"""Name of the chain that admits clients by source ranges."""


class Ruleset:
    """The definition of one family's table for given globals, without the elements of Services. `extra` is OF_RANGES if
    a Service has ranges of ports, else empty."""

    def __init__(self, family: Family, world: Globals, extra: tuple[SetId, ...] = ()) -> None:
        ours = world.of(family)
        self.family = family
        self.extra = extra
        self.layout = layout.Layout(family, extra)
        self._ours = ours if ours is not None else FamilyGlobals()
        self._world = world
        self._mark = f"{world.masquerade_mark:#x}"
        self._resets = RESETS.value(world)
        self._forwarding = FAST_FORWARDING.value(world)

    def having(self, extra: tuple[SetId, ...]) -> Ruleset:
        """Return the definition with these sets of OF_RANGES."""
        return self if extra == self.extra else Ruleset(self.family, self._world, extra)

    @property
    def name(self) -> str:
        """Return the name of the table in nft: 'ip kube-proxy' or 'ip6 kube-proxy'."""
        return f"{self.layout.ip} {TABLE}"

    def texts(self) -> tuple[object, ...]:
        """Return a value that is equal for two definitions if their tables differ only in elements."""
        samples = (ChainName(nodeport, t, affinity=5) for nodeport in (False, True) for t in _SAMPLES)
        return self.sets(), self.chains(samples)

    def chains(self, names: Iterable[ChainName]) -> dict[str, tuple[tables.Hook | None, Sequence[str]]]:
        """Return hook and rules (as text) of all chains by name: the static chains, the given chains, and all chains
        to which they jump."""
        found: dict[str, Sequence[str]] = {**self._static()}
        found |= {str(name): self._chain_rules(name) for name in sorted(self.needed(names))}
        return {**self._base_chains(), **{name: (None, rules) for name, rules in found.items()}}

    def definition(self, chains: Iterable[ChainName]) -> tables.Definition:
        """Return the table without Services, but with these chains and their targets."""
        made = {name: self._chain(rules, hook) for name, (hook, rules) in self.chains(chains).items()}
        counters = () if self._ours.loopback is Loopback.NOTHING else tuple(layout.COUNTERS)
        flowtables = (forwarding.FLOWTABLE,) if self._forwarding.protocols else ()
        return tables.Definition(tuple(self.sets()), made, counters, flowtables)

    def creation(
        self,
        chains: Iterable[ChainName] = (),
        elements: Iterable[bytes] = (),
        others: Mapping[str, tables.ChainContents] = MappingProxyType({}),
    ) -> list[bytes]:
        """Return the messages that create the table with these elements; `others` replace chains of the same name. The
        messages of rules are at the end, because the kernel checks each new element against each existing rule of its
        map."""
        place, made = (self.family, TABLE), self.definition(chains)
        made = made._replace(chains={**made.chains, **others})
        head = [messages.table_message(*place, COMMENT), *messages.objects(*place, made)]
        return [*head, *elements, *messages.rules(*place, made.chains)]

    def _chain(self, rules: Iterable[str], hook: tables.Hook | None = None) -> tables.ChainContents:
        return tables.ChainContents(hook, tuple([compiling.rule(text, self.layout.ip) for text in rules]))

    def sets(self) -> list[tables.SetSpec]:
        """Return the declarations of the table's sets and maps."""
        counted = CONNECTION_COUNTERS.value(self._world)
        found = [
            spec._replace(flags=tables.COUNTED) if counted and name in layout.COUNTED_MAPS else spec
            for name, spec in self.layout.sets.items()
        ]
        if self._resets:
            found.append(gone.declaration(self.layout))
        if self._world.ejects:
            found.append(failing.declaration(self.layout))
        found.append(affinity.declaration(self.layout))
        found.append(tables.SetSpec(layout.TRANSPORTS, ("meta l4proto",)))
        found.append(
            tables.SetSpec(layout.SERVICE_CIDRS, (f"{self.layout.ip} daddr",), flags=tables.INTERVAL, merges=True)
        )
        return found

    def _static(self) -> dict[str, tuple[str, ...]]:
        beyond = gone.rules(self.layout) if self._resets else {}
        if self._forwarding.protocols:
            beyond = beyond | forwarding.rules(self._forwarding)
        if self._world.ejects:
            beyond = beyond | failing.rules(self.layout)
        sticky = affinity.rules(self.layout, pick_chain(SetId.SESSION_SLOTS))
        checks = self._checks()
        if self.extra:
            beyond = beyond | {
                "range-cluster": (*self._masquerade_cluster(), "goto range-pick"),
                "range-external": (self._mark_packet, "goto range-pick"),
                "range-sources": checks[SOURCE_RANGES][1:],
            }
            beyond |= port_ranges.rules(self.layout, self._key(False), self._from_pods("goto range-pick"))
        return self._treatments() | self._picking() | sticky | checks | self._on_loopback() | beyond

    def _treatments(self) -> dict[str, tuple[str, ...]]:
        """Return the chains that look up a frontend, select its pool, and decide whether to masquerade. The result of
        the lookup is the class of the frontend's pool. An nft rule cannot use a value from one map in the key of
        another map, so until an endpoint is picked, the packet carries the class in place of its destination port."""
        service, nodeport = self._key(False), self._nodeport_match()
        found: dict[str, tuple[str, ...]] = {
            "services": (
                f"{_carry(service, SetId.CLUSTER_SERVICES)} goto cluster",
                f"{_carry(service, SetId.EXTERNAL_SERVICES)} goto external",
                f"{_carry(service, SetId.POLICY_LOCAL_SERVICES)} goto policy-local",
                f"{service} vmap @{SetId.AFFINITY_SERVICES}",
                f"{nodeport} goto nodeports",
            ),
            "nodeports": (
                f"{_carry(_NODEPORT, SetId.EXTERNAL_NODEPORTS)} goto nodeport-external",
                f"{_carry(_NODEPORT, SetId.POLICY_LOCAL_NODEPORTS)} goto nodeport-policy-local",
                f"{_NODEPORT} vmap @{SetId.AFFINITY_NODEPORTS}",
            ),
            "cluster": (*self._masquerade_cluster(), "goto pick"),
        }
        for prefix, key, local, chains in (
            ("", service, SetId.LOCAL_SERVICES, SetId.LOCAL_AFFINITY_SERVICES),
            ("nodeport-", _NODEPORT, SetId.LOCAL_NODEPORTS, SetId.LOCAL_AFFINITY_NODEPORTS),
        ):
            found[f"{prefix}local-affinity"] = (f"{key} vmap @{chains}",)
            found[f"{prefix}external"] = (self._mark_packet, f"goto {prefix}pick")
            found[f"{prefix}policy-local"] = (
                *self._from_pods(f"goto {prefix}pick"),
                f"fib saddr type local goto {prefix}external",
                f"jump {PUT_BACK}",
                f"{_carry(key, local)} goto local-{prefix}pick",
            )
        return found

    def _checks(self) -> dict[str, tuple[str, ...]]:
        ip = self.layout.ip
        service = self._key(False)
        nodeport = self._nodeport_match()
        return {
            "masquerading": (
                f"ct status dnat {ip} saddr . {ip} daddr @hairpin-endpoints meta mark set meta mark or {self._mark}",
                f"meta mark and {self._mark} == 0 return",
                f"meta mark set meta mark xor {self._mark}",
                "masquerade fully-random",
            ),
            "firewall-check": (f"{service} @firewalled-services goto {SOURCE_RANGES}",),
            # The first rule writes the list's number into the packet in place of its destination address, for the
            # second rule.
            SOURCE_RANGES: (
                f"{ip} daddr set {service} map @firewall-lists",
                f"{ip} daddr . {ip} saddr @firewall-allow goto source-allowed",
                f"{ip} daddr set ct original {ip} daddr drop",
            ),
            "source-allowed": (f"{ip} daddr set ct original {ip} daddr",),
            "service-endpoints-check": (
                f"{service} @no-local-endpoint-services drop",
                f"{service} @unserved-services goto refuse",
            ),
            "nodeport-endpoints-check": (
                f"{nodeport} {_NODEPORT} @no-local-endpoint-nodeports drop",
                f"{nodeport} {_NODEPORT} @unserved-nodeports goto refuse",
            ),
            "cluster-ips-check": (f"{ip} daddr @cluster-ips goto refuse", f"{ip} daddr @service-cidrs drop"),
            "refuse": self._refuse(),
        }

    def _on_loopback(self) -> dict[str, tuple[str, ...]]:
        """Return the chains that refuse and count packets to NodePorts on loopback. If the proxy relays TCP, the chains
        do not refuse TCP packets."""
        if self._ours.loopback is Loopback.NOTHING:
            return {}
        relayed = ("meta l4proto tcp return",) if self._ours.loopback is Loopback.RELAYED else ()
        counted = [
            f'meta l4proto {protocol.lower()} counter name "{name}"' for name, protocol in layout.COUNTERS.items()
        ]
        return {
            "localhost-nodeports-check": (
                *relayed,
                *(
                    f"{_carry(_NODEPORT, set_id) if set_id in layout.CLASS_MAPS else f'{_NODEPORT} @{set_id}'}"
                    " goto refuse-localhost"
                    for set_id in _NODEPORTS
                ),
            ),
            "refuse-localhost": (f"jump {PUT_BACK}", *counted, "goto refuse"),
        }

    def _refuse(self) -> tuple[str, ...]:
        """Return the rules for packets to frontends without endpoints. The kernel limits the rate of ICMP errors per
        client (icmp_ratelimit), so IPv4 TCP gets resets, unless the feature is off. IPv6 TCP gets ICMPv6 errors, as
        with the Go kube-proxy. If client and proxy share a host, such an error can arrive while connect() holds the
        socket. The error is then lost, and the client's next SYN, a second later, gets another error (tcp_v6_err)."""
        resets = self.family is Family.IPV4 and REFUSAL_RESETS.value(self._world)
        return ("meta l4proto tcp reject with tcp reset", "reject") if resets else ("reject",)

    def _picking(self) -> dict[str, tuple[str, ...]]:
        """Return the chains that pick one of a frontend's endpoints. A frontend's class selects its chain.

        A random slot above the frontend's number of endpoints is not in the map; then the rule does not match, and the
        next rule picks again. The last rule picks from the next smaller class, which has no unused slots. A commit
        between two lookups can remove the picked slot as well; then the packet gets the first slot, which always
        exists."""
        # nft derives the type of the port from the protocols. Checksums are computed after the port is restored.
        put_back = f"meta l4proto {{ {_TRANSPORTS} }} th dport set ct original proto-dst"
        found: dict[str, tuple[str, ...]] = {PUT_BACK: (put_back,)}
        for pool_set in layout.POOL_SETS:
            verdicts = ", ".join(f"{size} : goto {pick_chain(pool_set, size)}" for size in CLASSES)
            found[pick_chain(pool_set)] = (f"th dport vmap {{ {verdicts} }}",)
            for size in CLASSES:
                found |= self._pick(pool_set, size)
        return found

    def _pick(self, pool_set: SetId, size: int) -> dict[str, tuple[str, ...]]:
        """Return the chain that picks an endpoint for a class. For a class above EXACT, also return the chain with the
        rule that is evaluated in each try. For a new client with affinity, these chains write the endpoint's number
        into the packet, and then end."""
        chain, slot = pick_chain(pool_set, size), f"numgen random mod {size}"
        ip, sticky = self.layout.ip, pool_set == SetId.SESSION_SLOTS
        pick = f"{ip} daddr set {ip} daddr . {slot} map @{pool_set}" if sticky else self._dnat(pool_set, slot)
        done = (f"{ip} daddr {affinity.ENDPOINT_NUMBERS[self.family]} return",) if sticky else ()
        back, first = f"jump {PUT_BACK}", f"goto {pick_chain(pool_set, CLASSES[0])}"
        if size <= layout.EXACT:
            return {chain: (back, pick, *done, first) if size > 1 else (back, pick)}
        # One rule for all tries, because the kernel checks each new element against each rule of its map.
        attempt, below = try_chain(pool_set, size), layout.BELOW[size]
        settled = try_chain(pool_set, below) if below > layout.EXACT else pick_chain(pool_set, below)
        picks = [rule for to in (*[attempt] * layout.tries(size), settled) for rule in (f"jump {to}", *done)]
        return {chain: (back, *picks, first), attempt: (pick,)}

    def _base_chains(self) -> dict[str, tuple[tables.Hook, tuple[str, ...]]]:
        # A translated packet goes to an endpoint, not to a frontend.
        new, untranslated = "ct state new jump", "ct state new ct status & dnat == 0 jump"
        firewall, translate, refuse = port_ranges.JUMPS if self.extra else ((), (), ())
        checks = (f"{untranslated} service-endpoints-check", *refuse, f"{untranslated} cluster-ips-check")
        fast = (forwarding.jump(self._forwarding),) if self._forwarding.protocols else ()
        loopback: tuple[str, ...] = ()
        if self._ours.loopback is not Loopback.NOTHING:
            loopback = (f"{self.layout.ip} daddr {_LOOPBACK[self.family]} {new} localhost-nodeports-check",)
        suspects = failing.checks(self.layout) if self._world.ejects else ()
        resets = (gone.CHECK,) if self._resets else ()
        first = (f"{new} firewall-check", *firewall, *resets, *suspects)
        local = f"{untranslated} nodeport-endpoints-check", f"{untranslated} service-endpoints-check", *refuse
        return {
            "filter-prerouting-pre-dnat": (tables.Hook("filter", 0, -110), first),
            "filter-output-pre-dnat": (tables.Hook("filter", 3, -110), first),
            "filter-input": (tables.Hook("filter", 1, 0), local),
            "filter-forward": (tables.Hook("filter", 2, 0), (*checks, *fast)),
            "filter-output": (tables.Hook("filter", 3, 0), (*checks, *loopback)),
            "nat-prerouting": (tables.Hook("nat", 0, -100), ("jump services", *translate)),
            "nat-output": (tables.Hook("nat", 3, -100), ("jump services", *translate)),
            "nat-postrouting": (tables.Hook("nat", 4, 100), ("jump masquerading",)),
        }

    def _nodeport_match(self) -> str:
        if self._ours.nodeport_ips is None:
            return f"fib daddr type local {self.layout.ip} daddr != {_LOOPBACK[self.family]}"
        return f"{self.layout.ip} daddr @nodeport-ips"

    def needed(self, names: Iterable[ChainName], known: AbstractSet[ChainName] = frozenset()) -> set[ChainName]:
        """Return these chains and all chains to which they jump, except `known` chains and the targets of `known`
        chains."""
        found: set[ChainName] = set()
        queue = list(names)
        while queue:
            name = queue.pop()
            if name not in found and name not in known:
                found.add(name)
                queue += _leads_to(name)
        return found

    def messages(self, names: Iterable[ChainName]) -> list[bytes]:
        """Return the messages that create these chains. The kernel refuses them if one of the chains exists."""
        place = (self.family, TABLE)
        chains = {str(name): self._chain(self._chain_rules(name)) for name in sorted(names)}
        created = map(exclusive, messages.objects(*place, tables.Definition((), chains)))
        return [*created, *messages.rules(*place, chains)]

    def _chain_rules(self, name: ChainName) -> list[str]:
        onwards = [f"goto {target}" for target in _leads_to(name)]
        if name.picks:
            port = " . th sport" if name.hashed == layout.HASHED[HashKey.FLOW] else ""
            slot = f"jhash {self.layout.ip} saddr{port} mod {name.size} seed {SEED:#x}"
            return [self._dnat(name.endpoint_map, slot)]
        treatment = _base(name)
        if treatment == "cluster":
            return [*self._masquerade_cluster(), *onwards]
        if treatment == "external":
            return [self._mark_packet, *onwards]
        if treatment == "policy-local":
            to_pick, to_external = onwards
            last = "nodeport-local-affinity" if name.nodeport else "local-affinity"
            return [*self._from_pods(to_pick), f"fib saddr type local {to_external}", f"goto {last}"]
        return affinity.client_rules(self.layout, name, self._key(name.nodeport), onwards)

    @property
    def _mark_packet(self) -> str:
        return f"meta mark set meta mark or {self._mark}"

    def _key(self, nodeport: bool) -> str:
        return _NODEPORT if nodeport else _SERVICE.format(ip=self.layout.ip)

    def _masquerade_cluster(self) -> tuple[str, ...]:
        return (self._mark_packet,) if self._world.masquerade_all else self._from_pods(self._mark_packet, "!= ")

    def _from_pods(self, verdict: str, negation: str = "") -> tuple[str, ...]:
        """Return the rule with this verdict for packets from pods; no rule if pods cannot be detected."""
        detector = self._ours.detector
        return (f"{pods_in_nft(detector, self.layout.ip, negation)} {verdict}",) if detector.implemented else ()

    def _dnat(self, endpoint_map: SetId, slot: str) -> str:
        to = f"meta l4proto @transports dnat {self.layout.ip} addr . port to"
        return f"{to} {self._key('nodeport' in endpoint_map)} . {slot} map @{endpoint_map}"


PUT_BACK: Final = "put-port-back"
"""Name of the chain that restores the destination port, which `_carry` replaced."""


def _carry(key: str, class_map: SetId) -> str:
    return f"th dport set {key} map @{class_map}"


def try_chain(pool_set: SetId, size: int) -> str:
    """Return the name of the chain with the rule that picks a random slot of a class."""
    return pick_chain(pool_set, size).replace("pick", "try")


def pick_chain(pool_set: SetId, size: int = 0) -> str:
    """Return the name of the chain that picks an endpoint for the class `size`. If `size` is 0, return the name of the
    chain that selects one of these chains by the packet's class."""
    chain = pool_set.replace("endpoints", "pick").replace("slots", "pick")
    return f"{chain}-{size}" if size else chain


def _base(name: ChainName) -> str:
    return name.treatment.removesuffix(f"-{name.hashed}") if name.hashed else name.treatment


def _leads_to(name: ChainName) -> list[ChainName]:
    """Return the chains of session affinity or Maglev to which a chain jumps, in the order of the jumps. The returned
    chains have the chain's timeout or table size."""
    treatment, suffix = _base(name), f"-{name.hashed}" if name.hashed else ""
    pick = name._replace(treatment=name.hashed or "pick")
    match "" if name.picks else treatment:
        case "cluster" | "external":
            return [pick]
        case "policy-local":
            return [pick, name._replace(treatment=f"external{suffix}")]
        case "pick" | "local-pick" | "range-pick":
            recall = name._replace(treatment=treatment.replace("pick", "recall"))
            return [recall, *_leads_to(recall)]
        case "recall" | "local-recall" | "range-recall":
            return [ChainName(False, "range-remember" if name.of_ranges else "remember", affinity=name.affinity)]
    return []
