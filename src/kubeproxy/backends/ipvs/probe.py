"""Can this node run ipvs mode? Loads what can be loaded, and says what is missing and how to get it."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from functools import cache
from typing import Final

from kubeproxy.backends.ipvs.chains import DROP_IN_NAT
from kubeproxy.backends.ipvs.layout import Scheduler, scheduler_named
from kubeproxy.config.fields import IPVS
from kubeproxy.errors import ApplyError, Unsupported
from kubeproxy.kernel.ipset import Ipsets
from kubeproxy.kernel.ipvs import (
    ADD_SERVICE,
    DELETE_SERVICE,
    SET_SERVICE,
    Ipvs,
    RefusedError,
    ServerChange,
    ServerKey,
    VirtualServer,
)
from kubeproxy.kernel.proc import modules
from kubeproxy.kernel.xtables import iptables_variant, xtables
from kubeproxy.model.addresses import Family

TEST_SERVER: Final = ServerKey(socket.AF_INET, socket.IPPROTO_TCP, bytes((198, 51, 100, 0)), 20000)
"""An address for documentation (RFC 5737), which nobody serves; kube-proxy tries with the same."""


def check(config: IPVS, families: Sequence[Family]) -> None:
    """Raise Unsupported when this node cannot run the mode."""
    modules.require(modules.ipvs_modules(modules.release()), "ipvs mode")
    with Ipvs.open() as kernel:
        _try_scheduler(kernel, scheduler_named(config.scheduler))
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


def look(config: IPVS, families: Sequence[Family]) -> None:
    """Look whether what the mode needs is there already. Raises Unsupported; loads and makes nothing."""
    scheduler = scheduler_named(config.scheduler)
    wanted = [*modules.ipvs_modules(modules.release()), f"ip_vs_{scheduler.name}", "ip_set"]
    missing = sorted(set(wanted) - modules.present(wanted))
    if missing:
        raise Unsupported(
            f"ipvs mode needs the kernel modules {', '.join(missing)}, which are not loaded: it loads them at its "
            f"start if it can; `modprobe -a {' '.join(missing)}` shows"
        )
    for family in families:
        if not xtables.installed_for(family):
            raise Unsupported(f"ipvs mode needs {xtables.NAMES[family]} for masquerade: install the package iptables")


def _try_scheduler(kernel: Ipvs, scheduler: Scheduler) -> None:
    """Make a virtual server with a scheduler, and remove it: nothing less tells whether the kernel has it."""
    module = f"ip_vs_{scheduler.name}"
    if not modules.present([module]):
        modules.load([module])
    server = VirtualServer(TEST_SERVER, scheduler.name, scheduler.flags)
    try:
        kernel.apply([ServerChange(ADD_SERVICE, server)])
    except RefusedError as error:
        code = error.refused[0][1].code
        if code == errno.EEXIST:  # left by one that was killed right here
            kernel.apply([ServerChange(SET_SERVICE, server)])
        elif code == errno.ENOENT:
            raise Unsupported(
                f"ipvs.scheduler: this kernel ({modules.release()}) has no scheduler {scheduler.name!r}: take another "
                f"one, or install its module {module}"
            ) from error
        else:
            raise
    kernel.apply([ServerChange(DELETE_SERVICE, server)])


TRIAL: Final = "\n".join(
    (
        "*nat",
        ":KUBE-IPVS-TRIAL - [0:0]",
        f"-A KUBE-IPVS-TRIAL {DROP_IN_NAT}",
        "-F KUBE-IPVS-TRIAL",
        "-X KUBE-IPVS-TRIAL",
        "COMMIT",
        "",
    )
)
"""With the one target of ours that a kernel with iptables may lack."""


@cache
def variant(family: Family) -> str:
    """Return the iptables to use: the one that the node uses, else one that works. Raises Unsupported, or ApplyError.

    It stays the same for a process's life.
    """
    used = iptables_variant.chosen()
    reasons: list[str] = []
    for command in sorted(xtables.installed_for(family), key=lambda command: not command.endswith(used)):
        try:
            # Nothing less than making something tells: without nf_tables iptables-nft-save prints nothing, and is fine.
            xtables.restore(command, TRIAL)
        except xtables.LockHeldError:  # nothing is missing
            raise
        except ApplyError as error:
            reasons.append(str(error))
        else:
            return command
    why = f" ({'; '.join(reasons)})" if reasons else ""
    raise Unsupported(f"ipvs mode needs {xtables.NAMES[family]} for masquerade{why}: install the package iptables")
