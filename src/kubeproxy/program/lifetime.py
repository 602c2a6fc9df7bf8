"""The life of the program: its tasks, the signals that end it, the exit code, pauses of the garbage collector, and the
capabilities that it keeps. The program ends when a task fails, when it is stopped, or by a signal; a second signal ends
it at once. Capabilities that are not needed after the start are dropped: modules are loaded, sysctls, limits and the
OOM score are set before. docs/operating.md has a table of the capabilities that are kept, with the reasons.
"""

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
"""Seconds after which garbage collection starts even without a first sync: failures create cycles of tracebacks."""


def postpone_garbage_collection() -> None:
    """Collect no garbage until `resume_garbage_collection`, then at each 50,000th new container, not the 700th: a
    search for cycles in the objects of the first sync would take a tenth of its time, and they have none.
    """
    gc.set_threshold(50_000, 20, 50)
    gc.disable()


async def resume_garbage_collection(ready: asyncio.Event) -> None:
    """Wait for the first sync; exempt its objects from collection and enable the collector."""
    try:
        await asyncio.wait_for(ready.wait(), FIRST_SYNC_SECONDS)
    except TimeoutError:
        gc.enable()
        await ready.wait()
    gc.freeze()
    gc.enable()


class Lifetime:
    """The life of one program on the running event loop; `last_words` is called before an immediate end."""

    def __init__(self, last_words: Callable[[], None]) -> None:
        self._last_words = last_words
        self._end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._parts: list[asyncio.Task[None]] = []

    def heed_signals(self) -> None:
        """End by SIGTERM and SIGINT; ignore SIGHUP."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        loop.add_signal_handler(
            signal.SIGHUP, log.info, "Ignored SIGHUP: a changed configuration file is detected without it"
        )

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine; its error ends the program, and the supervisor restarts it."""
        task = asyncio.get_running_loop().create_task(work, name=name)

        def ended(task: asyncio.Task[None]) -> None:
            if task.cancelled():  # after `cancel_parts` this has no effect: the end is set
                self.fail(RuntimeError(f"{name} was cancelled"))
            elif (error := task.exception()) is not None:
                self.fail(error)

        task.add_done_callback(ended)
        self._parts.append(task)

    def stop(self, code: int) -> None:
        """End with an exit code, unless the end is set already."""
        if not self._end.done():
            self._end.set_result(code)

    def fail(self, error: BaseException) -> None:
        """End with an error, unless the end is set already."""
        if not self._end.done():
            self._end.set_exception(error)

    async def end(self) -> int:
        """Wait for the end; return the exit code. Raises the error of a task."""
        return await self._end

    async def cancel_parts(self) -> None:
        """Cancel all tasks and wait for them; to be called after the end is set."""
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
    """Return the capabilities to keep, in any mode.

    `legacy` are the commands of legacy iptables on this node. `others_files` are the files to be read again that need a
    capability. `plugin` is the program that makes credentials, '' for none.

    CAP_NET_ADMIN is for rules, sets, servers, addresses, marks and the network's sysctls, CAP_NET_BIND_SERVICE for
    ports below 1024, which a new Service may need (health checks, relayed NodePorts).
    """
    wanted = {Capability.NET_ADMIN, Capability.NET_BIND_SERVICE}
    if legacy:
        wanted.add(Capability.NET_RAW)
    if others_files or plugin:
        wanted.add(Capability.DAC_READ_SEARCH)
    return frozenset(wanted)


def give_up(files: Iterable[str], plugin: str) -> None:
    """Drop the capabilities that are not needed, also for child processes. A failure is logged. `files` are read again
    later; `plugin` is the program that makes credentials, '' for none. With a plugin that has its own rights
    (set-user-ID, capabilities) nothing is dropped, because the plugin would lose these rights.
    """
    path = shutil.which(plugin) or plugin if plugin else ""
    if path and gives_rights(path):
        privileges_log.warning(
            "Keeping all capabilities: the credential plugin would lose rights of its own plugin=%s", path
        )
        return
    own = kubeproxy.__file__, os.__file__  # of this program and of Python: modules are loaded later
    try:
        legacy = [name for name in xtables.installed() if name.endswith("-legacy") or _is_legacy(name)]
        wanted = needed(legacy, beyond_permission([*files, *own]), path)
        keep_only(wanted)
        forbid_new_privileges()
    except ApplyError as error:
        privileges_log.warning("Running with more rights than are needed: %s", error)
        return
    privileges_log.info(
        "Dropped all capabilities that are not needed kept=%s", ",".join(one.label for one in sorted(held()))
    )


def _is_legacy(name: str) -> bool:
    try:
        return not name.endswith("-nft") and not xtables.commands(name).uses_nft
    except ApplyError:
        return True
