"""Operations of ipvs mode: checks of the node, kernel parameters, and construction of backends and examiners."""

from __future__ import annotations

import errno
import logging
import math
import socket
from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Final

from kubeproxy.backends.ipvs.backend import IpvsBackend, node_of
from kubeproxy.backends.ipvs.desired import render
from kubeproxy.backends.ipvs.examine import IpvsExaminer
from kubeproxy.backends.ipvs.layout import CHAINS, DROP_IN_NAT, OWN_CHAIN, Addresses, Scheduler, scheduler_named
from kubeproxy.backends.ipvs.wire import NodeKernel, NodeView
from kubeproxy.backends.mode import RESTORE_FAILURES, Operations, Weight
from kubeproxy.backends.state import Plans, of_family
from kubeproxy.config.fields import IPVS
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.errors import ApplyError, Unsupported
from kubeproxy.kernel import ipvs
from kubeproxy.kernel.ipset import Ipsets
from kubeproxy.kernel.netlink.protocol import RefusedError
from kubeproxy.kernel.proc import modules
from kubeproxy.kernel.proc.sysctl import apply_settings
from kubeproxy.kernel.xtables import xtables
from kubeproxy.kernel.xtables.xtables import Commands
from kubeproxy.kernel.xtables.xtables_lock import LockHeldError
from kubeproxy.model.addresses import Family, Range, merge_ranges, parse_networks
from kubeproxy.model.plan import FamilyGlobals, Globals
from kubeproxy.registry import MetricRegistry

log = logging.getLogger("kubeproxy.ipvs")

SYSCTLS: Final = (
    ("net/ipv4/vs/conntrack", 1),  # otherwise packets of IPVS cannot be masqueraded
    ("net/ipv4/vs/expire_nodest_conn", 1),
    ("net/ipv4/vs/expire_quiescent_template", 1),
    ("net/ipv4/ip_forward", 1),
)
STRICT_ARP: Final = (("net/ipv4/conf/all/arp_ignore", 1), ("net/ipv4/conf/all/arp_announce", 2))

CONN_REUSE: Final = ("net/ipv4/vs/conn_reuse_mode", 0)
CONN_REUSE_FIXED: Final = (5, 9)
"""First Linux without a delay of 1 s after a client reuses a port (kubernetes issue 93297, Linux f0a5e4d7a594)."""


def settings(config: IPVS, kernel: tuple[int, int]) -> list[tuple[str, int]]:
    """Return the sysctls that the mode needs on a kernel version, in the order of writing."""
    wanted = list(SYSCTLS)
    if kernel < CONN_REUSE_FIXED:
        wanted.append(CONN_REUSE)
    if config.strict_arp:
        wanted += STRICT_ARP
    return wanted


def excluded(config: IPVS, family: Family) -> tuple[Range, ...]:
    """Return the networks in which virtual servers belong to other programs (excludeCIDRs)."""
    return merge_ranges(parse_networks(config.exclude_cidrs, family))


TEST_SERVER: Final = ipvs.server_key(bytes((198, 51, 100, 0)), socket.IPPROTO_TCP, 20000)
"""An unused address for documentation (RFC 5737); the Go kube-proxy tests IPVS with the same address."""


def _check(config: KubeProxyConfiguration, families: Sequence[Family]) -> None:
    modules.require(modules.ipvs_modules(modules.release()), "ipvs mode")
    with ipvs.Ipvs.open() as kernel:
        _try_scheduler(kernel, scheduler_named(config.ipvs.scheduler))
    try:
        with Ipsets.open() as sets:
            sets.counts()
    except ApplyError as error:
        raise Unsupported(
            f"ipvs mode needs ip sets ({error}): load the kernel module ip_set (modprobe ip_set), and give the process "
            "the capability CAP_NET_ADMIN"
        ) from error
    for family in families:
        used_commands(family)


def _look(config: KubeProxyConfiguration, families: Sequence[Family]) -> None:
    scheduler = scheduler_named(config.ipvs.scheduler)
    wanted = [*modules.ipvs_modules(modules.release()), f"ip_vs_{scheduler.name}", "ip_set"]
    missing = sorted(set(wanted) - modules.present(wanted))
    if missing:
        raise Unsupported(
            f"ipvs mode needs the kernel modules {', '.join(missing)}, which are not loaded; the proxy "
            f"tries to load them at its start: `modprobe -a {' '.join(missing)}` shows whether this works"
        )
    for family in families:
        if not xtables.installed_for(family):
            raise Unsupported(f"ipvs mode needs {xtables.NAMES[family]} for masquerade: install the package iptables")


def _try_scheduler(kernel: ipvs.Ipvs, scheduler: Scheduler) -> None:
    """Create and remove a virtual server with a scheduler. The kernel offers no other check of schedulers."""
    module = f"ip_vs_{scheduler.name}"
    if not modules.present([module]):
        modules.load([module])
    server = scheduler.server(TEST_SERVER)
    try:
        kernel.apply([ipvs.ServerChange(ipvs.Verb.ADD_SERVICE, server)])
    except RefusedError as error:
        code = error.refused[0][1].code
        if code == errno.EEXIST:  # a proxy that was killed at this point left this virtual server
            kernel.apply([ipvs.ServerChange(ipvs.Verb.SET_SERVICE, server)])
        elif code == errno.ENOENT:
            raise Unsupported(
                f"ipvs.scheduler: this kernel ({modules.release()}) has no scheduler {scheduler.name!r}: take another "
                f"one, or install its module {module}"
            ) from error
        else:
            raise
    kernel.apply([ipvs.ServerChange(ipvs.Verb.DELETE_SERVICE, server)])


TRIAL: Final = f"""\
*nat
:KUBE-IPVS-TRIAL - [0:0]
-A KUBE-IPVS-TRIAL {DROP_IN_NAT}
-F KUBE-IPVS-TRIAL
-X KUBE-IPVS-TRIAL
COMMIT
"""
"""The test rule uses NFQUEUE, the only target of our rules that a kernel with iptables may lack."""


@cache
def used_commands(family: Family) -> Commands:
    """Return the iptables commands of the node's variant, else of a variant that works. The result is cached. Raises
    Unsupported, or ApplyError."""
    used = xtables.chosen()
    reasons: list[str] = []
    for name in sorted(xtables.installed_for(family), key=lambda name: not name.endswith(used)):
        try:
            commands = xtables.commands(name)
            # Only a write proves that a variant works: if nf_tables is missing, iptables-nft-save succeeds and prints
            # nothing.
            commands.restore([TRIAL])
        except LockHeldError:  # the command works
            raise
        except ApplyError as error:
            reasons.append(str(error))
        else:
            return commands
    why = f" ({'; '.join(reasons)})" if reasons else ""
    raise Unsupported(f"ipvs mode needs {xtables.NAMES[family]} for masquerade{why}: install the package iptables")


def _prepare(config: KubeProxyConfiguration) -> None:
    block = config.ipvs
    written = apply_settings(_sysctls(config))
    if written:
        log.info("Set sysctls keys=%s", ",".join(written))
    timeouts = ipvs.Timeouts(*(math.ceil(t) for t in (block.tcp_timeout, block.tcp_fin_timeout, block.udp_timeout)))
    if any(timeouts):
        with ipvs.Ipvs.open() as kernel:
            kernel.set_timeouts(timeouts)


def _open(config: KubeProxyConfiguration, world: Globals, registry: MetricRegistry) -> list[IpvsBackend]:
    block, scheduler = config.ipvs, scheduler_named(config.ipvs.scheduler)
    failures = registry.counter(RESTORE_FAILURES.name, RESTORE_FAILURES.text, "ip_family")
    return [
        IpvsBackend(
            family,
            world,
            NodeKernel.open(used_commands(family), failures.labels(family.label)),
            scheduler,
            excluded(block, family),
        )
        for family in world.families
    ]


def _examiner(config: KubeProxyConfiguration, world: Globals, family: Family) -> IpvsExaminer:
    view = NodeView.look(xtables.in_use(family, "filter", OWN_CHAIN))
    return IpvsExaminer(view, world, scheduler_named(config.ipvs.scheduler), excluded(config.ipvs, family))


def _sysctls(config: KubeProxyConfiguration) -> list[tuple[str, int]]:
    return settings(config.ipvs, modules.kernel_version(modules.release()))


def _weigh(world: Globals, family: Family, wanted: Plans, local: Sequence[bytes]) -> Weight:
    node = node_of(world.of(family) or FamilyGlobals(), Addresses(frozenset(), frozenset(local)))
    objects = render(chain.from_iterable(of_family(wanted, family).values()), node)
    count = sum(1 + len(server.pool) for server in objects.servers.values()) + sum(map(len, objects.entries.values()))
    return Weight(count, "virtual servers, real servers and entries of sets")


OPERATIONS = Operations(
    _check,
    _look,
    _weigh,
    _open,
    lambda config, world, families: [_examiner(config, world, family) for family in families],
    _prepare,
    _sysctls,
    owns=lambda table, chain: chain in CHAINS.get(table, ()),
    commands=used_commands,
)
