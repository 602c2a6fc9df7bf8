"""kube-proxy and its commands as forks of a process that has imported all of them, which saves much of their CPU time.

`python -m support.forking FD` reads requests from a socket: the words of a command line, with the descriptors of its
standard output, its standard error, and a pipe for the pid and then the exit status. Tests of the start itself name
the program in `command`, so that it is executed. fork_client.py is a program that sends such a request.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kubeproxy import cli
from kubeproxy.cluster import main as plugin
from lab.forking import begin_anew, end_with, ended_children, import_all, wake_for_children
from lab.netns import settle_in
from lab.proxyprocess import Process, proxy_command, spawn

PLUGIN = "kubectl-kubeproxy"
_NOTHING: Mapping[str, str] = MappingProxyType({})
_LARGEST = 1 << 17
"""Maximum number of bytes of a request; the environment is the largest part."""
_NAME = f"kubeproxy-forks-{os.getpid()}"
"""Name of the abstract socket that also accepts requests."""


class Forked:
    """A process that another process forked, with the interface of lab.proxyprocess.Process."""

    def __init__(self, status: int) -> None:
        self._status = status
        self.pid = self._read()
        self.returncode: int | None = None
        self._over = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(status, self._end)

    def _read(self) -> int:
        data = os.read(self._status, 4)
        return int.from_bytes(data, sys.byteorder, signed=True) if data else -signal.SIGKILL

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._status)
        self.returncode = self._read()
        os.close(self._status)
        self._over.set_result(self.returncode)

    async def wait(self) -> int:
        """Wait until the process ends; return its exit status, negative after a signal."""
        return int(await asyncio.shield(self._over))

    def send_signal(self, number: int) -> None:
        """Send the process a signal. Raises ProcessLookupError."""
        if self.returncode is None:
            os.kill(self.pid, number)


@cache
def _server() -> socket.socket:
    """Start the forking process, which ends with this process; return the socket for requests."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), _NAME]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
    process.returncode = 0  # No code waits for this process, so its object must not warn when it is collected.
    return ours


def client(namespace: str) -> str:
    """Return the start of a shell command that runs kube-proxy in a network namespace with the arguments after it."""
    _server()
    return shlex.join([sys.executable, "-ISE", str(Path(__file__).with_name("fork_client.py")), _NAME, namespace])


async def fork(
    namespace: str, words: Sequence[str], output: int, errors: int, environment: Mapping[str, str] = _NOTHING
) -> Forked:
    """Run a command line of kube-proxy in a network namespace, with these descriptors for its output.

    If it begins with the name of the plugin for kubectl, the plugin runs in the namespace of this process.
    """
    read, write = os.pipe2(os.O_CLOEXEC)
    request: dict[str, Any] = {"words": list(words), "namespace": namespace, "folder": str(Path.cwd())}
    request["environment"] = {**os.environ, **environment}
    try:
        socket.send_fds(_server(), [json.dumps(request).encode()], [output, errors, write])
    finally:
        os.close(write)
    await asyncio.to_thread(select.select, [read], [], [])
    return Forked(read)


async def spawn_or_fork(namespace: str, argv: Sequence[str], log: Path) -> Process:
    """Start a proxy (see lab.proxyprocess.Spawn): by fork if the command line begins with this kube-proxy's path."""
    if argv[0] != proxy_command():
        return await spawn(namespace, argv, log)
    with log.open("wb") as output:
        return await fork(namespace, argv[1:], output.fileno(), output.fileno())


async def ask(
    namespace: str, words: Sequence[str], timeout: float, environment: Mapping[str, str] = _NOTHING
) -> tuple[int, str]:
    """Run a command of kube-proxy; return its exit status, and its output followed by its errors.

    Raises TimeoutError after killing it.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        forked = await fork(namespace, words, output.fileno(), errors.fileno(), environment)
        try:
            status = await asyncio.wait_for(forked.wait(), timeout)
        except BaseException:
            forked.send_signal(signal.SIGKILL)
            raise
        return status, b"".join(os.pread(file.fileno(), 1 << 26, 0) for file in (output, errors)).decode(
            errors="replace"
        )


def main() -> int:
    """Serve requests until the socket ends; return in each child, with the exit status."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    clients = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    clients.bind(f"\0{sys.argv[2]}")
    clients.listen()
    import_all()
    gc.freeze()  # Otherwise a collection in a child copies every page of the imported modules.
    running: dict[int, int] = {}
    wake, woken = wake_for_children()
    waited: list[socket.socket | int] = [requests, clients, wake]
    while True:
        ready, _, _ = select.select(waited, [], [])
        if wake in ready:
            os.read(wake, 4096)
            for pid, status in ended_children():
                _report(running.pop(pid), status)
        if requests in ready:
            data, descriptors, *_ = socket.recv_fds(requests, _LARGEST, 3)
            if not data:
                return 0
        elif clients in ready:
            with clients.accept()[0] as connection:
                data, descriptors, *_ = socket.recv_fds(connection, _LARGEST, 3)
        else:
            continue
        if not (pid := os.fork()):
            unused = (requests.detach(), clients.detach(), wake, woken, *running.values())
            return _child(json.loads(data), descriptors, unused)
        *outputs, running[pid] = descriptors
        for number in outputs:
            os.close(number)
        os.write(running[pid], pid.to_bytes(4, sys.byteorder))


def _report(pipe: int, status: int) -> None:
    with suppress(BrokenPipeError):
        os.write(pipe, status.to_bytes(4, sys.byteorder, signed=True))
    os.close(pipe)


def _child(request: dict[str, Any], descriptors: Sequence[int], unused: Sequence[int]) -> int:
    """Run the command line in a process with the state of a newly started one."""
    output, errors, status = descriptors
    begin_anew(output, errors, (status, *unused), "kube-proxy")
    is_plugin = request["words"][0] == PLUGIN
    if not is_plugin:
        settle_in(request["namespace"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = [*(() if is_plugin else (proxy_command(),)), *request["words"]]
    return plugin.main() if is_plugin else cli.main()


if __name__ == "__main__":
    end_with(main)
