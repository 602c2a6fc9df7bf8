"""Controls the whoami process of a cluster, which answers for pods; commands on its stdin select the pods."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

from kubeproxy.errors import KubeProxyError

log = logging.getLogger("lab")

SCRIPT = Path(__file__).with_name("whoami.py")


class AnswerError(KubeProxyError):
    """The whoami process cannot carry out a command."""


class Answers:
    """One whoami process. Call start() first, and close() at the end."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._last_id = 0

    async def start(self) -> None:
        """Start the process, which takes about 20 ms."""
        pipe = asyncio.subprocess.PIPE
        # The process has its own session, so Ctrl-C reaches only the cluster, which then ends the process in order.
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(SCRIPT), stdin=pipe, stdout=pipe, start_new_session=True
        )
        self._reader = asyncio.create_task(self._read())

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid if self._process else 0

    async def open(self, uid: str, namespace: str, pod: str, node: str, ports: list[tuple[str, int]]) -> None:
        """Answer on these (protocol, port) inside a namespace. Raises AnswerError when a port is taken."""
        await self._ask({"do": "open", "uid": uid, "netns": namespace, "pod": pod, "node": node, "ports": ports})

    async def close_pod(self, uid: str) -> None:
        """Stop answering for a pod, and end its connections."""
        await self._ask({"do": "close", "uid": uid})

    async def _ask(self, command: dict[str, Any]) -> None:
        if self._process is None or self._process.stdin is None:
            raise AnswerError("the whoami process is not running")
        self._last_id += 1
        reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[self._last_id] = reply
        self._process.stdin.write(json.dumps(command | {"id": self._last_id}).encode() + b"\n")
        answer = await reply
        if "error" in answer:
            raise AnswerError(f"whoami {command['do']} for pod {command['uid']}: {answer['error']}")

    async def _read(self) -> None:
        if self._process is None or self._process.stdout is None:
            return
        while line := await self._process.stdout.readline():
            answer = json.loads(line)
            waiting = self._waiting.pop(answer["id"], None)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_exception(AnswerError("the whoami process ended"))
        self._waiting.clear()

    async def close(self) -> None:
        """End the process by closing its stdin."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 2)
        except TimeoutError:
            log.warning("whoami did not end by itself pid=%d", process.pid)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if self._reader is not None:
            await self._reader
