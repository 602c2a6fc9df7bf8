"""The question of `kube-proxy verify`: API server, plan and kernel compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from kubeproxy.ask.facts import Facts
from kubeproxy.ask.kernel.looks import Seen, examiners, look
from kubeproxy.ask.snapshot import unwatched
from kubeproxy.ask.source import Source, knowing
from kubeproxy.backends.state import Finding
from kubeproxy.errors import KubeProxyError, NoAnswerError
from kubeproxy.model.plan import ServiceName
from kubeproxy.release import SAME_BUILD, build


class Report(Struct, frozen=True):
    """Differences between kernel and plans, outdated objects of the proxy, and other problems as sentences."""

    facts: Facts
    seen: Seen
    behind: Sequence[Finding]
    troubles: Sequence[str]

    @property
    def differs(self) -> bool:
        """Whether anything differs."""
        return bool(self.seen.findings or self.behind)

    def is_complete(self, names: Sequence[ServiceName]) -> bool:
        """Return whether all of the Services could be compared."""
        return not ((names and self.seen.on_their_way) or self.troubles or self.seen.restless)

    def fields(self) -> dict[str, object]:
        """Return it for programs."""
        seen = self.seen
        return {
            "mode": self.facts.mode,
            "services": seen.services,
            "findings": [finding._asdict() for finding in seen.findings],
            "behind": [finding._asdict() for finding in self.behind],
            "onTheirWay": ["/".join(name) for name in seen.on_their_way],
            "restless": ["/".join(name) for name in seen.restless],
            "caveats": seen.caveats,
            "troubles": self.troubles,
        }


def verify(asked: Source, names: Sequence[ServiceName], *, api: bool) -> Report:
    """Compare these Services, or all; `api`: also compare all versions with the API server. Raises KubeProxyError."""
    facts = asked.facts()
    if asked.running and facts.version != build().name:
        raise KubeProxyError(
            f"the proxy runs version {facts.version}, this command is {build().name}: each has a layout of rules of "
            f"its own, so nothing was compared; {SAME_BUILD}"
        )
    knowing(asked)
    with examiners(facts, facts.world.families) as kernel:
        seen = look(asked.services, kernel, names)
    troubles = [*_troubles(facts)]
    if names and not seen.services:
        troubles.append(unwatched(names[0]))
    behind: list[Finding] = []
    if asked.running and not facts.manifests and (names or api):
        from kubeproxy.ask import cluster  # noqa: PLC0415 - it loads modules that a look at the kernel does without

        try:
            behind = cluster.behind(asked.services, facts, names)
        except NoAnswerError as error:
            troubles.append(str(error))
    return Report(facts, seen, behind, troubles)


def _troubles(facts: Facts) -> Iterator[str]:
    """Yield the problems that the proxy itself reports."""
    for part, why in facts.unready.items():
        yield f"the proxy is not ready, {part}: {why}"
    for one in facts.standings:
        if one.refusal:
            yield f"the kernel refuses the {one.family.label} changes: {one.refusal}"
        if one.difference:
            yield f"the proxy is repairing ({one.family.label}): {one.difference}"
