"""What the process may do once it runs: whoever starts as root gives up what is only needed at the start, or never.

Modules are loaded, sysctls, limits and the OOM score are set by then. How it is done is in kernel/capability.py;
docs/operating.md has the table of what is kept and why.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import kubeproxy
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.proc.capability import (
    Capability,
    beyond_permission,
    forbid_new_privileges,
    gives_rights,
    held,
    keep_only,
)
from kubeproxy.kernel.xtables import xtables

log = logging.getLogger("kubeproxy.privileges")


class Needs(NamedTuple):
    """What decides which capabilities are kept.

    `legacy` are the commands of legacy iptables on this node, `others_files` the files that are read again and that
    only a capability opens, `plugin` is the program that makes credentials, '' for none.
    """

    legacy: tuple[str, ...] = ()
    others_files: tuple[str, ...] = ()
    plugin: str = ""


def needed(needs: Needs) -> frozenset[Capability]:
    """Return what is needed while it runs, in any mode.

    Rules, sets, servers, addresses, marks and the sysctls of the network want CAP_NET_ADMIN. Ports below 1024 may be
    asked for by any Service that comes (health checks, relayed NodePorts), so CAP_NET_BIND_SERVICE stays as well.
    """
    wanted = {Capability.NET_ADMIN, Capability.NET_BIND_SERVICE}
    if needs.legacy:
        wanted.add(Capability.NET_RAW)
    if needs.others_files or needs.plugin:
        wanted.add(Capability.DAC_READ_SEARCH)
    return frozenset(wanted)


def give_up(files: Iterable[str], plugin: str) -> None:
    """Keep what is needed, and let no child have more. A failure is logged, and stops nothing.

    `files` are those that are read again, `plugin` is the program that makes credentials, '' for none. One with rights
    of its own (set-user-ID, capabilities) would not have them any more: then nothing is given up.
    """
    path = shutil.which(plugin) or plugin if plugin else ""
    if path and gives_rights(path):
        log.warning(
            "Keeping all capabilities: the credential plugin has rights of its own, which it would lose plugin=%s", path
        )
        return
    try:
        wanted = needed(Needs(_legacy_commands(), tuple(beyond_permission([*files, *_program()])), path))
        keep_only(wanted)
        forbid_new_privileges()
    except ApplyError as error:
        log.warning("Running with more rights than are needed: %s", error)
        return
    log.info(
        "Gave up all capabilities but those that are needed kept=%s", ",".join(one.label for one in sorted(held()))
    )


def _legacy_commands() -> tuple[str, ...]:
    """Return the commands of iptables that open a raw socket: those of the legacy variant."""
    return tuple(name for name in xtables.installed() if name.endswith("-legacy") or _is_legacy(name))


def _is_legacy(name: str) -> bool:
    try:
        return not name.endswith("-nft") and not xtables.commands(name).uses_nft
    except ApplyError:
        return True


def _program() -> tuple[str, ...]:
    """Return files of this program, of which parts are loaded late."""
    return (str(Path(kubeproxy.__file__)), os.__file__)
