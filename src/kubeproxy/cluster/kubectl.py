"""Runs kubectl to read objects and to execute commands in containers, with limits on time and size."""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import time
from collections.abc import Iterable, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from kubeproxy.errors import NoAnswerError, QuestionError
from kubeproxy.model.objects import ApiStruct, ObjectMeta

T = TypeVar("T")

MOST_ANSWER: Final = 4 << 20
"""The maximum size of a container's output, in bytes."""
MOST_OBJECTS: Final = 256 << 20
"""The maximum size of a list of objects, in bytes."""
_MOST_ERRORS: Final = 256 << 10
_BLOCK: Final = 1 << 16
_LOOK: Final = 0.1  # seconds until a call notices that it is stopped
_LONGEST: Final = 400
"""The maximum number of characters of an error in one line."""
_ENDED: Final = re.compile(r"command terminated with exit code \d+|Defaulted container .*|Unable to use a TTY.*")
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


class Items(Struct, Generic[T]):
    """A list of objects."""

    items: list[T]


class NamedResource(ApiStruct, frozen=True):
    """An object of any kind, with its metadata only."""

    metadata: ObjectMeta


class Container(NamedTuple):
    """The container of a kube-proxy."""

    namespace: str
    pod: str
    name: str


class Printed(NamedTuple):
    """The result of a command: exit status, standard output, standard error."""

    status: int
    text: bytes
    errors: bytes

    @property
    def reason(self) -> str:
        """The last line of standard error that kubectl itself did not add."""
        lines = [line.strip() for line in self.errors.decode(errors="replace").splitlines()]
        kept = [line for line in lines if line and not _ENDED.fullmatch(line)]
        return kept[-1].removeprefix("Error: ")[:_LONGEST] if kept else f"exit code {self.status} without a message"


def checked(name: str) -> str:
    """Return the name unchanged. Raises QuestionError if the name is no valid name, for example because it looks like
    an option."""
    if not _NAME.fullmatch(name):
        raise QuestionError(f"{name[:_LONGEST]!r} is not the name of an object")
    return name


class Kubectl:
    """The user's kubectl with its connection options; each call takes at most `patience` seconds."""

    def __init__(self, options: Iterable[str], patience: float) -> None:
        self._options = tuple(options)
        self._patience = patience
        self._stopped = False

    def get(self, kind: type[T], resource: str, name: str = "", **options: str) -> T:
        """Return a decoded object or list of objects. Raises NoAnswerError."""
        words = ["get", resource, *([checked(name)] if name else []), "--output=json"]
        words += [f"--{option.replace('_', '-')}={value}" for option, value in options.items() if value]
        printed = self._run(words, MOST_OBJECTS)
        if printed.status:
            raise NoAnswerError(printed.reason)
        try:
            return msgspec.json.decode(printed.text, type=kind)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise NoAnswerError(f"kubectl get {resource}: the answer cannot be read: {error}") from None

    def execute(self, where: Container, words: Sequence[str]) -> Printed:
        """Run kube-proxy with these arguments in a container. Raises NoAnswerError if there is no result."""
        namespace, container = (checked(one) for one in (where.namespace, where.name))
        place = [f"--namespace={namespace}", f"--container={container}", checked(where.pod)]
        return self._run(["exec", *place, "--", "kube-proxy", *words], MOST_ANSWER)

    def _run(self, words: Sequence[str], most: int) -> Printed:
        command = ["kubectl", *self._options, *words]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except OSError as error:
            raise QuestionError(f"kubectl cannot be started: {error.strerror}; it must be in PATH") from None
        with process:
            try:
                return self._read(process, most, time.monotonic() + self._patience)
            except (TimeoutError, subprocess.TimeoutExpired):
                raise NoAnswerError(f"no answer within {self._patience:g} s") from None
            finally:
                process.kill()

    def stop(self) -> None:
        """End all calls, including those of other threads."""
        self._stopped = True

    def _read(self, process: subprocess.Popen[bytes], most: int, until: float) -> Printed:
        pipes = ((process.stdout, most), (process.stderr, _MOST_ERRORS))
        printed = [bytearray() for _ in pipes]
        with selectors.DefaultSelector() as selector:
            for (pipe, limit), text in zip(pipes, printed, strict=True):
                assert pipe is not None  # noqa: S101 - tells the type checker that the pipe exists
                selector.register(pipe, selectors.EVENT_READ, (text, limit))
            while selector.get_map():
                events = selector.select(min(max(until - time.monotonic(), 0), _LOOK))
                if self._stopped:
                    raise NoAnswerError("the question was interrupted")
                if not events and time.monotonic() >= until:
                    raise TimeoutError
                for key, _ in events:
                    text, limit = key.data
                    if not (part := os.read(key.fd, _BLOCK)):
                        selector.unregister(key.fileobj)
                    text += part
                    if len(text) > limit:
                        raise NoAnswerError(f"the answer is larger than {limit >> 10} kB")
        return Printed(process.wait(max(until - time.monotonic(), 0)), *map(bytes, printed))
