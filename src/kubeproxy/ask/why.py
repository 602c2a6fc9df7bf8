"""Adds reasons and fixes to the outcome of a connection (model/answer.py), as text and as fields."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from kubeproxy.ask.question import NODE, Elsewhere, WhichEnd, counted_host, home, nodes_of
from kubeproxy.ask.snapshot import Snapshot
from kubeproxy.config.modes import LOOPBACK_SWITCHES, spelled_out
from kubeproxy.kernel.netlink.protocol import NetlinkError
from kubeproxy.kernel.route import local_addresses
from kubeproxy.model.addresses import (
    PORT_BYTES,
    PROTOCOL_NAMES,
    PROTOCOLS,
    Family,
    Range,
    destination_text,
    family_of,
    front_text,
    is_loopback,
    network_text,
    pack,
    parse_networks,
    place_of_text,
    place_text,
    split_host_port,
    unpack,
    within,
)
from kubeproxy.model.answer import Answer, AnswerStep, Choice, Notice, Outcome, Packet, answer
from kubeproxy.model.choosing import UNPLACED, Absent
from kubeproxy.model.plan import FamilyGlobals, FrontendKind, Globals, Loopback, Policy, ServicePlan
from kubeproxy.model.port_ranges import FIELD as PORT_RANGES
from kubeproxy.model.world import PRIMARY, TO_BE_DELETED_TAINT, eligible
from kubeproxy.wording import counted


class Target(Struct, frozen=True, rename="camel"):
    """An endpoint that may get the connection. Its answers must return through this node, because this node reverses
    the translation."""

    address: str  # and port
    share: float  # the probability that the connection gets this endpoint
    masqueraded: bool
    node: str = ""  # '' if unknown
    zone: str = ""
    returns: bool = True  # its answers return through this node
    terminating: bool = False  # terminating and serving, and used because no endpoint is ready
    client: str = ""  # the client's address in packets to the endpoint; '' if it is not determined

    @property
    def host(self) -> str:
        """The address without the port."""
        return place_of_text(self.address)[0]

    def is_unnamed(self, client: str) -> bool:
        """Return whether the endpoint is the client itself and its Node is unknown."""
        return not self.node and self.host == client


class Missing(Struct, frozen=True, rename="camel"):
    """An endpoint to which this node sends no new connections."""

    address: str
    reason: str
    field: str  # the object's field that is the cause; for a gone endpoint, the proxy's flag --reset-gone-endpoints
    slice: str  # the EndpointSlice that contains the endpoint; '' for a gone endpoint


class Why(Struct, frozen=True, kw_only=True, rename="camel"):
    """The proxy's decision about one connection, with texts for operators."""

    source: str
    destination: str
    outcome: str  # one of model.answer.Outcome's values
    client_sees: str
    service: str = ""  # NAMESPACE/NAME; '' if no Service has the address
    port: str = ""  # the name of the Service's port
    steps: tuple[AnswerStep, ...] = ()
    endpoints: tuple[Target, ...] = ()
    missing: tuple[Missing, ...] = ()
    affinity: int = 0  # seconds
    fixes: tuple[str, ...] = ()  # changes that would let the connection pass
    elsewhere: Elsewhere | None = None  # the other node whose rules handle the connection; None for this node

    @property
    def passes(self) -> bool:
        """Return whether the proxy forwards the connection to an endpoint, or answers a health check with success."""
        return self.forwarded or (self.outcome == Outcome.HEALTH.value and all(step.passes for step in self.steps))

    @property
    def forwarded(self) -> bool:
        """Return whether an endpoint gets the connection if no other program stops it."""
        return self.outcome == Outcome.FORWARDED.value

    @property
    def direct(self) -> bool:
        """Return whether the destination is the endpoint itself, and no rule of the proxy matches."""
        return [one.address for one in self.endpoints] == [self.destination.partition("/")[0]]

    @property
    def is_inside(self) -> bool:
        """Return whether a pod connects to its own address."""
        return self.direct and self.endpoints[0].host == self.source

    @property
    def connection(self) -> str:
        """The client and the destination."""
        return f"{self.source} -> {self.destination}"

    @property
    def heading(self) -> str:
        """Return the answer in one line."""
        return f"{self.connection}: {self.decision()}"

    def decision(self, instead: str = "", *, is_planned: bool = False) -> str:
        """Return the answer in one line, without the connection. `instead` replaces the decision of this node.
        `is_planned` means that no kube-proxy was asked."""
        by = "kube-proxy forwards it" if not self.direct else "this node forwards it, untranslated"
        by = "the endpoint is the client itself: no packet leaves its network namespace" if self.is_inside else by
        seen = "with a kube-proxy it would be " * is_planned + self.outcome
        seen = "kube-proxy does not handle it" if self.outcome == Outcome.NOT_OURS.value else seen
        seen += f", the client sees {self.client_sees}" * (not self.forwarded)
        if self.elsewhere is not None:
            node = self.elsewhere.node or "another node"
            return f"decided on {node}, where the {self.elsewhere.end} is; here it would be: {seen}"
        cause = next((f": {step.text} (x)" for step in self.steps if not step.passes), "")
        return instead or (by if self.forwarded else seen + cause)

    @property
    def next(self) -> str:
        """Return the `kube-proxy trace` command for a connection that this node forwards; '' for any other
        connection."""
        if not self.forwarded or self.elsewhere is not None or self.is_inside:
            return ""
        return f"kube-proxy trace {self.client} {self.destination}"

    @property
    def client(self) -> str:
        """Return the client as an argument of commands."""
        return NODE if self.source == THIS_NODE else self.source


_SHOWS = "; this command first shows the effect on this node: `kube-proxy plan --cluster-cidr NETWORKS`"
WIDEN_CLUSTER_CIDR = f"set clusterCIDR to the networks of all nodes' pods{_SHOWS}"


def unmasqueraded(local_mode: str, family: Family, counted: str = "") -> tuple[str, str]:
    """Return why this node does not masquerade outside clients' connections to cluster IPs of a family, and the fix. If
    `counted` is given, clusterCIDR contains this address of the Node; otherwise there is no pod network of the
    family."""
    if counted:
        reason = f"clusterCIDR contains the Node's own address {counted}, so clients outside count as pods"
        return reason, f"set clusterCIDR to the networks of pods only{_SHOWS}"
    if local_mode == "NodeCIDR":
        fix = f"have the controller manager allocate {family.label} podCIDRs (--cluster-cidr), or use clusterCIDR"
        return f"the podCIDRs of this Node have no {family.label} network (detectLocalMode is NodeCIDR)", fix
    fix = f"add the {family.label} network of all nodes' pods to clusterCIDR{_SHOWS}"
    return f"clusterCIDR has no {family.label} network", fix


NODEPORTS = "nodePortAddresses"  # the field of the configuration
POLICIES = frozenset({"spec.internalTrafficPolicy", "spec.externalTrafficPolicy"})  # fields of Services
THIS_NODE, _ITS_NODE = "this node", "the client's node"


class Explained(Struct, frozen=True):
    """An answer, with the values that a command needs to read the kernel."""

    why: Why
    plan: ServicePlan | None
    world: Globals
    packet: Packet  # the packet of the question
    unplaced: tuple[tuple[bytes, WhichEnd], ...] = ()  # the ends whose address another Node may have
    policy: Policy = Policy.CLUSTER  # policy of the pool from which the endpoint is picked
    keeps_outside: bool = False  # as in model.answer.Answer; False if the client is certainly a pod of this node
    is_own: bool = False  # the client is this node, or certainly a pod of this node
    client_node: str = ""  # the client's node if it is another one ("another node" if its name is unknown); else ''

    @property
    def relayed(self) -> bool:
        """Whether the proxy itself relays the connection to a NodePort on loopback, in a mode that otherwise uses
        rules."""
        destination = self.packet.destination
        ours = self.world.of(family_of(destination)) if self.plan is not None and is_loopback(destination) else None
        return self.why.forwarded and ours is not None and ours.loopback is Loopback.RELAYED


def explain(snapshot: Snapshot, packet: Packet) -> Explained:
    """Return the outcome of a packet on this node, with its reasons. The outcome also applies to packets from clients
    on other nodes, if the destination is an address or endpoint of this node, or if the incoming interface is given."""
    made = answer(snapshot.planner, packet, snapshot.addresses, snapshot.mode.habits)
    if made.outcome is Outcome.NOT_OURS and made.plan is None:
        made = _own_port(snapshot, packet) or _untranslated(snapshot, packet) or made
    made = _switched_off(snapshot, packet, made)
    client, is_local = home(snapshot, packet.source), packet.destination in snapshot.addresses
    direct = made.outcome is Outcome.FORWARDED and made.plan is None
    ends_here = is_local or (direct and home(snapshot, packet.destination).other is None)
    there = None if packet.interface or ends_here else client.other
    why = _told(snapshot, packet, made, is_away=client.other is not None and there is None)
    asked = made.plan is not None or packet.source == packet.destination  # a Node that connects to its own NodePort
    if there is not None:
        why = moved(why, there, _nameless(snapshot))
    unplaced: list[tuple[bytes, WhichEnd]] = []
    if made.outcome is Outcome.NOT_OURS and not is_local:
        unplaced.append((packet.destination, "destination"))
    if packet.source and asked and there is None and client.may_be_node and not (packet.interface or is_local):
        unplaced.append((packet.source, "client"))
    world, own = snapshot.planner.world, snapshot.planner.nodes.get(snapshot.planner.world.node_name)
    keeps = made.keeps_outside or (packet.source is not None and counted_host(world, own, packet.source))
    kept = bool(keeps) and not client.is_own
    node = client.other.node or "another node" if client.other is not None else ""
    return Explained(why, made.plan, world, packet, tuple(unplaced), made.policy, kept, client.is_own, node)


def _own_port(snapshot: Snapshot, packet: Packet) -> Answer | None:
    own, destination = snapshot.options.config.own_addresses.items(), packet.destination
    for field, text in own if destination in snapshot.addresses or is_loopback(destination) else ():
        host, port = split_host_port(text) or ("", "")
        bound = pack(host) or b""
        answers = bound == destination or not any(bound)
        if packet.protocol == PROTOCOLS["TCP"] and port == str(packet.port) and answers:
            steps = [AnswerStep(True, f"{place_text(destination, packet.port)} is this proxy's own port", field)]
            node = snapshot.planner.nodes.get(snapshot.planner.world.node_name)
            if field == "healthzBindAddress" and node is not None and not eligible(node):
                reason = f"/healthz answers 503: the Node is being deleted, or has the taint {TO_BE_DELETED_TAINT}"
                return Answer(Outcome.HEALTH, (*steps, AnswerStep(False, reason, "spec.taints")), Notice.UNHEALTHY)
            return Answer(Outcome.HEALTH, tuple(steps), Notice.ANSWER)
    return None


def _switched_off(snapshot: Snapshot, packet: Packet, made: Answer) -> Answer:
    config, (*others, last) = snapshot.options.config, made.steps
    family, switch = family_of(packet.destination), config.of_mode.loopback_switch(config)
    v6 = family is Family.IPV6 and switch == LOOPBACK_SWITCHES[0]  # this switch does not apply to IPv6
    if last.field != NODEPORTS or not is_loopback(packet.destination) or v6 or not switch:
        return made
    networks = parse_networks(config.node_port_addresses, family)
    excluded = PRIMARY in config.node_port_addresses or (networks and not within(packet.destination, networks))
    more = f", and {NODEPORTS} excludes this address" if excluded else ""
    text, _, where = last.text.partition(": they answer on")
    step = AnswerStep(False, f"{text}: {switch} is false{more}; they answer on{where}", switch)
    return replace(made, steps=(*others, step))


def _untranslated(snapshot: Snapshot, packet: Packet) -> Answer | None:
    address, port = packet.destination, (packet.protocol, packet.port)
    for (namespace, name), pieces in snapshot.planner.slices.items():
        compiled = snapshot.planner.compiled.get((namespace, name))
        ranges = [one for plan in compiled.plans for one in plan.port_ranges] if compiled is not None else ()
        in_range = any(one.protocol == port[0] and one.port <= port[1] <= one.last_port for one in ranges)
        for piece in pieces.values():
            is_port = in_range or any((one.protocol, one.port) == port for one in piece.ports)
            is_node = address == packet.source and address in snapshot.addresses
            if is_port and piece.family is family_of(address) and piece.holds(address) and not is_node:
                text = f"{place_text(address, packet.port)} is an endpoint of {namespace}/{name}: no rule translates it"
                step = AnswerStep(True, text, "endpoints[].addresses")
                choice = Choice(address + PORT_BYTES[packet.port], 1.0, masqueraded=False)
                return Answer(Outcome.FORWARDED, (step,), Notice.ENDPOINT, choices=(choice,))
    return None


def _nameless(snapshot: Snapshot) -> str:
    """Return the configured node name if no Node has this name (the name may be wrong); otherwise ''."""
    own, reach = snapshot.planner.world.node_name, snapshot.reach()
    listed = reach is not None and reach.nodes_listed
    return own if listed and own not in snapshot.planner.nodes else ""


def moved(why: Why, there: Elsewhere, nameless: str = "") -> Why:
    """Return the answer for a connection that the rules of another node handle; `nameless` is the result of
    `_nameless`."""
    if nameless:
        name = there.node or "its Node"
        fix = f"there is no Node {nameless}: set hostnameOverride to the name of this node, which may be {name}"
        return replace(why, elsewhere=there, fixes=(fix,))
    question = f"why {why.source} {why.destination}"
    where = there.node or _ITS_NODE
    fix = f"ask on {where}: `kube-proxy {question}`; or with kubectl from anywhere: `kubectl kubeproxy {question}`"
    return replace(why, elsewhere=there, fixes=(fix,))


def to_other_node(explained: Explained) -> Explained | None:
    """If a client on this node connects to an address of another node, return the answer that no rule of this node
    translates the connection, else None."""
    why, there = explained.why, explained.why.elsewhere
    if there is None or there.end != "destination" or not explained.is_own:
        return None
    end = Target(why.destination.partition("/")[0], 1.0, masqueraded=False, node=there.node)
    why = replace(why, outcome=Outcome.FORWARDED.value, steps=(), endpoints=(end,), elsewhere=None, fixes=())
    return replace(explained, why=why, plan=None)


def _told(snapshot: Snapshot, packet: Packet, made: Answer, *, is_away: bool) -> Why:
    plan = made.plan
    source = unpack(packet.source) if packet.source is not None else THIS_NODE
    destination = front_text(packet.destination, packet.port, packet.protocol)
    targets = tuple(_targets(snapshot, packet, made, is_away=is_away))
    lost = any(one.is_unnamed(source) and not one.returns for one in targets)
    return Why(
        source=source,
        destination=destination,
        outcome=made.outcome.value,
        client_sees=made.notice.value,
        service=f"{plan.key.namespace}/{plan.key.name}" if plan is not None else "",
        port=plan.key.port_name if plan is not None else "",
        steps=made.steps,
        endpoints=targets,
        missing=tuple(_missing(one) for one in made.absent),
        affinity=made.affinity,
        fixes=tuple(_name_fixes(snapshot, packet, plan) if lost and plan else _fixes(snapshot, packet, made)),
    )


def _targets(snapshot: Snapshot, packet: Packet, made: Answer, *, is_away: bool) -> Iterator[Target]:
    """Yield the endpoints of an answer. If the client is on another node (`is_away`), endpoints on other nodes answer
    the client directly, unless the connection is masqueraded. A pod that connects to itself gets an answer only if the
    connection is masqueraded."""
    places, own = _places(snapshot, made.plan) if made.plan is not None else {}, snapshot.planner.world.node_name
    node_of = dict(nodes_of(snapshot, packet.destination)) if made.plan is None else {}
    unplanned = (next(iter(node_of), ""), "", False)
    is_own = packet.source in snapshot.addresses
    for one in made.choices:
        node, zone, terminating = places.get(one.destination, unplanned)
        is_itself = one.destination[:-2] == packet.source
        returns = is_own or one.masqueraded or (not is_itself and node in {own, ""})
        returns = returns or not (is_away or (is_itself and not node))
        yield Target(destination_text(one.destination), one.share, one.masqueraded, node, zone, returns, terminating)


def _name_fixes(snapshot: Snapshot, packet: Packet, plan: ServicePlan) -> Iterator[str]:
    own, namespace, name = snapshot.planner.world.node_name, plan.key.namespace, plan.key.name
    for piece, held in snapshot.planner.slices.get((namespace, name), {}).items():
        for one in held.endpoints:
            if one.address == packet.source and not one.node:
                yield f"set endpoints[].nodeName: {own} for {unpack(one.address)} in EndpointSlice {namespace}/{piece}"


def _missing(one: Absent) -> Missing:
    known = one.destination[-2:] != PORT_BYTES[0]
    where = destination_text(one.destination) if known else unpack(one.destination[:-2])
    return Missing(where, one.reason, one.field, one.slice_name)


def _places(snapshot: Snapshot, plan: ServicePlan) -> dict[bytes, tuple[str, str, bool]]:
    key, found = plan.key, dict[bytes, tuple[str, str, bool]]()
    for piece in snapshot.planner.slices.get((key.namespace, key.name), {}).values():
        for port in piece.ports if piece.family is key.family else ():
            for one in piece.endpoints:
                destination = one.address + PORT_BYTES[port.port]
                terminating = one.terminating and not one.ready and found.get(destination, ("", "", True))[2]
                found[destination] = one.node, one.zone, terminating
    return found


def _fixes(snapshot: Snapshot, packet: Packet, made: Answer) -> Iterator[str]:
    if made.outcome is Outcome.FORWARDED or made.outcome is Outcome.HEALTH:
        return
    blocking = {step.field for step in made.steps if not step.passes}
    if "spec.loadBalancerSourceRanges" in blocking:
        yield from _range_fixes(packet, snapshot.planner.world.of(family_of(packet.destination)))
    yield from _address_fixes(snapshot, packet, blocking)
    if made.plan is None or made.frontend is None:
        return
    unplaced = [one for one in made.absent if one.field == UNPLACED]
    for one in unplaced:
        piece = f"{made.plan.key.namespace}/{one.slice_name}"
        yield f"set nodeName of the endpoint {unpack(one.destination[:-2])} in EndpointSlice {piece}"
    unrecognised = "clusterCIDR" in {step.field for step in made.steps}
    if unrecognised:
        yield WIDEN_CLUSTER_CIDR
    if blocking & POLICIES and not (unplaced or unrecognised):
        field = "internal" if made.frontend.kind is FrontendKind.CLUSTER else "external"
        other = ", connect to the NodePort of a node with an endpoint" * (made.frontend.kind is FrontendKind.NODEPORT)
        run = f"run an endpoint on this node (for example by a DaemonSet){other}"
        yield f"{run}, or set spec.{field}TrafficPolicy to Cluster"
    if not made.plan.usable:
        yield from _endpoint_fixes(made)


def _range_fixes(packet: Packet, ours: FamilyGlobals | None) -> Iterator[str]:
    """Yield fixes for a client outside of the source ranges. A fix for a pod does not contain its address, which may
    later belong to another pod."""
    if ours is not None and packet.source is not None and ours.detector.holds(packet.source, packet.interface):
        network = ours.detector.value if ours.detector.kind == "network" else "the pod network"
        yield (
            "have pods use the Service's cluster IP, which has no source ranges; only if all pods may use this address "
            f"too, add {network} to spec.loadBalancerSourceRanges"
        )
        return
    for source in (ours.node_ips if ours is not None else ()) if packet.source is None else (packet.source,):
        yield f"add {network_text((source, source))} to spec.loadBalancerSourceRanges"


def _address_fixes(snapshot: Snapshot, packet: Packet, blocking: set[str]) -> Iterator[str]:
    world = snapshot.planner.world
    port = f"{packet.port}/{PROTOCOL_NAMES[packet.protocol]}"
    if "spec.ports" in blocking:
        yield f"use a port of the Service (with /udp or /sctp unless it is TCP), or add {port} to its spec.ports"
    if PORT_RANGES in blocking:
        yield "change the annotation so that its ranges contain no port that another Service has at this address"
    for field in blocking.intersection(LOOPBACK_SWITCHES):
        yield (
            f"use an address of this node on which NodePorts answer, or set {field} to true: TCP NodePorts then answer "
            f"on 127.0.0.1 if {NODEPORTS} contains localhost"
        )
    if NODEPORTS in blocking:
        use, ours = "use an address on which NodePorts answer", world.of(family_of(packet.destination))
        if is_loopback(packet.destination) or ours is None or ours.nodeport_ips is None:
            yield use
            return
        # --nodeport-addresses replaces the present list, so the fix repeats the list's networks. If the list has no
        # network of a family, NodePorts of this family answer on all addresses.
        others = [one for part in world.parts.values() for one in part.nodeport_ips or ()]
        named = [one for one in spelled_out(snapshot.options.config.node_port_addresses) if one != PRIMARY]
        others = [one for one in others if not within(one, parse_networks(named, family_of(one)))]
        chosen = dict.fromkeys((*named, *_networks([*others, packet.destination])))
        yield (
            f"{use}, or add its network to nodePortAddresses in the proxy's configuration beside the present ones, "
            "which otherwise cease to have NodePorts; the list holds for all nodes that share the configuration, so it "
            "needs networks with an address of each; see first what it changes on this node: "
            f"`kube-proxy plan --nodeport-addresses {','.join(chosen)}`"
        )


def _networks(addresses: Sequence[bytes]) -> Iterable[str]:
    known: dict[bytes, Range] = {}
    with suppress(NetlinkError):
        known = {one.ip: one.network for family in Family for one in local_addresses(family)}
    return dict.fromkeys(network_text(known.get(address, (address, address))) for address in addresses)


def _endpoint_fixes(made: Answer) -> Iterator[str]:
    assert made.plan is not None  # noqa: S101 - the caller checked
    key = made.plan.key
    service, kubectl = f"{key.namespace}/{key.name}", f"kubectl -n {key.namespace}"
    if not made.absent:
        yield (
            f"no EndpointSlice of {service} has an {key.family.label} endpoint: compare spec.selector with the pods' "
            f"labels ({kubectl} get pods --show-labels; {kubectl} get endpointslices -l "
            f"kubernetes.io/service-name={key.name}); without spec.selector, create an EndpointSlice with the label "
            f"kubernetes.io/service-name={key.name}"
        )
        return
    fields = [one.field for one in made.absent]
    if count := fields.count("conditions.ready"):
        what = counted(count, "endpoint", "is")
        yield f"{what} not ready: look at the readiness probes of the pods ({kubectl} describe pod)"
    if "ports" in fields:
        protocol, lacking = PROTOCOL_NAMES[key.protocol], made.absent[fields.index("ports")].slice_name
        yield (
            f"without spec.selector (a slice made by hand), give a port of the slice the name '{key.port_name}' and "
            f"the protocol {protocol} (`{kubectl} edit endpointslice {lacking}`); with spec.selector, targetPort of "
            f"{service} may be a name that no container has: compare `{kubectl} get service {key.name} -o jsonpath="
            f"'{{.spec.ports[*].targetPort}}'` with `{kubectl} get pods -o jsonpath="
            "'{.items[*].spec.containers[*].ports}'`, then set targetPort to the name or number of a containerPort "
            f"(`{kubectl} edit service {key.name}`)"
        )
    if count := fields.count("conditions.serving"):
        all_of_them = count == len(fields)
        what = "all endpoints are" if all_of_them else counted(count, "endpoint", "is")
        yield f"{what} terminating: start others"
