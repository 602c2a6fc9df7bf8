"""What is known of this node's Services, for commands: from a running proxy, or from objects read for one question."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from kubeproxy.api.source import Reach
from kubeproxy.ask.facts import Facts, Objects, ProgrammedService
from kubeproxy.ask.question import packet
from kubeproxy.ask.snapshot import Subject
from kubeproxy.ask.state import ProgrammedState, unwatched
from kubeproxy.ask.state_query import Query
from kubeproxy.ask.why import Explained, explain
from kubeproxy.config.options import Options
from kubeproxy.config.write import describe
from kubeproxy.errors import QuestionError
from kubeproxy.model.plan import NOTHING, FrontendKind, ServiceName
from kubeproxy.release import build

_PROPOSED = 1000
"""Services that a shell shows at most."""


class Desk:
    """Answers questions. `state` is what /debug/state shows, `reach` how the API server is reached; `started` is since
    the epoch.
    """

    running: Final = False
    """Whether a proxy is asked that runs here, so that the kernel should have what it says."""

    def __init__(
        self,
        options: Options,
        subject: Subject,
        state: ProgrammedState,
        reach: Callable[[], Reach | None],
        started: float,
    ) -> None:
        self.state = state
        self._options = options
        self._subject = subject
        self._kernel = state.kernel
        self._reach = reach
        self._started = started

    def facts(self) -> Facts:
        """Return what holds for the whole proxy."""
        planner, options = self._subject.planner, self._options
        return Facts(
            version=build(),
            pid=os.getpid(),
            started=self._started,
            mode=self._subject.mode.name,
            config_file=options.config_file,
            master=options.master,
            manifests=options.manifests,
            config=describe(options.config),
            world=planner.world,
            standings=self._kernel.standings(),
            unready=self.state.health.unready(),
            listed=planner.complete,
            services=len(planner.services),
            endpoint_slices=planner.objects.endpoints,
            pending=len(self._kernel.queued()) + planner.dirty,
            reach=self._reach(),
            node=planner.nodes.get(planner.world.node_name),
        )

    def has_node_ports(self) -> bool:
        """Return whether any Service has a NodePort; all of them are looked at for it."""
        return any(
            frontend.kind is FrontendKind.NODEPORT
            for compiled in self._subject.planner.compiled.values()
            for plan in compiled.plans
            for frontend in plan.frontends
        )

    def why(self, source: str, target: str, interface: str = "") -> Explained:
        """Return what becomes of a connection; see ask.question for the texts. Raises QuestionError."""
        return explain(self._subject, packet(self._subject, source, target, interface))

    def services(self, names: Sequence[ServiceName] = ()) -> Iterator[ProgrammedService]:
        """Yield those of these Services that are known, all when none is named."""
        return (held for name in names or self.names if (held := self._service(name)) is not None)

    def service(self, name: ServiceName) -> dict[str, Any]:
        """Return all of a Service, as /debug/state has it. Raises QuestionError when it is unknown."""
        made = self.state.service(name)
        if made is None:
            raise QuestionError(unwatched(name))
        return made

    @property
    def watched(self) -> list[ServiceName]:
        """All Services that there are, or that slices name."""
        planner = self._subject.planner
        return list({**planner.services, **planner.slices})

    def objects(self, names: Sequence[ServiceName] = ()) -> Iterator[Objects]:
        """Yield what the plans of these Services are made of, of all when none is named."""
        planner, names = self._subject.planner, names or self.watched
        return (Objects(name, planner.services.get(name), planner.slices.get(name, {})) for name in names)

    @property
    def names(self) -> list[ServiceName]:
        """All Services, those included that are gone while their rules are not."""
        return list({**self._subject.planner.services, **self._kernel.queued()})

    def has_address(self, name: ServiceName, address: bytes) -> bool:
        """Return whether a Service has a packed address, of a frontend or of an endpoint, ready or not."""
        return Query(address=address).finds(self._subject.planner, name)

    def beginning(self, prefix: str) -> list[str]:
        """Return the Services that begin with a text, as NAMESPACE/NAME; with a colon in it that Service's ports."""
        name, colon, port = prefix.partition(":")
        if not colon:
            found = (f"{space}/{name}" for space, name in self._subject.planner.services)
            return sorted(one for one in found if one.startswith(prefix))[:_PROPOSED]
        space, _, own = name.partition("/")
        compiled = self._subject.planner.compiled.get((space, own), NOTHING)
        ports = {one.port_text.lower().removesuffix("/tcp") for plan in compiled.plans for one in plan.frontends}
        return [f"{name}:{one}" for one in sorted(ports) if one.startswith(port)]

    def _service(self, name: ServiceName) -> ProgrammedService | None:
        planner, queued = self._subject.planner, self._kernel.queued()
        service, compiled = planner.services.get(name), planner.compiled.get(name, NOTHING)
        verdict = self.state.verdict(name)
        if verdict is None:
            return None
        waits = name in queued or planner.is_dirty(name)
        return ProgrammedService(
            name=name,
            state=verdict[0],
            reason=verdict[1],
            version=service.metadata.resource_version if service is not None else None,
            slices={piece: held.version for piece, held in planner.slices.get(name, {}).items()},
            plans=tuple(self._kernel.committed(name)),
            wanted=compiled.plans if waits else None,
            health=compiled.health,
            problems=compiled.problems,
        )
