"""Derives the outcome of a connection on this node, with its reasons, from the plans and a packet. Pure. The reasons
are the Service that owns the address, the origin of the client, policies, source ranges, and the eligible and
ineligible endpoints (choosing.py). The recorded conformance cases check the outcomes against real packets."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from enum import Enum
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from kubeproxy.model.addresses import (
    PROTOCOL_NAMES,
    PROTOCOLS,
    Family,
    family_of,
    is_loopback,
    network_text,
    place_text,
    unpack,
    within,
)
from kubeproxy.model.choosing import Absent, ClientAddress, absent, carried, shares, sharing_text
from kubeproxy.model.cilium import CILIUM_POLICY, denies
from kubeproxy.model.index import Index
from kubeproxy.model.plan import (
    Action,
    FamilyGlobals,
    Frontend,
    FrontendKind,
    Habits,
    Loopback,
    Policy,
    PortRange,
    ServiceName,
    ServicePlan,
    Traffic,
)
from kubeproxy.model.planner import Planner
from kubeproxy.model.port_ranges import FIELD
from kubeproxy.model.world import used_pod_networks
from kubeproxy.wording import counted

_TCP = PROTOCOLS["TCP"]


class Side(Enum):
    """The origins of connections that policies distinguish."""

    POD = "a pod"
    NODE = "this node"
    OUTSIDE = "outside"


class Packet(NamedTuple):
    """The first packet of a connection. Addresses are packed."""

    source: bytes | None  # None: the node selects one of its addresses
    destination: bytes
    protocol: int
    port: int
    interface: str = ""  # the incoming interface, which identifies pods in some clusters; '' if unknown
    source_port: int = 0  # the endpoint may depend on the source port; 0 if unknown


class Outcome(Enum):
    """The outcome of a connection."""

    FORWARDED = "forwarded"
    REFUSED = "refused"
    DROPPED = "dropped"
    NOT_OURS = "not ours"
    HEALTH = "answered by the proxy"


class Notice(Enum):
    """The result that the client notices."""

    ANSWER = "an answer"
    UNHEALTHY = "503: a load balancer takes this node out"
    ENDPOINT = "the answer of the endpoint"
    RESET = "connection refused, by a reset"
    ICMP = "connection refused, by an ICMP error"
    NOT_PERMITTED = "send() fail with EPERM (Operation not permitted)"
    LATE_ICMP = "connection refused after a second: TCP over IPv6 mostly ignores an ICMP error before its second SYN"
    TIMEOUT = "a timeout"
    UNKNOWN = "the answer of the host at this address, if any"


class AnswerStep(Struct, frozen=True):
    """A step on the way to the outcome: whether the connection passes the step, a text, and the field that decides."""

    passes: bool
    text: str
    field: str = ""


class Choice(NamedTuple):
    """An eligible endpoint: packed address and port, probability, and whether connections to it are masqueraded."""

    destination: bytes
    share: float
    masqueraded: bool


class Answer(Struct, frozen=True):
    """The outcome of a packet, and the steps that lead to it."""

    outcome: Outcome
    steps: tuple[AnswerStep, ...]
    notice: Notice
    plan: ServicePlan | None = None
    frontend: Frontend | None = None
    choices: tuple[Choice, ...] = ()
    affinity: int = 0  # seconds of session affinity; 0 if there is none
    local_endpoints: int = 0  # in a health check's answer: the number of ready endpoints on this node
    absent: tuple[Absent, ...] = ()  # the ineligible endpoints with their reasons
    policy: Policy = Policy.CLUSTER  # the policy of the pool from which the endpoint is picked
    keeps_outside: bool = False
    """Whether endpoints see an outside client's address only because the proxy cannot recognise pods in this family,
    and therefore masquerades no outside client. Replies of endpoints on other nodes then bypass this node, unless these
    nodes route to the client through this node."""


def answer(
    planner: Planner, packet: Packet, local: Collection[bytes], habits: Habits | None = None, index: Index | None = None
) -> Answer:
    """Return the outcome of a packet on the node with the packed addresses `local`, in a mode with these habits. An
    `index` of the planner makes many calls faster."""
    question = _Question(planner, packet, local, habits or Habits(), index or Index(planner))
    if (owned := question.owner()) is not None:
        return question.served(*owned)
    return question.on_loopback() or question.health() or question.closed() or question.unowned()


def refuses_node(habits: Habits, frontend: Frontend, local: Collection[bytes]) -> bool:
    """Return whether this node's connections to a frontend without endpoints are refused; `local` are the node's packed
    addresses. Every mode refuses such connections at cluster IPs and at the node's own addresses."""
    always = frontend.kind in {FrontendKind.CLUSTER, FrontendKind.NODEPORT} or frontend.address in local
    return habits.refuses_node or always


class _Question:
    def __init__(
        self, planner: Planner, packet: Packet, local: Collection[bytes], habits: Habits, index: Index
    ) -> None:
        self._planner = planner
        self._index = index
        self._packet = packet
        self._client = ClientAddress(packet.source, packet.source_port)
        self._local = local
        self._habits = habits
        self._family = family_of(packet.destination)
        self._ours = planner.world.of(self._family) or FamilyGlobals()
        self._tail = bytes((packet.protocol,)) + packet.port.to_bytes(2, "big")

    def owner(self) -> tuple[ServicePlan, Frontend] | None:
        """Return the packet's frontend and its plan. A port at a Service's address takes precedence over a NodePort,
        and a NodePort takes precedence over a range of ports."""
        key = self._packet.destination + self._tail
        own = self._frontend(key) or (self._frontend(self._tail) if self._answers_nodeports() else None)
        return own or self._covering(self._planner.range_owner(self._family, key), key)

    def closed(self) -> Answer | None:
        """Return the answer for a NodePort without endpoints, at an address without NodePorts; None for other
        destinations."""
        local = self._packet.destination in self._local
        owned = self._frontend(self._tail) if self._habits.closes_everywhere and local else None
        if owned is None or owned[0].external.outside.forwards:
            return None
        plan, frontend = owned
        reason, field = _unavailable(plan)
        step = AnswerStep(False, f"{self._where()} is closed: a NodePort of {_named(plan)}: {reason}", field)
        missing = absent(self._planner, plan, frontend, plan.local if plan.usable else plan.cluster)
        refused = plan.external.outside is Action.REJECT
        steps = filter(None, (step, self._other_address()))
        return self._ended(plan, frontend, Outcome.REFUSED if refused else Outcome.DROPPED, steps, missing)

    def on_loopback(self) -> Answer | None:
        """Return the answer for a NodePort on loopback if the proxy relays or refuses such connections, else None."""
        care, destination = self._ours.loopback, self._packet.destination
        owned = self._frontend(self._tail)
        if owned is None or care not in _NOT_RELAYED or not is_loopback(destination):
            return None
        plan, frontend = owned
        relayed = care is Loopback.RELAYED and self._packet.protocol == _TCP
        pool = plan.local if plan.policies.external is Policy.LOCAL else plan.cluster
        if relayed and pool and destination in RELAYED_AT:
            text = f"{self._where()} is a NodePort of {_named(plan)} on loopback: the proxy itself carries it"
            shared = shares(carried(plan), plan.policies.external, self._client)
            choices = tuple(Choice(one, share, masqueraded=True) for one, share in shared.items())
            sharing = sharing_text(carried(plan), plan.policies.external, self._client)
            steps = (
                AnswerStep(True, text, _NODEPORTS),
                *[AnswerStep(True, words, "metadata.annotations") for words in sharing],
            )
            return Answer(Outcome.FORWARDED, steps, Notice.ENDPOINT, plan, frontend, choices, plan.remembers)
        reason, field = _unavailable(plan) if relayed and not pool else (_NOT_RELAYED[care], _NODEPORTS)
        if relayed and destination not in RELAYED_AT:
            reason, field = "the proxy relays only connections to 127.0.0.1 and ::1", _NODEPORTS
        missing = absent(self._planner, plan, frontend, ()) if not pool else ()
        text = f"{self._where()} is a NodePort of {_named(plan)} on loopback: {reason}"
        made = self._ended(plan, frontend, Outcome.REFUSED, [AnswerStep(False, text, field)], missing)
        return replace(made, notice=Notice.RESET) if relayed and destination in RELAYED_AT else made

    def _frontend(self, key: bytes) -> tuple[ServicePlan, Frontend] | None:
        return self._covering(self._planner.owner(self._family, key), key)

    def _covering(self, name: ServiceName | None, key: bytes) -> tuple[ServicePlan, Frontend] | None:
        for plan in self._planner.compiled[name].plans if name in self._planner.compiled else ():
            for frontend in plan.all_frontends:
                if frontend.covers(key) and plan.key.family is self._family:
                    return plan, frontend
        return None

    def _answers_nodeports(self) -> bool:
        chosen, destination = self._ours.nodeport_ips, self._packet.destination
        if chosen is not None:
            return destination in chosen
        if is_loopback(destination):
            return self._ours.loopback is Loopback.SERVED or self._family in self._habits.loopback
        return destination in self._local

    def health(self) -> Answer | None:
        """Return the answer for a health check port; None for any other port or address."""
        checked, served = self._health_check(), self._ours.health_check_ips
        if checked is None or self._packet.destination not in (self._local if served is None else served):
            return None
        name, count = checked
        text = f"port {self._packet.port} of this node is the health check of {name}"
        steps = AnswerStep(True, text, HEALTH_FIELD), AnswerStep(count > 0, f"ready endpoints on this node: {count}")
        notice = Notice.ANSWER if count else Notice.UNHEALTHY
        return Answer(Outcome.HEALTH, steps, notice, local_endpoints=count)

    def _health_check(self) -> tuple[str, int] | None:
        for name in self._index.by_health_port.get(self._packet.port, ()) if self._packet.protocol == _TCP else ():
            check = self._planner.compiled[name].health
            count = check.local_endpoints(self._family) if check is not None else None
            if count is not None:
                return "/".join(name), count
        return None

    def unowned(self) -> Answer:
        """Return the answer for an address and port that belong to no Service."""
        address = self._packet.destination
        where = self._where()
        if here := self._index.by_address.get(address):
            texts = {"/".join(name): {each.port_text for each in found} for name, found in here.items()}
            ports = [f"{name} has {', '.join(sorted(found))} there" for name, found in texts.items()]
            lost = self._planner.range_owner(self._family, address + self._tail)
            reason = f"in a range of {'/'.join(lost)} that overlaps another Service's ports" if lost else "no such port"
            no_port = AnswerStep(False, f"{where}: {reason}; {', '.join(ports)}", FIELD if lost else "spec.ports")
            of_node = address in self._local or self._health_check()
            steps = ((self._other_address() if of_node else None) or no_port,)
            if any(each.kind in self._habits.refuses_ports for found in here.values() for each in found):
                return Answer(Outcome.REFUSED, steps, self._refusal())
            return Answer(Outcome.NOT_OURS, steps, Notice.UNKNOWN)
        if within(self._packet.destination, self._ours.service_cidrs):
            text = f"{where}: an address for Services, which no Service on this node has (another proxy may serve it)"
            steps = (AnswerStep(False, text, "spec.clusterIPs"),)
            if self._habits.drops_unowned:
                return Answer(Outcome.DROPPED, steps, Notice.TIMEOUT)
            return Answer(Outcome.NOT_OURS, steps, Notice.UNKNOWN)
        steps = (self._other_address() or AnswerStep(False, f"{where}: no Service has this address and port"),)
        return Answer(Outcome.NOT_OURS, steps, Notice.UNKNOWN)

    def _other_address(self) -> AnswerStep | None:
        owned, checked, destination = self._frontend(self._tail), self._health_check(), self._packet.destination
        if owned is not None:
            kind, field, answering = f"NodePort of {_named(owned[0])}", "spec.ports[].nodePort", self._ours.nodeport_ips
        elif checked is not None:
            kind, field, answering = f"health check port of {checked[0]}", HEALTH_FIELD, self._ours.health_check_ips
        else:
            return None
        if destination not in self._local and not is_loopback(destination):
            text = f"{self._where()}: no Service has this address and port; on an address of a Node it is a {kind}"
            return AnswerStep(False, text, field)
        everywhere = "all addresses except loopback" if owned is not None else "all addresses of this node"
        where = everywhere if answering is None else ", ".join(map(unpack, answering)) or "no address"
        text = f"{self._where()}: a {kind}, but not on this address: they answer on {where}"
        return AnswerStep(False, text, _NODEPORTS)

    def served(self, plan: ServicePlan, frontend: Frontend) -> Answer:
        """Return the answer for a frontend of a Service."""
        side, recognised, unrecognised = self._side()
        kind, field = _KINDS[frontend.kind]
        if isinstance(frontend, PortRange):
            kind, field = f"{kind}, ports {frontend.ports_text},", FIELD
        others = ", ".join(self._planner.claimants(plan, frontend)[:_CLAIMANTS])
        lost = f"; {others} claims this address too, and does not get it" * bool(others)
        steps = [
            AnswerStep(True, f"{self._where()} is the {kind} of {_named(plan)}{lost}", field),
            AnswerStep(True, f"the client is {side.value}: {recognised}", unrecognised),
        ]
        action = self._action(plan.traffic(frontend), side)
        turned_away = self._turned_away(plan, frontend, side, steps)
        is_local = action.picks_local or action is Action.DROP
        missing = absent(self._planner, plan, frontend, plan.local if is_local else plan.cluster)
        if turned_away and (self._habits.ranges_first or plan.usable):
            return self._ended(plan, frontend, Outcome.DROPPED, steps, missing)
        field = f"spec.{'internal' if frontend.kind is FrontendKind.CLUSTER else 'external'}TrafficPolicy"
        if action is Action.REJECT:
            steps.append(AnswerStep(False, _NO_ENDPOINT))
            if side is Side.NODE and not refuses_node(self._habits, frontend, self._local):
                return self._ended(plan, frontend, Outcome.NOT_OURS, steps, missing)
            return self._ended(plan, frontend, Outcome.REFUSED, steps, missing)
        if action is Action.DROP:
            steps.append(AnswerStep(False, _NONE_HERE, field))
            return self._ended(plan, frontend, Outcome.DROPPED, steps, missing)
        policy, pool, nearby = Policy.CLUSTER, plan.cluster, "all eligible endpoints"
        if action.picks_local:
            policy, pool, nearby = Policy.LOCAL, plan.local, "this node's endpoints"
        text = f"policy {plan.policy(frontend).name.title()}: {counted(len(pool), 'endpoint')}, {nearby}"
        steps.append(AnswerStep(True, text, field))
        plan = plan.at_port(frontend, self._tail[1:])
        choices = tuple(self._choices(plan, policy, action, side))
        steps += [AnswerStep(True, text, "metadata.annotations") for text in sharing_text(plan, policy, self._client)]
        if plan.affinity:
            text = f"a client that connects again within {plan.affinity} s gets the same endpoint"
            steps.append(AnswerStep(True, text, "spec.sessionAffinityConfig.clientIP.timeoutSeconds"))
        return Answer(
            Outcome.FORWARDED,
            tuple(steps),
            Notice.ENDPOINT,
            plan,
            frontend,
            choices,
            plan.affinity,
            absent=missing,
            policy=policy,
            keeps_outside=side is Side.OUTSIDE and action is Action.CLUSTER and not self._ours.detector.implemented,
        )

    def _action(self, traffic: Traffic, side: Side) -> Action:
        action = traffic[list(Side).index(side)]
        if self._habits.one_pool and traffic.outside.picks_local and action.forwards and not action.picks_local:
            masqueraded = action is Action.CLUSTER_MASQUERADE
            return Action.LOCAL_MASQUERADE if masqueraded else Action.LOCAL
        return action

    def _ended(
        self,
        plan: ServicePlan,
        frontend: Frontend,
        outcome: Outcome,
        steps: Iterable[AnswerStep],
        missing: tuple[Absent, ...],
    ) -> Answer:
        notices = {
            Outcome.REFUSED: self._refusal(frontend.kind),
            Outcome.DROPPED: Notice.TIMEOUT,
            Outcome.NOT_OURS: Notice.UNKNOWN,
        }
        plan = plan.at_port(frontend, self._tail[1:])
        return Answer(outcome, tuple(steps), notices[outcome], plan, frontend, absent=missing)

    def _refusal(self, kind: FrontendKind = FrontendKind.CLUSTER) -> Notice:
        packet = self._packet
        if packet.protocol == PROTOCOLS["UDP"] and (packet.source is None or packet.source in self._local):
            at_output = is_loopback(packet.destination) and self._ours.loopback in _NOT_RELAYED
            return Notice.NOT_PERMITTED if at_output or kind not in self._habits.refuses_at_input else Notice.ICMP
        if packet.protocol != _TCP:
            return Notice.ICMP
        if self._family in self._habits.resets_tcp:
            return Notice.RESET
        return Notice.ICMP if self._family is Family.IPV4 else Notice.LATE_ICMP

    def _side(self) -> tuple[Side, str, str]:
        packet, detector = self._packet, self._ours.detector
        if packet.source is None:
            return Side.NODE, "the connection begins here", ""
        source = unpack(packet.source)
        if detector.holds(packet.source, packet.interface):
            return Side.POD, f"{source} is recognised by {detector.words}", ""
        if packet.source in self._local:
            return Side.NODE, f"{source} is its address", ""
        if not detector.implemented:
            return Side.OUTSIDE, f"{source} is not this node's, and pods are not recognised (see clusterCIDR)", ""
        node = self._planner.nodes.get(self._planner.world.node_name)
        own = used_pod_networks(node, self._family, self._local) if detector.kind == "network" else ()
        if within(packet.source, own):
            text = f"{source} is in the podCIDRs of this Node, but not in {detector.words}"
            return Side.OUTSIDE, text, "clusterCIDR"
        return Side.OUTSIDE, f"{source} is neither a pod's nor this node's", ""

    def _turned_away(self, plan: ServicePlan, frontend: Frontend, side: Side, steps: list[AnswerStep]) -> bool:
        allowed = plan.sources(frontend)
        service = self._planner.services.get((plan.key.namespace, plan.key.name))
        if allowed is None:
            others = service.spec.load_balancer_source_ranges if service is not None else None
            if others and frontend.kind is FrontendKind.LOADBALANCER:
                text = f"no source range is {self._family.label}: all {self._family.label} clients are admitted"
                steps.append(AnswerStep(True, text, "spec.loadBalancerSourceRanges"))
            return False
        sources = (self._packet.source,) if self._packet.source is not None else self._ours.node_ips
        fine = any(within(source, allowed) for source in sources)
        own = {one.address for one in plan.frontends if one.kind is FrontendKind.LOADBALANCER}
        # Omit the load balancer's own addresses: _allowed in compile.py adds them, and the Service's field lacks them.
        of_field = [one for one in plan.source_ranges or () if one[0] != one[1] or one[0] not in own]
        ranges = ", ".join(map(network_text, of_field)) or "no valid source range"
        client = side.value if self._packet.source is None else unpack(self._packet.source)
        text, field = f"{'' if fine else 'not '}among the source ranges ({ranges})", "spec.loadBalancerSourceRanges"
        if service is not None and denies(service.metadata.annotations, self._planner.world, []):
            denied = ", ".join(service.spec.load_balancer_source_ranges or ())
            text, field = f"{'not ' if fine else ''}among the source ranges to deny ({denied})", CILIUM_POLICY
        steps.append(AnswerStep(fine, f"{client} is {text}", field))
        return not fine

    def _choices(self, plan: ServicePlan, policy: Policy, action: Action, side: Side) -> Iterator[Choice]:
        masquerades = action in {Action.CLUSTER_MASQUERADE, Action.LOCAL_MASQUERADE}
        for destination, share in shares(plan, policy, self._client).items():
            address = destination[:-2]
            to_itself = address == self._packet.source and (
                self._habits.hairpins == "all" or address in plan.hairpin or address in self._index.hairpins
            )
            # A packet to an endpoint on the node itself does not pass the hook that translates sources.
            stays = address in self._local and side is not Side.NODE
            seen_as_node = self._habits.carries or ((masquerades or to_itself) and not stays)
            yield Choice(destination, share, seen_as_node)

    def _where(self) -> str:
        packet = self._packet
        where = place_text(packet.destination, packet.port)
        return f"{where}/{PROTOCOL_NAMES.get(packet.protocol, packet.protocol)}"


_CLAIMANTS = 3  # the maximum number of other claimants in a text
_NO_ENDPOINT = "no endpoint anywhere takes new connections"
_NONE_HERE = "policy Local, and none of the Service's endpoints is on this node"


def _unavailable(plan: ServicePlan) -> tuple[str, str]:
    return (_NONE_HERE, "spec.externalTrafficPolicy") if plan.usable else (_NO_ENDPOINT, "")


HEALTH_FIELD = "spec.healthCheckNodePort"
_NODEPORTS = "nodePortAddresses"  # the configuration field with the addresses on which NodePorts answer
RELAYED_AT = (b"\x7f\0\0\1", bytes(15) + b"\1")  # the loopback addresses on which the proxy listens for NodePorts
_NOT_RELAYED = {
    Loopback.RELAYED: "the proxy relays only TCP to loopback",
    Loopback.REFUSED: "nodePortAddresses has no loopback network",
}

_KINDS = {
    FrontendKind.CLUSTER: ("cluster IP", "spec.clusterIPs"),
    FrontendKind.EXTERNAL: ("external IP", "spec.externalIPs"),
    FrontendKind.LOADBALANCER: ("load balancer address", "status.loadBalancer.ingress"),
    FrontendKind.NODEPORT: ("NodePort", "spec.ports[].nodePort"),
}
"""The name of each kind of frontend, and the Service's field that contains it."""


def _named(plan: ServicePlan) -> str:
    port = f", port {plan.key.port_name}" if plan.key.port_name else ""
    return f"{plan.key.namespace}/{plan.key.name}{port}"
