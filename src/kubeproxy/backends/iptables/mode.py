"""Operations of iptables mode: check of the node, construction of the backend, and the chains in use."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from contextlib import closing
from functools import cache, partial

from kubeproxy.backends import leftovers
from kubeproxy.backends.iptables.backend import ROUTE_LOCALNET, IptablesBackend
from kubeproxy.backends.iptables.contents import Contents, rule_count
from kubeproxy.backends.iptables.examine import IptablesExaminer, printed
from kubeproxy.backends.iptables.found import read_some
from kubeproxy.backends.iptables.metrics import Metrics, make_counters
from kubeproxy.backends.iptables.skeleton import CANARY, SHARED, RuleSettings, StartOptions
from kubeproxy.backends.mode import Operations, Weight
from kubeproxy.backends.state import Plans, of_family
from kubeproxy.config.modes import spelled_out
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.errors import ApplyError, KubeProxyError, Unsupported
from kubeproxy.kernel.proc.sysctl import TCP_BE_LIBERAL, read_sysctl
from kubeproxy.kernel.xtables import xtables
from kubeproxy.kernel.xtables.xtables import Commands, Incompatible
from kubeproxy.kernel.xtables.xtables_lock import LockHeldError, TableInfo
from kubeproxy.model.addresses import Family, parse_networks, within
from kubeproxy.model.plan import Globals
from kubeproxy.registry import MetricRegistry

log = logging.getLogger("kubeproxy.iptables")

OLDEST = (1, 6, 2)  # the first iptables version with iptables-restore -w
_INTERFACE = re.compile(r"[^\s\"'\\/!]{1,15}")  # IFNAMSIZ - 1 characters


def _check(config: KubeProxyConfiguration, families: Sequence[Family]) -> None:
    """Raise Unsupported, with the missing part and the remedy, if this node cannot run the mode. Raises ApplyError if
    the check fails temporarily."""
    _check_names(config)
    for family in families:
        commands = _commands(family)
        _check_version(commands)
        if not commands.uses_nft and _is_there(family, "nat"):
            continue
        try:
            if commands.rules("nat", "POSTROUTING") is None:
                raise ApplyError(f"{commands.name} -t nat -S POSTROUTING finds no such chain")
        except Incompatible:
            continue
        except LockHeldError:  # The family must stay enabled while another program holds the lock.
            raise
        except ApplyError as error:
            module = "nft_compat" if commands.uses_nft else "ip6table_nat" if family is Family.IPV6 else "iptable_nat"
            raise Unsupported(
                f"iptables does not work here ({error}): load the kernel module {module} (modprobe {module}), and give "
                "the process the capability CAP_NET_ADMIN"
            ) from error


def _is_there(family: Family, table: str) -> bool:
    """Return whether the kernel has a table of the legacy variant. The function takes no lock and loads no modules, so
    the result is False while the modules are not loaded."""
    try:
        with closing(TableInfo.open(family)) as asked:
            asked.info(table)
    except (ApplyError, OSError):
        return False
    return True


def _check_names(config: KubeProxyConfiguration) -> None:
    detect = config.detect_local
    names = {"BridgeInterface": detect.bridge_interface, "InterfaceNamePrefix": detect.interface_name_prefix}
    name = names.get(config.local_mode)
    if name is not None and not _INTERFACE.fullmatch(name):
        raise Unsupported(f"detectLocal: {name!r} cannot be named in an iptables rule; use 1 to 15 plain characters")


def _check_version(commands: Commands) -> None:
    if commands.version < OLDEST:
        found = ".".join(map(str, commands.version))
        raise Unsupported(
            f"iptables mode needs iptables 1.6.2 or later, and this is {found}: upgrade the package iptables"
        )


@cache
def _commands(family: Family) -> Commands:
    try:
        return xtables.variant_commands(family, xtables.chosen())
    except ApplyError as error:
        raise Unsupported(
            f"iptables is missing ({error}): install the package iptables (apt-get install iptables)"
        ) from error


def _open(config: KubeProxyConfiguration, world: Globals, registry: MetricRegistry) -> list[IptablesBackend]:
    metrics = Metrics(registry, world.families)
    options = StartOptions(config.iptables.localhost_node_ports, _is_liberal(), make_counters(metrics))
    backends = [IptablesBackend.open(_commands(family), world, options, metrics) for family in world.families]
    log.info("Using iptables variant=%s counters=%s", xtables.chosen() or "the only one", options.counters)
    return backends


def _examiner(config: KubeProxyConfiguration, world: Globals, family: Family) -> IptablesExaminer:
    commands = xtables.in_use(family, "mangle", CANARY)
    # A kernel can have the counters but not the nfacct match; then the proxy runs without counters.
    forward = "".join(read_some(commands, "filter", {"KUBE-FORWARD"}).rules.get("KUBE-FORWARD", ()))
    options = StartOptions(config.iptables.localhost_node_ports, _is_liberal(), "nfacct" in forward)
    return IptablesExaminer(commands, RuleSettings.of(family, world, options), partial(printed, commands))


def _is_liberal() -> bool:
    try:
        return read_sysctl(TCP_BE_LIBERAL) != "0"
    except KubeProxyError:
        return False


def _look(config: KubeProxyConfiguration, families: Sequence[Family]) -> None:
    """See Operations. Does not read rules, because reading would load modules."""
    _check_names(config)
    for family in families:
        there = xtables.installed_for(family)
        if not there:
            name = xtables.NAMES[family]
            raise Unsupported(f"{name} is missing: install the package iptables (apt-get install iptables)")
        _check_version(xtables.commands(there[0]))


def _names_loopback(nodeport_addresses: Iterable[str]) -> bool:
    addresses = spelled_out(nodeport_addresses)
    networks = parse_networks(addresses, Family.IPV4)
    if not networks:
        return "primary" not in addresses  # if the list has no IPv4 network, all IPv4 addresses are meant
    return within(b"\x7f\0\0\1", networks)


def _sysctls(config: KubeProxyConfiguration) -> list[tuple[str, int]]:
    wanted = config.iptables.localhost_node_ports and _names_loopback(config.node_port_addresses)
    return [(ROUTE_LOCALNET, 1)] if wanted else []


def _weigh(world: Globals, family: Family, wanted: Plans, local: Sequence[bytes]) -> Weight:  # noqa: ARG001
    settings = RuleSettings.of(family, world, StartOptions(False, False, False))
    contents = Contents(settings, of_family(wanted, family))
    rules = sum(map(rule_count, contents.own_chains()))
    rules += sum(block.count("\n") for place in SHARED for block in contents.shared(place).blocks)
    return Weight(rules, "rules")


OPERATIONS: Operations = Operations(
    _check,
    _look,
    _weigh,
    _open,
    lambda config, world, families: [_examiner(config, world, family) for family in families],
    sysctls=_sysctls,
    owns=lambda _, chain: chain not in leftovers.IPVS_CHAINS,
    commands=_commands,
    remove_displaced=lambda: leftovers.remove_iptables_rules(OPERATIONS.keeps),  # includes rules of ipvs mode
)
