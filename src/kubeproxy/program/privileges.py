"""Capabilities of the running process: those that are not needed after the start are dropped.

Modules are loaded, sysctls, limits and the OOM score are set before. docs/operating.md has a table of the capabilities
that are kept, with the reasons.
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
    """The needs of the running process that decide its capabilities.

    `legacy` are the commands of legacy iptables on this node, `others_files` the files to be read again that need a
    capability, `plugin` is the program that makes credentials, '' for none.
    """

    legacy: tuple[str, ...] = ()
    others_files: tuple[str, ...] = ()
    plugin: str = ""


def needed(needs: Needs) -> frozenset[Capability]:
    """Return the capabilities to keep, in any mode.

    CAP_NET_ADMIN is for rules, sets, servers, addresses, marks and the network's sysctls, CAP_NET_BIND_SERVICE for
    ports below 1024, which a new Service may need (health checks, relayed NodePorts).
    """
    wanted = {Capability.NET_ADMIN, Capability.NET_BIND_SERVICE}
    if needs.legacy:
        wanted.add(Capability.NET_RAW)
    if needs.others_files or needs.plugin:
        wanted.add(Capability.DAC_READ_SEARCH)
    return frozenset(wanted)


def give_up(files: Iterable[str], plugin: str) -> None:
    """Drop the capabilities that are not needed, also for child processes. A failure is logged.

    `files` are read again later; `plugin` is the program that makes credentials, '' for none. A plugin with rights of
    its own (set-user-ID, capabilities) would lose them: then nothing is dropped.
    """
    path = shutil.which(plugin) or plugin if plugin else ""
    if path and gives_rights(path):
        log.warning("Keeping all capabilities: the credential plugin would lose rights of its own plugin=%s", path)
        return
    try:
        wanted = needed(Needs(_legacy_commands(), tuple(beyond_permission([*files, *_program()])), path))
        keep_only(wanted)
        forbid_new_privileges()
    except ApplyError as error:
        log.warning("Running with more rights than are needed: %s", error)
        return
    log.info("Dropped all capabilities that are not needed kept=%s", ",".join(one.label for one in sorted(held())))


def _legacy_commands() -> tuple[str, ...]:
    """Return the commands of iptables' legacy variant, which open a raw socket."""
    return tuple(name for name in xtables.installed() if name.endswith("-legacy") or _is_legacy(name))


def _is_legacy(name: str) -> bool:
    try:
        return not name.endswith("-nft") and not xtables.commands(name).uses_nft
    except ApplyError:
        return True


def _program() -> tuple[str, ...]:
    """Return files of this program and of Python, as modules are loaded later."""
    return (str(Path(kubeproxy.__file__)), os.__file__)
