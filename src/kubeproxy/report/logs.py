"""Writes the log to standard error in the formats of the Go kube-proxy (klog's text or component-base's JSON), without
secrets. A message has the form "Message key=%s key=%r". Each record is one line, because server/text.py cleans the
text."""

from __future__ import annotations

import asyncio
import fnmatch
import logging
import os
import re
import select
import sys
import time
from collections.abc import Sequence
from functools import lru_cache
from types import TracebackType
from typing import Final, NamedTuple

from kubeproxy.config.fields import Logging
from kubeproxy.server.text import clean, json_bytes, printable

_LETTERS: Final = ((logging.CRITICAL, "F"), (logging.ERROR, "E"), (logging.WARNING, "W"), (0, "I"))

# The number of bytes that a writable pipe accepts without blocking (POSIX).
_PIPE_BUF: Final = 4096
_WAIT_MS: Final = 50
_TRACE_LINES: Final = 200


def level(verbosity: int) -> int:
    """Return the logging level of klog's V(verbosity): INFO for 0, DEBUG for 4."""
    if verbosity < 4:
        return logging.INFO - max(verbosity, 0)
    return max(logging.DEBUG - (verbosity - 4), 1)


def verbosity_of(number: int) -> int:
    """Return klog's V for a logging level; 0 for INFO and above."""
    if number > logging.DEBUG:
        return min(max(logging.INFO - number, 0), 3)
    return 4 + logging.DEBUG - number


class TextFormatter(logging.Formatter):
    """klog's format: `Lmmdd hh:mm:ss.uuuuuu pid file:line] message` in local time, then an indented traceback, if
    any."""

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()
        self._second = (0, "")

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, or more with a traceback."""
        letter = next(sign for number, sign in _LETTERS if record.levelno >= number)
        second = int(record.created)
        if self._second[0] != second:
            self._second = second, time.strftime("%m%d %H:%M:%S", time.localtime(second))
        moment = self._second[1]
        micros = int(record.created % 1 * 1e6)
        text = printable(clean(record.getMessage()))
        line = f"{letter}{moment}.{micros:06d} {self._pid:7d} {record.filename}:{record.lineno}] {text}"
        if record.exc_info:
            line += "".join(f"\n  {printable(clean(text))}" for text in _trace(self.formatException(record.exc_info)))
        return line


def _trace(text: str) -> list[str]:
    lines = text.split("\n")
    left_out = len(lines) - _TRACE_LINES
    if left_out <= 0:
        return lines
    half = _TRACE_LINES // 2
    return [*lines[:half], f"... ({left_out} more lines)", *lines[-half:]]


_PAIR: Final = re.compile(r" ([A-Za-z_]\w*)=%(?:\.\d+f|[sdrg])")


@lru_cache(maxsize=512)
def _pairs(template: str) -> tuple[str, tuple[str, ...]]:
    """Split a template into its message and the keys of the key=%s pairs at its end; no keys if the message has other
    fields."""
    end = len(template)
    keys: list[str] = []
    for match in reversed(list(_PAIR.finditer(template))):
        if match.end() != end:
            break
        end = match.start()
        keys.insert(0, match[1])
    return (template[:end], tuple(keys)) if "%" not in template[:end] else (template, ())


def _value(key: str, value: object) -> object:
    # The text includes the key, because `clean` may recognise a secret by its key.
    return value if isinstance(value, int | float) else clean(f"{key}={value}")[len(key) + 1 :]


class JsonFormatter(logging.Formatter):
    """component-base's JSON format: ts (milliseconds since the epoch), caller, msg, v (not for errors), and the key=%s
    pairs at the end of the message. The key `error` becomes `err`; `stacktrace` contains a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line."""
        head, keys = _pairs(record.msg) if isinstance(record.msg, str) else ("", ())
        values = record.args if isinstance(record.args, tuple) and len(record.args) == len(keys) else ()
        line: dict[str, object] = {
            "ts": round(record.created * 1000, 3),
            "caller": f"{'/'.join(record.pathname.rsplit('/', 2)[-2:])}:{record.lineno}",
            "msg": clean(head if keys and values else record.getMessage()),
        }
        if record.levelno < logging.ERROR:
            line["v"] = verbosity_of(record.levelno)
        if values:
            line |= {"err" if key == "error" else key: _value(key, v) for key, v in zip(keys, values, strict=True)}
        if record.exc_info and record.exc_info[1] is not None:
            line["err"] = clean(str(record.exc_info[1]) or type(record.exc_info[1]).__name__)
            line["stacktrace"] = "\n".join(map(clean, _trace(self.formatException(record.exc_info))))
        return json_bytes(line).decode()


Patterns = Sequence[tuple[str, int]]  # --vmodule: patterns of file names (without .py), each with a verbosity


class Verbosity(logging.Filter):
    """The filter for -v and --vmodule; as in klog, a pattern can only increase the verbosity of its files. The logger
    of the package passes on each record that a file may log; this filter decides by file."""

    def __init__(self, verbosity: int, patterns: Patterns = ()) -> None:
        super().__init__()
        # [^a] in Go is [!a] in Python. The first matching pattern applies.
        self._patterns = [(pattern.replace("[^", "[!"), level(number)) for pattern, number in patterns]
        self.set(verbosity)

    def set(self, verbosity: int) -> None:
        """Set the verbosity of -v; the patterns do not change."""
        self._common = level(verbosity)
        self._by_file: dict[str, int] = {}
        lowest = min([self._common, *(number for _, number in self._patterns)])
        logging.getLogger("kubeproxy").setLevel(lowest)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is logged."""
        if record.levelno >= self._common or not record.name.startswith("kubeproxy"):
            return True
        wanted = self._by_file.get(record.filename)
        if wanted is None:
            stem = record.filename.removesuffix(".py")
            matching = (number for pattern, number in self._patterns if fnmatch.fnmatchcase(stem, pattern))
            wanted = self._by_file[record.filename] = next(matching, self._common)
        return record.levelno >= wanted


class StreamHandler(logging.Handler):
    """Writes to file descriptors without waiting long for their readers. A line waits at most 50 ms, and is then
    dropped. After a dropped line, later lines do not wait. When the reader reads again, a line reports the number of
    dropped lines. Lines for the descriptor `infos` are buffered until a flush, up to `buffer` bytes."""

    def __init__(self, errors: int, infos: int, buffer: int = 0) -> None:
        super().__init__()
        self._errors = errors
        self._infos = infos
        self._pollers = {fd: _poller(fd) for fd in {errors, infos}}
        self._room = buffer if infos != errors else 0
        self._held: list[bytes] = []
        self._held_bytes = 0
        self.dropped = 0

    @property
    def buffered(self) -> bool:
        """Whether there is a buffer, so that `flush_every` is needed."""
        return self._room > 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        try:
            data = (self.format(record) + "\n").encode(errors="backslashreplace")
        except Exception as error:
            # A mistake in a log call must not raise an error in the caller.
            data = f"cannot format a log line of {record.filename}:{record.lineno}: {error!r}\n".encode()
        if record.levelno >= logging.ERROR:
            self._put(self._errors, data)
        elif not self._room:
            self._put(self._infos, data)
        else:
            if self._held_bytes + len(data) > self._room:
                self._flush()
            self._held.append(data)
            self._held_bytes += len(data)

    def flush(self) -> None:
        """Write the buffer."""
        self.acquire()
        try:
            self._flush()
        finally:
            self.release()

    async def flush_every(self, seconds: float) -> None:
        """Flush the buffer every `seconds` until cancelled."""
        while True:
            await asyncio.sleep(seconds)
            self.flush()

    def _flush(self) -> None:
        held, self._held, self._held_bytes = self._held, [], 0
        for data in held:
            self._put(self._infos, data)

    def _put(self, fd: int, data: bytes) -> None:
        if self.dropped and self._write(fd, f"{self.dropped} log lines dropped: the reader was too slow\n".encode()):
            self.dropped = 0
        if self.dropped or not self._write(fd, data):
            self.dropped += 1

    def _write(self, fd: int, data: bytes) -> bool:
        wait = 0 if self.dropped else _WAIT_MS
        view = memoryview(data)
        try:
            while view:
                if not self._pollers[fd].poll(wait):
                    return False
                view = view[os.write(fd, view[:_PIPE_BUF]) :]
        except OSError:
            return False  # the descriptor is closed, or the disk is full
        return True


def _poller(fd: int) -> select.poll:
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    return poller


class Output(NamedTuple):
    """The handler of the log and its filter."""

    handler: StreamHandler
    verbosity: Verbosity


def setup(config: Logging) -> Output:
    """Send all logging to standard error, with klog's verbosity. With splitStream, lines below the level of errors go
    through the buffer to standard output. Other libraries log only warnings and errors."""
    routing = config.options.json if config.format == "json" else config.options.text
    patterns = [(item.file_pattern, item.verbosity) for item in config.vmodule]
    handler = StreamHandler(errors=2, infos=1 if routing.split_stream else 2, buffer=routing.info_buffer_size)
    handler.setFormatter(JsonFormatter() if config.format == "json" else TextFormatter())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    shown = Verbosity(config.verbosity, patterns)
    if patterns:
        handler.addFilter(shown)
    # No format uses these fields, and computing the fields takes time.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    sys.excepthook = _log_uncaught
    return Output(handler, shown)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    logging.getLogger("kubeproxy").critical("Uncaught error", exc_info=(kind, error, trace))
