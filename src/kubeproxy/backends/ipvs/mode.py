"""ipvs mode when it runs: can this node run it, its kernel parameters, opening it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Final

from kubeproxy.backends.ipvs import probe
from kubeproxy.backends.ipvs.backend import IpvsBackend
from kubeproxy.backends.ipvs.chains import CHAINS, OWN_CHAIN
from kubeproxy.backends.ipvs.examine import IpvsExaminer
from kubeproxy.backends.ipvs.layout import scheduler_named
from kubeproxy.backends.ipvs.render import NodeAddresses, render
from kubeproxy.backends.ipvs.wire import NodeKernel, NodeView, printer
from kubeproxy.backends.mode import RESTORE_FAILURES, Operations, Registry, Weight
from kubeproxy.config.fields import IPVS
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.kernel.ipvs import Ipvs, Timeouts
from kubeproxy.kernel.proc import modules
from kubeproxy.kernel.proc.sysctl import apply_settings
from kubeproxy.kernel.xtables import iptables_variant, xtables
from kubeproxy.kernel.xtables.xtables import Commands
from kubeproxy.model.addresses import Family, Range, merge_ranges, parse_networks
from kubeproxy.model.plan import FamilyGlobals, Globals, ServiceName, ServicePlan

log = logging.getLogger("kubeproxy.ipvs")

SYSCTLS: Final = (
    ("net/ipv4/vs/conntrack", 1),  # else the packets of ipvs cannot be masqueraded
    ("net/ipv4/vs/expire_nodest_conn", 1),
    ("net/ipv4/vs/expire_quiescent_template", 1),
    ("net/ipv4/ip_forward", 1),
)
STRICT_ARP: Final = (("net/ipv4/conf/all/arp_ignore", 1), ("net/ipv4/conf/all/arp_announce", 2))

CONN_REUSE: Final = ("net/ipv4/vs/conn_reuse_mode", 0)
CONN_REUSE_FIXED: Final = (5, 9)
"""From here on a reused client port costs no second of waiting (kubernetes issue 93297, Linux f0a5e4d7a594)."""


def settings(config: IPVS, kernel: tuple[int, int]) -> list[tuple[str, int]]:
    """Return the sysctls that the mode needs on a kernel of a version, in order."""
    wanted = list(SYSCTLS)
    if kernel < CONN_REUSE_FIXED:
        wanted.append(CONN_REUSE)
    if config.strict_arp:
        wanted += STRICT_ARP
    return wanted


def excluded(config: IPVS, family: Family) -> tuple[Range, ...]:
    """Return the networks whose virtual servers are other programs'."""
    return merge_ranges(parse_networks(config.exclude_cidrs, family))


def _check(config: KubeProxyConfiguration, families: Sequence[Family]) -> None:
    probe.check(config.ipvs, families)


def _prepare(config: KubeProxyConfiguration) -> None:
    block = config.ipvs
    written = apply_settings(_sysctls(config))
    if written:
        log.info("Set sysctls keys=%s", ",".join(written))
    timeouts = Timeouts(*(math.ceil(t) for t in (block.tcp_timeout, block.tcp_fin_timeout, block.udp_timeout)))
    if any(timeouts):
        with Ipvs.open() as kernel:
            kernel.set_timeouts(timeouts)


def _open(config: KubeProxyConfiguration, world: Globals, registry: Registry) -> list[IpvsBackend]:
    block, scheduler = config.ipvs, scheduler_named(config.ipvs.scheduler)
    failures = registry.counter(RESTORE_FAILURES.name, RESTORE_FAILURES.text, "ip_family")
    return [
        IpvsBackend(
            family,
            world,
            NodeKernel.open(family, scheduler, probe.variant(family), failures.labels(family.label)),
            scheduler,
            excluded(block, family),
        )
        for family in world.families
    ]


def _in_use(family: Family) -> str:
    """Return the iptables that has our rules, else the one that this node uses: nothing is tried out."""
    for command in xtables.installed_for(family):
        if any(OWN_CHAIN in table.chains for table in xtables.tables(command)):
            return command
    name, used = xtables.NAMES[family], iptables_variant.chosen()
    return f"{name}-{used}" if used else name


def _examine(config: KubeProxyConfiguration, world: Globals, families: Sequence[Family]) -> list[IpvsExaminer]:
    return [_examiner(config, world, family) for family in families]


def _examiner(config: KubeProxyConfiguration, world: Globals, family: Family) -> IpvsExaminer:
    scheduler, command = scheduler_named(config.ipvs.scheduler), _in_use(family)
    view = NodeView.look(family, scheduler, command)
    return IpvsExaminer(family, view, world, scheduler, excluded(config.ipvs, family), printer(family, command))


def _keeps(commands: Commands, table: str, chain: str) -> bool:
    """Return whether a chain is ours: in a table where we have it, of the variant that we use."""
    return chain in CHAINS.get(table, ()) and commands.name == probe.variant(commands.family)


def _look(config: KubeProxyConfiguration, families: Sequence[Family]) -> None:
    probe.look(config.ipvs, families)


def _sysctls(config: KubeProxyConfiguration) -> list[tuple[str, int]]:
    return settings(config.ipvs, modules.kernel_version(modules.release()))


def _weigh(
    world: Globals, family: Family, wanted: Mapping[ServiceName, tuple[ServicePlan, ...]], local: Sequence[bytes]
) -> Weight:
    """See backends.mode.Weigh."""
    ours = world.of(family) or FamilyGlobals()
    nodeports = tuple(local) if ours.nodeport_ips is None else ours.nodeport_ips
    node = NodeAddresses(frozenset(local), nodeports, ours.node_ips)
    wish = render((plan for plans in wanted.values() for plan in plans if plan.key.family is family), node)
    count = sum(1 + len(server.pool) for server in wish.servers.values()) + sum(map(len, wish.entries.values()))
    return Weight(count, "virtual servers, real servers and entries of sets")


OPERATIONS = Operations(
    _check,
    _look,
    _weigh,
    _open,
    _examine,
    _prepare,
    _sysctls,
    _keeps,
    owns=lambda table, chain: chain in CHAINS.get(table, ()),
)
