"""Log formats, verbosity, secrets, and slow readers of the log."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.report.logs import (
    JsonFormatter,
    StreamHandler,
    TextFormatter,
    Verbosity,
    level,
    verbosity_of,
)

CREATED = 1795238047.123456


def record(number: int, message: str, *args: object, exc_info: object = None) -> logging.LogRecord:
    made = logging.LogRecord("kubeproxy.engine", number, "/src/engine.py", 95, message, args, exc_info)
    made.created = CREATED
    return made


def raised(message: str) -> tuple[object, ...]:
    try:
        raise ValueError(message)
    except ValueError:
        return sys.exc_info()


@pytest.mark.parametrize(
    ("number", "letter"),
    [(logging.DEBUG, "I"), (logging.INFO, "I"), (logging.WARNING, "W"), (logging.ERROR, "E"), (logging.CRITICAL, "F")],
)
def test_text_lines_are_klogs(number: int, letter: str) -> None:
    line = TextFormatter().format(record(number, "Synced family=%s", "IPv4"))
    moment = time.strftime("%m%d %H:%M:%S", time.localtime(CREATED))
    assert line == f"{letter}{moment}.123456 {os.getpid():7d} engine.py:95] Synced family=IPv4"
    # The header that log shippers parse (klog's own header).
    assert re.match(r"^[IWEF]\d{4} \d\d:\d\d:\d\d\.\d{6}\s+\d+ \S+:\d+\] ", line)


def test_text_has_the_traceback_on_its_own_lines() -> None:
    lines = TextFormatter().format(record(logging.ERROR, "Failed", exc_info=raised("boom"))).split("\n")
    assert lines[0].endswith("engine.py:95] Failed")
    assert lines[-1] == "  ValueError: boom"


def test_json_lines_are_component_bases() -> None:
    assert json.loads(JsonFormatter().format(record(logging.INFO, "Synced %d", 3))) == {
        "ts": 1795238047123.456, "caller": "src/engine.py:95", "msg": "Synced 3", "v": 0,
    }  # fmt: skip
    assert json.loads(JsonFormatter().format(record(level(5), "x")))["v"] == 5
    error = json.loads(JsonFormatter().format(record(logging.ERROR, "Failed", exc_info=raised("boom"))))
    assert (error["err"], "v" in error) == ("boom", False)
    assert error["stacktrace"].endswith("ValueError: boom")


@pytest.mark.parametrize(
    ("verbosity", "number"), [(-1, 20), (0, 20), (1, 19), (2, 18), (3, 17), (4, 10), (5, 9), (13, 1), (99, 1)]
)
def test_verbosity_maps_to_levels(verbosity: int, number: int) -> None:
    assert level(verbosity) == number


@given(st.integers(0, 13))
def test_verbosity_survives(verbosity: int) -> None:
    assert verbosity_of(level(verbosity)) == verbosity


@given(st.integers(1, 60), st.integers(0, 13))
def test_a_higher_verbosity_never_shows_less(number: int, verbosity: int) -> None:
    assert level(verbosity + 1) <= level(verbosity)
    assert 0 <= verbosity_of(number) <= 13


TOKEN = "eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJrdWJlIn0.c2lnbmF0dXJl-_x"


def test_secrets_are_in_no_line() -> None:
    text, shown = f"Authorization: Bearer {TOKEN}", "Authorization: Bearer <redacted>"
    assert shown in TextFormatter().format(record(logging.INFO, "%s", text))
    assert json.loads(JsonFormatter().format(record(logging.INFO, "%s", text)))["msg"] == shown
    failed = record(logging.ERROR, "x", exc_info=raised(text))
    for formatter in (TextFormatter(), JsonFormatter()):
        assert TOKEN not in formatter.format(failed)


FORGED = "web\nE1121 19:48:06.478251       1 app.py:1] forged \x1b[2J \x9b1m \u202egnp.exe\u2028 \x00 \udc80"
SHOWN = r"web\nE1121 19:48:06.478251       1 app.py:1] forged \x1b[2J \x9b1m \u202egnp.exe\u2028 \x00 \udc80"


def test_text_cannot_be_made_to_look_like_another_line() -> None:
    line = TextFormatter().format(record(logging.WARNING, "Cannot watch: %s", FORGED))
    assert line.endswith(f"] Cannot watch: {SHOWN}")
    lines = TextFormatter().format(record(logging.ERROR, "Failed", exc_info=raised(FORGED))).split("\n")
    assert lines[-2:] == ["  ValueError: web", f"  {SHOWN.partition(chr(92) + 'n')[2]}"]
    assert all(line.startswith("  ") for line in lines[1:])


def test_json_keeps_the_text_as_ascii() -> None:
    for text in (FORGED[:-1], "\x7f", "\U000e0001", "Grüße"):
        for made in (record(logging.INFO, "%s", text), record(logging.INFO, "A name=%s", text)):
            line = JsonFormatter().format(made)
            assert line.isprintable()
            assert text in json.loads(line).values()
    assert "Grüße" in JsonFormatter().format(record(logging.INFO, "Grüße"))


def test_lines_have_an_end() -> None:
    long = "x" * 100_000
    line = TextFormatter().format(record(logging.INFO, "Said %s", long))
    assert len(line) < 5000
    assert line.endswith("x... (95909 more characters)")
    for made in (record(logging.INFO, "%s", long), record(logging.INFO, "A name=%s", long)):
        assert len(JsonFormatter().format(made)) < 5000
    trace = raised("\n".join(f"line {n}" for n in range(5000)))
    for formatter in (TextFormatter(), JsonFormatter()):
        text = formatter.format(record(logging.ERROR, "x", exc_info=trace))
        assert len(text) < 10_000
        assert "line 4999" in text
        assert "more lines)" in text


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_a_reader_that_does_not_read_costs_lines_but_no_time(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    handler = StreamHandler(writer, writer)
    handler.setFormatter(logging.Formatter("%(message)s"))
    start = time.monotonic()
    for n in range(3000):
        handler.handle(record(logging.INFO, "line %04d %s", n, "x" * 100))
    assert time.monotonic() - start < 30  # 3000 times the 50 ms that a line may wait would be 150 s
    assert handler.dropped > 1000
    text = os.read(reader, 1 << 20).decode()
    written = 3000 - handler.dropped
    assert text.splitlines()[written - 1].startswith(f"line {written - 1:04d}")
    lost = handler.dropped
    handler.handle(record(logging.INFO, "again"))
    assert os.read(reader, 1 << 20).decode() == f"{lost} log lines dropped: the reader was too slow\nagain\n"
    assert handler.dropped == 0


def test_errors_may_go_to_a_stream_of_their_own(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    other_reader, other_writer = os.pipe()
    handler = StreamHandler(errors=writer, infos=other_writer)
    handler.setFormatter(logging.Formatter("%(message)s"))
    for number, text in ((logging.INFO, "info"), (logging.WARNING, "warning"), (logging.ERROR, "error")):
        handler.handle(record(number, text))
    assert os.read(reader, 100) == b"error\n"
    assert os.read(other_reader, 100) == b"info\nwarning\n"
    os.close(other_reader)
    os.close(other_writer)


def test_a_closed_stream_or_a_wrong_call_affects_no_caller(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    handler = StreamHandler(writer, writer)
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.handle(record(logging.INFO, "%d apples", "many"))
    assert b"cannot format a log line of engine.py:95" in os.read(reader, 1000)
    closed_reader, closed_writer = os.pipe()
    os.close(closed_reader)
    gone = StreamHandler(closed_writer, closed_writer)
    gone.handle(record(logging.INFO, "x"))
    assert gone.dropped == 1
    os.close(closed_writer)


def test_json_has_the_pairs_of_a_message_as_fields() -> None:
    def fields(message: str, *args: object) -> dict[str, object]:
        line = json.loads(JsonFormatter().format(record(logging.ERROR, message, *args)))
        del line["ts"], line["caller"]
        return line

    assert fields("Synced family=%s count=%d took=%.3f", "IPv4", 3, 0.5) == {
        "msg": "Synced",
        "family": "IPv4",
        "count": 3,
        "took": 0.5,
    }
    assert fields("Failed error=%r", "no such file") == {"msg": "Failed", "err": "no such file"}
    assert fields("Cannot read %s error=%s", "a", "b") == {"msg": "Cannot read a error=b"}
    assert fields("A token=%s", "0123456789abcdef") == {"msg": "A", "token": "<redacted>"}
    assert fields("Nothing") == {"msg": "Nothing"}


def test_lines_for_the_info_stream_are_held_back_and_errors_never(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    other_reader, other_writer = os.pipe()
    handler = StreamHandler(errors=writer, infos=other_writer, buffer=12)
    handler.setFormatter(logging.Formatter("%(message)s"))
    os.set_blocking(other_reader, False)
    for number, text in ((logging.INFO, "first"), (logging.ERROR, "error"), (logging.INFO, "other")):
        handler.handle(record(number, text))
    assert os.read(reader, 100) == b"error\n"
    with pytest.raises(BlockingIOError):
        os.read(other_reader, 100)
    handler.handle(record(logging.INFO, "third"))  # beyond 12 bytes
    assert os.read(other_reader, 100) == b"first\nother\n"
    handler.flush()
    assert os.read(other_reader, 100) == b"third\n"
    os.close(other_reader)
    os.close(other_writer)


@pytest.mark.parametrize(
    ("patterns", "verbosity", "shown"),
    [
        ((), 2, {"engine.py": 2, "watch.py": 2}),
        ((("engine", 4),), 2, {"engine.py": 4, "watch.py": 2}),
        ((("e*", 3), ("engine", 9)), 0, {"engine.py": 3, "events.py": 3, "watch.py": 0}),
        ((("[^e]*", 5),), 0, {"engine.py": 0, "watch.py": 5}),
        ((("engine", 1),), 4, {"engine.py": 4}),  # a pattern only adds lines, as in klog
    ],
)
def test_vmodule(patterns: tuple[tuple[str, int], ...], verbosity: int, shown: dict[str, int]) -> None:
    logger = logging.getLogger("kubeproxy")
    before = logger.level
    try:
        chosen = Verbosity(verbosity, patterns)
        for file, highest in shown.items():
            for number in range(10):
                made = record(level(number), "x")
                made.filename = file
                visible = logger.isEnabledFor(made.levelno) and chosen.filter(made)
                assert visible == (number <= highest), (file, number)
        chosen.set(9)
        made.filename = "watch.py"
        assert logger.isEnabledFor(level(9))
        assert chosen.filter(made)
    finally:
        logger.setLevel(before)


PROGRAM = """
import logging, sys
from kubeproxy.config.fields import Logging, LogOptions, OutputRouting
from kubeproxy.report.logs import level, setup
routing = OutputRouting(split_stream=len(sys.argv) > 3, info_buffer_size=1000)
setup(Logging(verbosity=int(sys.argv[1]), format=sys.argv[2], options=LogOptions(text=routing, json=routing)))
log = logging.getLogger("kubeproxy.engine")
log.info("info"); log.log(level(2), "two"); log.debug("four"); log.error("error")
logging.getLogger("asyncio").info("not shown"); logging.getLogger("asyncio").warning("other")
raise SystemError("Bearer abcdefghijk")
"""


def program(*args: str) -> tuple[list[str], list[str]]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *args], capture_output=True, text=True, check=False)
    return done.stdout.splitlines(), done.stderr.splitlines()


def messages(lines: list[str]) -> list[str]:
    return [line.partition("] ")[2] for line in lines if re.match(r"[IWEF]\d{4} ", line)]


def test_setup_applies_to_the_whole_process() -> None:
    out, err = program("0", "text")
    assert (out, messages(err)) == ([], ["info", "error", "other", "Uncaught error"])
    assert err[-1] == "  SystemError: Bearer <redacted>"
    assert messages(program("2", "text")[1])[:3] == ["info", "two", "error"]
    assert messages(program("4", "text")[1])[:3] == ["info", "two", "four"]
    out, err = program("0", "text", "split")
    assert messages(out) == ["info", "other"]
    assert messages(err) == ["error", "Uncaught error"]
    assert [json.loads(line)["msg"] for line in program("0", "json")[1]] == ["info", "error", "other", "Uncaught error"]
