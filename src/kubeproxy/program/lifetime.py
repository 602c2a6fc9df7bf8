"""Runs the program's tasks until the program ends, handles signals, postpones garbage collection, and drops
capabilities. The program ends when a task fails, when it is stopped, or by a signal; a second signal ends the program
immediately. The unneeded capabilities are dropped after the start; a table in docs/operating.md gives the reasons for
the capabilities that are kept."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shutil
import signal
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

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

log = logging.getLogger("kubeproxy.app")


FIRST_SYNC_SECONDS = 300.0
"""Seconds after which garbage collection starts even without a first sync, because failures create reference cycles."""


def postpone_garbage_collection() -> None:
    """Turn the garbage collector off until `resume_garbage_collection`, and set its threshold to 50,000 new containers
    instead of 700. Searching the objects of the first sync, which have no cycles, would take a tenth of the first
    sync's time."""
    gc.set_threshold(50_000, 20, 50)
    gc.disable()


async def resume_garbage_collection(ready: asyncio.Event) -> None:
    """Wait for the first sync; exempt the existing objects from collection, and turn the garbage collector on."""
    try:
        await asyncio.wait_for(ready.wait(), FIRST_SYNC_SECONDS)
    except TimeoutError:
        gc.enable()
        await ready.wait()
    gc.freeze()
    gc.enable()


class Lifetime:
    """Runs the tasks of one program on the running event loop; `last_words` is called before an immediate end."""

    def __init__(self, last_words: Callable[[], None]) -> None:
        self._last_words = last_words
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._parts: list[asyncio.Task[None]] = []

    def heed_signals(self) -> None:
        """Make SIGTERM and SIGINT end the program; ignore SIGHUP."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        loop.add_signal_handler(
            signal.SIGHUP, log.info, "Ignored SIGHUP: the proxy detects a changed configuration file without a signal"
        )

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task; an error in the task ends the program, and the supervisor restarts the program."""
        task = asyncio.get_running_loop().create_task(work, name=name)

        def ended(task: asyncio.Task[None]) -> None:
            if task.cancelled():  # without effect in cancel_parts, because the program is already ending
                self.fail(RuntimeError(f"{name} was cancelled"))
            elif (error := task.exception()) is not None:
                self.fail(error)

        task.add_done_callback(ended)
        self._parts.append(task)

    def stop(self, code: int) -> None:
        """End the program with an exit code, unless the program is already ending."""
        if not self._end.done():
            self._end.set_result(code)

    def fail(self, error: BaseException) -> None:
        """End the program with an error, unless the program is already ending."""
        if not self._end.done():
            self._end.set_exception(error)

    async def end(self) -> int:
        """Wait for the end of the program; return the exit code. Raises the error of a failed task."""
        return await self._end

    async def cancel_parts(self) -> None:
        """Cancel all tasks and wait for them; call this method when the program is ending."""
        for task in self._parts:
            task.cancel()
        await asyncio.gather(*self._parts, return_exceptions=True)

    def _signalled(self, number: signal.Signals) -> None:
        if self._end.done():
            log.warning("Ending at once signal=%s", number.name)
            self._last_words()
            os._exit(1)
        log.info("Stopping, the rules stay signal=%s", number.name)
        self.stop(0)


privileges_log = logging.getLogger("kubeproxy.privileges")


def needed(legacy: Sequence[str], others_files: Sequence[str], plugin: str) -> frozenset[Capability]:
    """Return the capabilities that the proxy keeps, in all modes.

    `legacy` contains the commands of legacy iptables on this node. `others_files` contains the files that the proxy
    reads again later and can read only with a capability. `plugin` is the credential plugin; '' if there is none.

    CAP_NET_ADMIN is needed for rules, sets, IPVS servers, addresses, marks and network sysctls. CAP_NET_BIND_SERVICE is
    needed for ports below 1024, which a new Service may use (health checks, relayed NodePorts)."""
    wanted = {Capability.NET_ADMIN, Capability.NET_BIND_SERVICE}
    if legacy:
        wanted.add(Capability.NET_RAW)
    if others_files or plugin:
        wanted.add(Capability.DAC_READ_SEARCH)
    return frozenset(wanted)


def give_up(files: Iterable[str], plugin: str) -> None:
    """Drop the capabilities that are not needed, also for child processes; log a failure. `files` are read again later;
    `plugin` is the credential plugin, or '' if there is none. A plugin with its own privileges (set-user-ID,
    capabilities) needs all capabilities of the proxy, which then drops none."""
    path = shutil.which(plugin) or plugin if plugin else ""
    if path and gives_rights(path):
        privileges_log.warning(
            "Keeping all capabilities: the credential plugin would lose rights of its own plugin=%s", path
        )
        return
    own = kubeproxy.__file__, os.__file__  # files of this program and of Python
    try:
        legacy = [name for name in xtables.installed() if name.endswith("-legacy") or _is_legacy(name)]
        wanted = needed(legacy, beyond_permission([*files, *own]), path)
        keep_only(wanted)
        forbid_new_privileges()
    except ApplyError as error:
        privileges_log.warning("Running with more rights than needed: %s", error)
        return
    privileges_log.info(
        "Dropped all capabilities that are not needed kept=%s", ",".join(one.label for one in sorted(held()))
    )


def _is_legacy(name: str) -> bool:
    try:
        return not name.endswith("-nft") and not xtables.commands(name).uses_nft
    except ApplyError:
        return True
