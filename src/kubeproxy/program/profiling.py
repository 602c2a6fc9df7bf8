"""The pages /debug/pprof and /debug/flags, served with enableProfiling: profiles, stacks and the log level. The paths
are the same as in Go's net/http/pprof; the contents describe Python code as text."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from io import StringIO
from pathlib import PurePath
from types import CodeType, FrameType
from typing import Final

from kubeproxy.server.http import TEXT, Handler, Request, Response
from kubeproxy.server.text import printable, redact

SECONDS: Final = 30.0  # seconds of a profile, as in Go
LONGEST: Final = 300.0
_DIGITS: Final = 20  # int() raises for thousands of digits
_PAUSE: Final = 0.01  # 100 samples a second, like Go
LEVEL_PAGE: Final = "/debug/flags/v"

_BUSY: Final = b"a profile is being taken already\n"
_INDEX: Final = """/debug/pprof/

goroutine   the stacks of all threads and asyncio tasks
profile     where the time goes: ?seconds=30; a line for each stack, with its number of samples, 100 a second
            (the folded form that flame graph programs read; stacks that end in select wait for work)
cmdline     the command line, separated by NUL bytes
"""


def profiling_pages(set_level: Callable[[int], None]) -> Mapping[str, Handler]:
    """Return the pages by path. A PUT to LEVEL_PAGE calls `set_level` with the number in the request."""

    def put_level(request: Request) -> Response:
        # The texts and codes are the same as in k8s.io/apiserver's StringFlagPutHandler and component-base's
        # GlogSetter.
        if request.method != "PUT":
            return Response(406, TEXT, b"unsupported http method\n")
        text = request.body.decode("ascii", "replace").strip()
        if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS and int(text) < 1 << 31):
            return Response(
                400,
                TEXT,
                f"failed set klog.logging.verbosity {printable(text[:40])}: not a number of 31 bits\n".encode(),
            )
        set_level(int(text))
        return Response(200, TEXT, f"successfully set klog.logging.verbosity to {text}\n".encode())

    def page(text: Callable[[], str]) -> Handler:
        return lambda _: Response(200, TEXT, text().encode(errors="replace"))

    flags = "/debug/flags/\n\nv   PUT a number to change how much is logged, until the next restart\n"
    return {
        **dict.fromkeys(("/debug/pprof", "/debug/pprof/"), page(lambda: _INDEX)),
        "/debug/pprof/goroutine": page(stacks),
        "/debug/pprof/profile": _profile_page(),
        "/debug/pprof/cmdline": page(lambda: "\0".join(map(redact, sys.orig_argv))),
        **dict.fromkeys(("/debug/flags", "/debug/flags/"), page(lambda: flags)),
        LEVEL_PAGE: put_level,
    }


def stacks() -> str:
    """Return the stacks of all threads, and of all tasks of the running loop."""
    out = StringIO()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    # A variable with the frames would create a reference cycle with its own frame.
    out.writelines(
        f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}\n"
        for ident, frame in sys._current_frames().items()
    )
    for task in sorted(asyncio.all_tasks(), key=lambda task: task.get_name()):
        out.write(f"task {task.get_name()}\n")
        task.print_stack(file=out)
        out.write("\n")
    return out.getvalue()


def _profile_page() -> Handler:
    running = threading.Lock()

    def answer(request: Request) -> Response:
        text = dict(request.parameters).get("seconds", str(SECONDS))
        try:
            seconds = float(text)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds <= LONGEST:
            return Response(400, TEXT, f"seconds: expected a number up to {LONGEST:g}\n".encode())
        if running.locked():
            return Response(500, TEXT, _BUSY)
        return Response(200, TEXT, _profile(seconds, running))

    return answer


async def _profile(seconds: float, running: threading.Lock) -> AsyncGenerator[bytes, None]:
    stop = threading.Event()
    if not running.acquire(blocking=False):  # another profile has begun in the meantime
        yield _BUSY
        return
    try:
        found = await asyncio.to_thread(sample, seconds, stop)
    finally:
        stop.set()  # also if the client disconnects
        running.release()
    yield "".join(f"{stack} {count}\n" for stack, count in found.most_common()).encode(errors="replace")


def sample(seconds: float, stop: threading.Event) -> Counter[str]:
    """Sample all other threads 100 times per second; return the number of samples of each folded stack."""
    found: Counter[str] = Counter()
    labels: dict[CodeType, str] = {}
    me, end = threading.get_ident(), time.monotonic() + seconds
    while time.monotonic() < end and not stop.wait(_PAUSE):
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames()
        del frames[me]
        for ident, frame in frames.items():
            found[";".join([names.get(ident, str(ident)), *_folded(frame, labels)])] += 1
    return found


def _folded(frame: FrameType, labels: dict[CodeType, str]) -> list[str]:
    stack: list[str] = []
    at: FrameType | None = frame
    while at is not None:
        code = at.f_code
        label = labels.get(code)
        if label is None:
            label = labels[code] = f"{PurePath(code.co_filename).name}:{code.co_qualname}".replace(";", ",")
        stack.append(label)
        at = at.f_back
    return stack[::-1]
