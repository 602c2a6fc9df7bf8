"""Answers questions about this node's Services from one Snapshot; commands, page and socket use it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from kubeproxy.ask import state
from kubeproxy.ask.facts import Facts, NodeListener, Objects, ProgrammedService
from kubeproxy.ask.listing import cause
from kubeproxy.ask.places import Places, with_node
from kubeproxy.ask.question import packet
from kubeproxy.ask.snapshot import Snapshot, unwatched
from kubeproxy.ask.state import Query
from kubeproxy.ask.why import Explained, explain
from kubeproxy.config.types import describe
from kubeproxy.errors import QuestionError
from kubeproxy.model.addresses import PROTOCOLS
from kubeproxy.model.answer import HEALTH_FIELD, RELAYED_AT
from kubeproxy.model.plan import NOTHING, Compiled, FrontendKind, Loopback, ServiceName
from kubeproxy.release import build
from kubeproxy.report.journal import Past

_PROPOSED = 1000  # Services that completion proposes


class Desk:
    """Answers questions from a snapshot. `places` looks up other Nodes, and is None without a source of Nodes."""

    running: Final = False
    """Whether the answers come from a running proxy, whose plans the kernel should contain."""
    control: str = ""
    """Path of the control socket of a proxy that may run without being queried; '' for none."""
    flags: str = ""
    """The command-line arguments that select this source, each preceded by a space."""

    def __init__(self, snapshot: Snapshot, places: Places | None = None) -> None:
        self.snapshot = snapshot
        self.places = places

    def facts(self) -> Facts:
        """Return the facts about the proxy as a whole."""
        snapshot, planner, options = self.snapshot, self.snapshot.planner, self.snapshot.options
        return Facts(
            version=build().name,
            pid=os.getpid(),
            started=snapshot.started,
            mode=snapshot.mode.name,
            config_file=options.config_file,
            master=options.master,
            manifests=options.manifests,
            config=describe(options.config),
            world=planner.world,
            standings=snapshot.engine.standings,
            unready=snapshot.health.unready(),
            listed=planner.complete,
            awaits=snapshot.engine.awaits,
            services=len(planner.services),
            endpoint_slices=planner.objects.endpoints,
            reach=snapshot.reach(),
            began=snapshot.journal.began if snapshot.journal else {},
            node=planner.nodes.get(planner.world.node_name),
            node_deleted=planner.world.node_name in planner.deleted_nodes,
        )

    def has_node_ports(self) -> bool:
        """Return whether a Service has a NodePort; the cost grows with the number of Services."""
        return any(
            frontend.kind is FrontendKind.NODEPORT
            for compiled in self.snapshot.planner.compiled.values()
            for plan in compiled.plans
            for frontend in plan.frontends
        )

    def listeners(self) -> list[NodeListener]:
        """Return the ports on which the proxy listens for Services: health check ports, and NodePorts that it relays on
        loopback; the cost grows with the number of Services."""
        compiled = self.snapshot.planner.compiled
        return [one for name, each in compiled.items() for one in self._listeners("/".join(name), each)]

    def _listeners(self, service: str, compiled: Compiled) -> Iterator[NodeListener]:
        parts = self.snapshot.planner.world.parts
        if compiled.health is not None:
            addresses: list[bytes] = []
            for family, _ in compiled.health.counts:
                served = parts[family].health_check_ips if family in parts else ()
                addresses += (bytes(family.address_size),) if served is None else served
            yield NodeListener(service, HEALTH_FIELD, tuple(addresses), compiled.health.port)
        relayed: dict[int, list[bytes]] = {}
        for plan in compiled.plans:
            part = parts.get(plan.key.family)
            if part is not None and part.loopback is Loopback.RELAYED and plan.key.protocol == PROTOCOLS["TCP"]:
                here = [one for one in RELAYED_AT if len(one) == plan.key.family.address_size]
                for frontend in plan.frontends:
                    if frontend.kind is FrontendKind.NODEPORT:
                        relayed.setdefault(frontend.port, []).extend(here)
        yield from (NodeListener(service, "spec.ports[].nodePort", tuple(some), port) for port, some in relayed.items())

    def why(self, source: str, target: str, interface: str = "") -> Explained:
        """Return the decision about a connection; ask.question describes the arguments. Raises QuestionError."""
        return explain(self.snapshot, packet(self.snapshot, source, target, interface))

    async def placed(self, made: Explained) -> Explained:
        """If another Node has the client's or the destination's address, add that Node to an answer of `why`."""
        return await with_node(made, self.places) if self.places is not None else made

    def changes(self, after: int, since: float) -> Past:
        """Return the journal's changes and problems after an entry's number and after a time. Raises QuestionError."""
        if self.snapshot.journal is None:
            raise QuestionError(
                "only a running proxy stores changes: run the command without --manifests and --kubeconfig"
            )
        return self.snapshot.journal.past(after, since)

    def services(self, names: Iterable[ServiceName] = ()) -> Iterator[ProgrammedService]:
        """Yield the existing Services of `names`, or all Services if `names` is empty."""
        return (held for name in names or self.snapshot.names if (held := self._service(name)) is not None)

    def service(self, name: ServiceName) -> dict[str, Any]:
        """Return the state of a Service in the form of /debug/state. Raises QuestionError for an unknown Service."""
        made = state.service(self.snapshot, name)
        if made is None:
            raise QuestionError(unwatched(name))
        return made

    @property
    def watched(self) -> list[ServiceName]:
        """All Services that exist, or to which EndpointSlices refer."""
        return list({**self.snapshot.planner.services, **self.snapshot.planner.slices})

    def objects(self, names: Sequence[ServiceName] = ()) -> Iterator[Objects]:
        """Yield the inputs of the plans of these Services, or of all Services if `names` is empty."""
        planner, names = self.snapshot.planner, names or self.watched
        return (Objects(name, planner.services.get(name), planner.slices.get(name, {})) for name in names)

    def has_address(self, name: ServiceName, address: bytes) -> bool:
        """Return whether a Service has a frontend or an endpoint, ready or not, with a packed address."""
        return Query(address=address).finds(self.snapshot.planner, name)

    def beginning(self, prefix: str) -> list[str]:
        """Return the completions of a text: names of Services (NAMESPACE/NAME) that begin with the text, or, after a
        colon, ports of the Service."""
        name, colon, port = prefix.partition(":")
        if not colon:
            found = ("/".join(name) for name in self.snapshot.planner.services)
            return sorted(one for one in found if one.startswith(prefix))[:_PROPOSED]
        space, _, own = name.partition("/")
        compiled = self.snapshot.planner.compiled.get((space, own), NOTHING)
        ports = {one.port_text.lower().removesuffix("/tcp") for plan in compiled.plans for one in plan.frontends}
        return [f"{name}:{one}" for one in sorted(ports) if one.startswith(port)]

    def _service(self, name: ServiceName) -> ProgrammedService | None:
        planner, verdict = self.snapshot.planner, self.snapshot.verdict(name)
        if verdict is None:
            return None
        service, compiled = planner.services.get(name), planner.compiled.get(name, NOTHING)
        waits = name in self.snapshot.engine.queued or planner.is_dirty(name)
        slices, plans = planner.slices.get(name, {}), tuple(self.snapshot.engine.committed(name))
        return ProgrammedService(
            name=name,
            state=verdict[0],
            reason=verdict[1],
            version=service.metadata.resource_version if service is not None else None,
            slices={piece: held.version for piece, held in slices.items()},
            plans=plans,
            wanted=compiled.plans if waits else None,
            problems=compiled.problems,
            cause=cause(plans, slices.values()),
        )
