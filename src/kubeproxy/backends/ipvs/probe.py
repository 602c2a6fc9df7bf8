"""Can this node run ipvs mode? Loads what can be loaded, and says what is missing and how to get it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final

from kubeproxy.backends.ipvs.layout import DEFAULT_SCHEDULER, SCHEDULERS, Scheduler
from kubeproxy.config.modes.ipvs import IPVS
from kubeproxy.errors import ApplyError, ConfigError, Unsupported
from kubeproxy.kernel import iptables_variant, modules, xtables
from kubeproxy.kernel.ipset import Ipsets
from kubeproxy.kernel.ipvs import Ipvs
from kubeproxy.model.addresses import Family


def scheduler_of(config: IPVS) -> Scheduler:
    """Return the configured scheduler. Raises ConfigError for one that there is not."""
    name = config.scheduler or DEFAULT_SCHEDULER
    if name not in SCHEDULERS:
        raise ConfigError(f"ipvs.scheduler: there is no {name!r}; use one of {', '.join(sorted(SCHEDULERS))}")
    return SCHEDULERS[name]


def check(config: IPVS, families: Sequence[Family]) -> None:
    """Raise Unsupported when this node cannot run the mode."""
    scheduler = scheduler_of(config)
    modules.require(modules.ipvs_modules(scheduler.name, modules.release()), "ipvs mode")
    Ipvs.open().close()
    try:
        with Ipsets.open() as sets:
            sets.counts()
    except ApplyError as error:
        raise Unsupported(
            f"ipvs mode needs ip sets ({error}): load the kernel module ip_set (modprobe ip_set), and give the process "
            "the capability CAP_NET_ADMIN"
        ) from error
    for family in families:
        variant(family)


TRIAL: Final = "*filter\n:KUBE-IPVS-TRIAL - [0:0]\n-X KUBE-IPVS-TRIAL\nCOMMIT\n"


@cache
def variant(family: Family) -> str:
    """Return the iptables to use: the one that the node uses, else one that works. Raises Unsupported.

    It stays the same for a process's life.
    """
    name = "iptables" if family is Family.IPV4 else "ip6tables"
    ours = [command for command in xtables.installed() if command.split("-", 1)[0] == name]
    used = iptables_variant.chosen()
    reasons: list[str] = []
    for command in sorted(ours, key=lambda command: not command.endswith(used)):
        try:
            # Nothing less than making something tells: without nf_tables iptables-nft-save prints nothing, and is fine.
            xtables.restore(command, TRIAL)
        except ApplyError as error:
            reasons.append(str(error))
        else:
            return command
    why = f" ({'; '.join(reasons)})" if reasons else ""
    raise Unsupported(f"ipvs mode needs {name} for masquerade{why}: install the package iptables")
