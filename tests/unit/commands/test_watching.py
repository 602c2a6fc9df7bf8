"""--watch: the whole answer, then only new, changed and removed lines, until the pipe is closed."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.ask.source import source
from kubeproxy.commands import UNKNOWN, YES, completed, watching
from kubeproxy.commands.watching import CHANGED, GONE, NEW, Row, WatchedAnswer, answered, changes
from kubeproxy.errors import ConfigError, NoAnswerError
from support.answers import valid

ROWS = st.dictionaries(st.sampled_from("abcd"), st.builds(Row, st.tuples(st.text(max_size=1)), st.integers(0, 2)))


def row(text: str, version: int = 1) -> Row:
    return Row((text,), {"text": text, "version": version})


@given(ROWS, ROWS, st.sampled_from(["text", "json"]))
def test_the_changes_lead_from_one_answer_to_the_next(before, after, form):
    made = dict(before)
    for kind, key, found in changes(before, after, form):
        assert (key in before, key in after) == {NEW: (False, True), CHANGED: (True, True), GONE: (True, False)}[kind]
        if kind == GONE:
            assert made.pop(key) == found
        else:
            made[key] = found
    shown = {key: one.fields if form == "json" else one.lines for key, one in after.items()}
    assert {key: one.fields if form == "json" else one.lines for key, one in made.items()} == shown
    assert not list(changes(after, after, form))


def asks(monkeypatch, *answers):
    """Return a question with these answers, after which the user presses Ctrl-C."""
    monkeypatch.setattr(watching, "_EACH", 0.001)
    monkeypatch.setattr(watching, "_REST", 0)
    left = iter(answers)

    def look() -> WatchedAnswer:
        found = next(left, KeyboardInterrupt())
        if isinstance(found, BaseException):
            raise found
        return WatchedAnswer({"rows": len(found)}, lambda: print(f"{len(found)} rows"), found, YES)

    return look


def test_lines_have_a_time_and_a_mark(monkeypatch, capfd):
    one, other = {"a": row("a 1"), "b": row("b 1")}, {"b": Row(("b 2", "  more"), 2), "c": row("c\x1b[1m")}
    look = asks(monkeypatch, one, one, NoAnswerError("no proxy"), NoAnswerError("no proxy"), other)
    assert answered(Namespace(watch=True, output="text"), look) == YES
    printed = capfd.readouterr()
    head, *lines = printed.out.splitlines()
    assert head == "2 rows"
    assert [line[13:] for line in lines if line[2:3] == ":"] == ["changed b 2", "new     c\\x1b[1m", "gone    a 1"]
    assert lines[1] == "  more"
    assert printed.err.splitlines() == ["Error: no proxy", "answered again"]


def test_each_document_is_a_line(monkeypatch, capfd):
    look = asks(monkeypatch, {"a": row("a")}, {"a": row("a", 2)}, {})
    assert answered(Namespace(watch=True, output="json"), look) == YES
    head, *lines = capfd.readouterr().out.splitlines()
    assert json.loads(head)["rows"] == 1
    assert [valid("watched", line)["change"] for line in lines] == ["changed", "gone"]


def test_without_the_option_it_asks_once(monkeypatch, capfd):
    assert answered(Namespace(watch=False, output="text"), asks(monkeypatch, {})) == YES
    assert capfd.readouterr().out == "0 rows\n"


def test_a_closed_pipe_ends_it_silently_although_nothing_changes(monkeypatch, capfd):
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stdout", stream)

    def look() -> WatchedAnswer:
        os.close(reader)
        return WatchedAnswer({}, lambda: None, {}, YES)

    with stream:
        assert completed(lambda: answered(Namespace(watch=True, output="text"), look)) == UNKNOWN
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("option", ["manifests", "kubeconfig"])
def test_objects_that_are_read_once_cannot_be_watched(option):
    given_ = Namespace(**{"manifests": None, "kubeconfig": None, "watch": True, option: "/x"})
    with pytest.raises(ConfigError, match="--watch: the flag needs a running proxy"):
        source(given_)
