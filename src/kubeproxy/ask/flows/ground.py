"""The inputs of commands that read connection tracking: addresses of Services and of this node, and the mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from kubeproxy.ask.facts import Facts
from kubeproxy.ask.flows.owners import nodeport_addresses
from kubeproxy.ask.flows.users import ServedPorts
from kubeproxy.ask.source import Source, knowing
from kubeproxy.backends.mode import FlowsEnd, Mode
from kubeproxy.kernel.conntrack.tracked import Wanted
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import ServiceName
from kubeproxy.setup import host, modes


class Ground(NamedTuple):
    """The source of the answers, its mode, and this node's addresses."""

    source: Source
    facts: Facts
    mode: Mode
    local: Mapping[Family, Sequence[bytes]]

    @property
    def own(self) -> frozenset[bytes] | None:
        """Return this node's addresses if connections end at the proxy in this mode, else None."""
        return frozenset(chain(*self.local.values())) if self.mode.flows_end is FlowsEnd.PROXY else None

    @property
    def wanted(self) -> Wanted:
        """Return the filter for entries of connection tracking that may belong to Services."""
        return Wanted(self.mode.tracked_as, self.mode.tracked_as)

    def served(self, names: Sequence[ServiceName] = ()) -> ServedPorts:
        """Return the ports of these Services, or of all, as the kernel has them. Raises KubeProxyError."""
        held = self.source.services(names)
        families = ((family, self.facts.world.of(family)) for family in self.facts.world.families)
        asked = {family: ours.nodeport_ips if ours is not None else () for family, ours in families}
        return ServedPorts((plan for one in held for plan in one.plans), nodeport_addresses(asked, self.local))


def ground(source: Source) -> Ground:
    """Return the facts of a source, with this node's addresses. Raises KubeProxyError."""
    facts = knowing(source)
    local = host.packed_local_addresses(facts.world.families, modes.interfaces())
    return Ground(source, facts, modes.named(facts.mode), local)
