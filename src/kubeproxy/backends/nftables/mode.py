"""nftables mode when it runs: can this node run it, opening it."""

from __future__ import annotations

from collections.abc import Sequence

from kubeproxy.backends.mode import Operations, Registry
from kubeproxy.backends.nftables import probe
from kubeproxy.backends.nftables.backend import NftablesBackend
from kubeproxy.backends.nftables.table import KernelTable
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import Globals


def _check(config: KubeProxyConfiguration, families: Sequence[Family]) -> None:  # noqa: ARG001 - needs neither
    probe.check()


def _open(config: KubeProxyConfiguration, world: Globals, registry: Registry) -> list[NftablesBackend]:  # noqa: ARG001
    return [NftablesBackend(KernelTable.open(family), world) for family in world.families]


OPERATIONS = Operations(_check, _open)
