"""Operations of userspace mode: check of the node, and construction of the backends."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from itertools import chain, product
from typing import Final

from kubeproxy.backends.mode import Operations, Weight
from kubeproxy.backends.relay.datapath import SWITCH_INTERVAL, DataPath
from kubeproxy.backends.state import Plans, of_family
from kubeproxy.backends.table_view import TableView
from kubeproxy.backends.userspace.backend import UserspaceBackend, landing_of, reachable_addresses
from kubeproxy.backends.userspace.examine import UserspaceExaminer
from kubeproxy.backends.userspace.listeners import ListenerName, Listeners, PoolKind
from kubeproxy.backends.userspace.ruleset import FIREWALL_ALLOW, TABLE, UserspaceRuleset, elements, merged
from kubeproxy.backends.userspace.udp import Sessions
from kubeproxy.config.modes import parse_port_range
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.kernel.netlink.protocol import Netlink
from kubeproxy.kernel.nftables.messages import require
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import Globals
from kubeproxy.registry import MetricRegistry

KERNEL: Final = (5, 9)  # minimum Linux version: reject in prerouting


def _check(config: KubeProxyConfiguration, families: Sequence[Family]) -> None:  # noqa: ARG001 - needs neither
    require("userspace", KERNEL, "upgrade")


def _open(config: KubeProxyConfiguration, world: Globals, registry: MetricRegistry) -> list[UserspaceBackend]:  # noqa: ARG001
    sys.setswitchinterval(SWITCH_INTERVAL)
    path = DataPath.open(config.udp_idle_timeout)
    path.mark = world.masquerade_mark
    ports, sessions = parse_port_range(config.port_range) or range(0), Sessions(path)
    return [UserspaceBackend.open(family, world, path, Listeners(path, sessions, ports)) for family in world.families]


def _examine(config: KubeProxyConfiguration, world: Globals, families: Sequence[Family]) -> list[UserspaceExaminer]:  # noqa: ARG001
    # One socket for all requests: closing a socket delays the proxy's next transaction (nft_rcv_nl_event).
    link = Netlink.open()
    landings = [landing_of(world, family, reachable_addresses(family)) for family in families]
    return [
        UserspaceExaminer(TableView(family, TABLE, {FIREWALL_ALLOW}, link), UserspaceRuleset(family, world, landing))
        for family, landing in zip(families, landings, strict=True)
    ]


def _weigh(world: Globals, family: Family, wanted: Plans, local: Sequence[bytes]) -> Weight:  # noqa: ARG001
    own = list(chain.from_iterable(of_family(wanted, family).values()))
    ports = {
        ListenerName(plan.key, kind): None if plan.key.protocol == socket.IPPROTO_SCTP else number % 0xFFFF + 1
        for number, (plan, kind) in enumerate(product(own, PoolKind))
    }
    all_of = merged(elements(plan, ports) for plan in own)
    return Weight(sum(map(len, all_of.values())), "elements")


OPERATIONS = Operations(_check, _check, _weigh, _open, _examine)
