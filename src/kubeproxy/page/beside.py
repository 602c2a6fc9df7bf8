"""Runs `kube-proxy companion` in further processes for work that would block the proxy's event loop. Companions find
problems as `doctor` does, count new connections for open pages, and answer the `why` questions of these pages. A
companion reads lines from standard input and ends when the input ends, even if the proxy is killed."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct, field

from kubeproxy.ask.finding import Diagnosis, Severity
from kubeproxy.ask.flows.owners import COMPLETE, FollowedNode, Fronts, Keys, keys_by_port
from kubeproxy.engine.pacing import Backoff, in_turns
from kubeproxy.errors import KubeProxyError
from kubeproxy.model.plan import NOTHING, ServiceName
from kubeproxy.model.planner import Change, Planner

Tell = Callable[[str, Any], None]
"""A function that sends an event of a kind to all pages. The event is a value to encode as JSON, or bytes of JSON."""

EACH: Final = 30.0  # minimum seconds between two periodic checks
LEAST: Final = 5.0  # minimum seconds from the end of a check to the next requested check
SOON: Final = 2.0  # seconds from a change of a family's state to the next check
SHARE: Final = 0.002  # the maximum share of a CPU for periodic checks
_STEP: Final = 200
_MOST_OBJECTS: Final = 100  # maximum number of problems of objects in one event


class Flows:
    """Sends counts of new connections to the pages. A companion gets the frontends of Services, and counts new
    connections in conntrack."""

    def __init__(self, mode: str, planner: Planner, tell: Tell) -> None:
        self._mode = mode
        self._planner = planner
        self._tell = tell
        self._companion = Companion(["flows"], self._received, self._ended, self._greet)

    async def run(self) -> None:
        """Count until cancelled."""
        await self._companion.run()

    def settled(self, changes: Iterable[Change]) -> None:
        """Send changed frontends to the companion."""
        for change in changes:
            before, after = change.before.plans, change.after.plans
            if [plan.all_frontends for plan in before] != [plan.all_frontends for plan in after]:
                self._companion.tell(_line(change.name, keys_by_port(after)))

    def _received(self, line: bytes) -> None:
        if line.startswith(b'{"error"'):
            self._ended(msgspec.json.decode(line)["error"])
        else:
            self._tell("flows", line)

    def _ended(self, why: str) -> None:
        nothing: dict[str, Any] = {"at": time.time(), "seconds": 0, "sampled": 1, "services": {}}
        self._tell("flows", nothing | {"error": why})

    async def _greet(self) -> AsyncGenerator[bytes, None]:
        planner = self._planner
        nodeports = {int(family): ours.nodeport_ips for family, ours in planner.world.parts.items()}
        yield msgspec.json.encode(FollowedNode(self._mode, nodeports)) + b"\n"
        names = list(planner.compiled)
        for start in range(0, len(names), _STEP):
            yield b"".join(
                _line(name, keys_by_port(compiled.plans))
                for name in names[start : start + _STEP]
                if (compiled := planner.compiled.get(name)) is not None
            )
            await asyncio.sleep(0)
        yield COMPLETE + b"\n"


def _line(name: ServiceName, ports: Mapping[str, Keys]) -> bytes:
    return msgspec.json.encode(Fronts("/".join(name), ports)) + b"\n"


class Problems:
    """Sends problems to the pages: the findings of `kube-proxy doctor`, which a companion collects, and the unusable
    fields of objects."""

    def __init__(self, planner: Planner, socket: str, tell: Tell) -> None:
        self._planner = planner
        self._socket = socket
        self._tell = tell
        self._asked = asyncio.Event()
        self._after = 0.0
        self._looked: float | None = None
        self._ended_at = -LEAST  # in the event loop's time
        self._answered = asyncio.Event()
        self._findings: list[Mapping[str, str]] = []
        self._seconds = 0.0
        self._looking = False
        self._companion = Companion(["problems", "--control-socket", socket], self._received, self._ended, self._greet)

    async def run(self) -> None:
        """Check immediately and then periodically, until cancelled."""
        if not self._socket:
            text = "--control-socket is empty, so this proxy has no control socket, and some checks were impossible"
            self._findings = [_unknown(text, "remove the flag --control-socket, or set a path")]
            while True:
                await self._ended_look()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._companion.run())
            tasks.create_task(self._look())

    def look_soon(self) -> None:
        """Start a check after SOON seconds."""
        self._after = SOON
        self._asked.set()

    def look_again(self) -> float:
        """Start a check as soon as LEAST permits; return the seconds until the start."""
        if self._looking:
            return 0.0
        self._after = max(0.0, self._ended_at + LEAST - asyncio.get_running_loop().time())
        self._asked.set()
        return self._after

    async def _look(self) -> None:
        while True:
            self._looking = True
            await self._say()
            self._answered.clear()
            self._companion.tell(b"look\n")
            await self._answered.wait()
            await self._ended_look()

    async def _ended_look(self) -> None:
        self._looking = False
        self._looked = time.time()
        self._ended_at = asyncio.get_running_loop().time()
        await self._say()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._pause_between_checks):
                await self._asked.wait()
                await asyncio.sleep(self._after)
        self._asked.clear()

    @property
    def _pause_between_checks(self) -> float:
        return max(EACH, self._seconds / SHARE)

    async def _greet(self) -> AsyncGenerator[bytes, None]:
        yield b"look\n"

    def _received(self, line: bytes) -> None:
        answer = msgspec.json.decode(line)
        if "error" in answer:
            self._ended(answer["error"])
            return
        self._seconds = answer["processorSeconds"]
        unknown = [_unknown(text, "") for text in answer["unknown"]]
        self._findings = [*answer["findings"], *unknown]
        self._answered.set()

    def _ended(self, why: str) -> None:
        self._findings = [_unknown(f"no check was possible: {why}", "run `kube-proxy doctor` on the node")]
        self._answered.set()

    async def _say(self) -> None:
        without, objects = await _wrong_objects(self._planner)
        message = {
            "at": time.time(),
            "findings": self._findings,
            "looking": self._looking,
            "lookedAt": self._looked,
            "every": self._pause_between_checks,
            "withoutEndpoints": without,
            "objects": objects,
        }
        self._tell("problems", message)


def _unknown(what: str, fix: str) -> Mapping[str, str]:
    return Diagnosis(Severity.UNKNOWN, "node", what, fix=fix).row()


async def _wrong_objects(planner: Planner) -> tuple[int, list[dict[str, str]]]:
    without, objects = 0, []
    async for name in in_turns(list({**planner.compiled, **planner.slices})):
        compiled = planner.compiled.get(name, NOTHING)
        without += any(not plan.usable for plan in compiled.plans)
        objects += [_object("Service", "/".join(name), *problem) for problem in compiled.problems]
        for piece, held in planner.slices.get(name, {}).items():
            objects += [_object("EndpointSlice", f"{name[0]}/{piece}", *problem) for problem in held.problems]
    return without, objects[:_MOST_OBJECTS]


def _object(kind: str, name: str, field: str, reason: str) -> dict[str, str]:
    return {"object": f"{kind} {name}", "field": field, "reason": reason}


log = logging.getLogger("kubeproxy.page")

FIRST_RETRY: Final = 2.0
SLOWEST_RETRY: Final = 300.0
TIMEOUT: Final = 2.0  # seconds until a terminated companion is killed
_LONGEST: Final = 1 << 20  # maximum bytes of an output line, and of input that the companion has not read


def ourselves() -> list[str]:
    """Return the command that starts this program, installed or as a zipapp, in another process."""
    from zipfile import is_zipfile  # noqa: PLC0415 - not loaded by a proxy without an open page

    program = Path(sys.argv[0])
    if program.is_file() and is_zipfile(program):
        return [sys.executable, str(program.resolve())]
    return [sys.executable, "-P", "-m", "kubeproxy.cli"]  # -P: no modules from the working directory


class Companion(Struct):
    """Runs `kube-proxy companion ...` until cancelled, and restarts the process when it ends. `on_line` gets each line
    of the output. `ended` gets a sentence when the process ends by itself. `greet` yields the first lines of input
    after each start."""

    words: Sequence[str]
    on_line: Callable[[bytes], None]
    ended: Callable[[str], None]
    greet: Callable[[], AsyncIterator[bytes]]
    command: Callable[[], list[str]] = ourselves
    _process: Process | None = None
    _greeted: bool = False

    def tell(self, line: bytes) -> None:
        """Send a line to the process. A restarted process gets the information of earlier lines from `greet`."""
        process = self._process
        if process is None or process.stdin is None or not self._greeted or process.stdin.is_closing():
            return
        if process.stdin.transport.get_write_buffer_size() > _LONGEST:  # the process does not read
            self._greeted = False
            process.kill()
            return
        process.stdin.write(line)

    async def run(self) -> None:
        """Keep the process running until cancelled, then wait for the end of the process."""
        backoff = Backoff(FIRST_RETRY, SLOWEST_RETRY)
        while True:
            try:
                why = await self._once()
            except OSError as error:
                why = f"cannot be started: {error.strerror}"
            self.ended(f"the proxy's companion process ({' '.join(self.words[:1])}) {why}; it is started again")
            await asyncio.sleep(backoff.failed())

    async def _once(self) -> str:
        words = [*self.command(), "companion", *self.words]
        process = await asyncio.create_subprocess_exec(*words, stdin=PIPE, stdout=PIPE, limit=_LONGEST)
        self._process = process
        try:
            await asyncio.gather(self._tell_all(process), self._listen(process))
            return f"ended with exit code {await process.wait()}"
        except ValueError:
            return "wrote too much output"
        finally:
            self._process, self._greeted = None, False
            await end(process)

    async def _tell_all(self, process: Process) -> None:
        assert process.stdin is not None  # noqa: S101 - the pipe was requested
        with suppress(ConnectionError):
            async for line in self.greet():
                process.stdin.write(line)
                await process.stdin.drain()
            self._greeted = True

    async def _listen(self, process: Process) -> None:
        assert process.stdout is not None  # noqa: S101 - the pipe was requested
        while line := await process.stdout.readline():
            self.on_line(line.rstrip())


async def end(process: Process) -> None:
    """Terminate a process, and wait for its end."""
    if process.stdin is not None:
        process.stdin.close()
    for stop in (process.terminate, process.kill):
        if process.returncode is None:
            with suppress(ProcessLookupError):
                stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(TIMEOUT):
                while process.stdout is not None and await process.stdout.read(_LONGEST):
                    pass  # the pipe closes only after its last byte is read
                await process.wait()
                return


QUESTION_SECONDS: Final = 10.0  # the timeout of a question, including the time in the queue


class UnansweredError(KubeProxyError):
    """An error with the reason why a question has no answer."""


class FormQuestions(Struct):
    """Answers the pages' questions one after the other. `socket` is the path of this proxy's control socket; '' if
    there is none."""

    socket: str
    command: Callable[[], list[str]] = ourselves
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def why(self, question: Mapping[str, str]) -> bytes:
        """Return the answer of `kube-proxy why` as JSON. Raises UnansweredError."""
        if not self.socket:
            raise UnansweredError(
                "--control-socket is empty, so this proxy has no control socket: remove the flag, or set a path"
            )
        try:
            async with asyncio.timeout(QUESTION_SECONDS), self._turn:
                answer = await self._once(msgspec.json.encode(question))
        except TimeoutError:
            raise UnansweredError(f"the proxy's companion process took longer than {QUESTION_SECONDS:.0f} s") from None
        except OSError as error:
            raise UnansweredError(f"the proxy's companion process cannot be started: {error.strerror}") from error
        if answer.startswith(b'{"error"'):
            raise UnansweredError(msgspec.json.decode(answer)["error"])
        return answer

    async def _once(self, question: bytes) -> bytes:
        words = [*self.command(), "companion", "question", "--control-socket", self.socket]
        process = await asyncio.create_subprocess_exec(*words, stdin=PIPE, stdout=PIPE)
        try:
            answer, _ = await process.communicate(question + b"\n")
        finally:
            await end(process)
        if process.returncode or not answer:
            raise UnansweredError(f"the proxy's companion process ended with exit code {process.returncode}")
        return answer
