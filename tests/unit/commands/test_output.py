"""JSON output that goes to a terminal contains no raw control characters from external texts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kubeproxy.commands import UNKNOWN, completed, exit_code, output
from kubeproxy.errors import NoAnswerError, QuestionError

MARKED = {"name": "\u202egnp.exe \u2066\x9b31m\x7f \U000e0041 Zürich"}


@pytest.mark.parametrize("show", [output.json, output.json_line])
def test_json_has_marks_of_direction_and_controls_as_escapes(show, capsysbinary):
    show({"all": [MARKED]})
    shown = capsysbinary.readouterr().out
    assert json.loads(shown)["all"] == [MARKED]
    assert shown.decode().replace("\n", "").isprintable()
    assert "Zürich" in shown.decode()
    assert shown.endswith(b"\n")
    assert (shown.count(b"\n") == 1) is (show is output.json_line)


@pytest.mark.parametrize(("wrong", "unknown", "code"), [((), (), 0), (["x"], (), 1), ((), ["?"], 2), (["x"], ["?"], 1)])
def test_an_error_outranks_an_unknown_result(wrong, unknown, code):
    assert exit_code(wrong=wrong, unknown=unknown) == code


@pytest.mark.parametrize(
    ("line", "width", "lines"),
    [
        ("  x  short", 20, ["  x  short"]),
        ("  x  one two three", 13, ["  x  one two", "     three"]),
        ("       now: one two", 16, ["       now: one", "       two"]),
        ("  x  see `ip route get 10.0.0.1`, then", 16, ["  x  see", "     `ip route get 10.0.0.1`,", "     then"]),
        ("  -  averyverylongword", 10, ["  -", "     averyverylongword"]),
    ],
)
def test_a_long_line_is_wrapped_but_no_command(line, width, lines):
    assert output.wrapped(line, width).split("\n") == lines


@pytest.mark.parametrize(("is_terminal", "count"), [(True, 2), (False, 1)])
def test_only_a_terminal_gets_wrapped_lines(is_terminal, count, monkeypatch, capsys):
    monkeypatch.setattr(output, "get_terminal_size", lambda: os.terminal_size((30, 40)))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    output.marked(output.NOTE, "a text that is longer than a line")
    assert capsys.readouterr().out.count("\n") == count
    output.say("Fix: sysctl -w net.ipv4.conf.all.rp_filter=2")
    output.table(("A", "B"), [("a long cell of this table", "another one")])
    assert capsys.readouterr().out.count("\n") == 3


_FULL = "Error: cannot write to standard output: No space left on device\n"


def _on_a_full_disk(run: str, form: str) -> tuple[int, str]:
    program = f"""
import sys
from kubeproxy.commands import completed, output
from kubeproxy.errors import QuestionError

def fail():
    raise QuestionError("no such Service")

sys.exit(completed(lambda: {run}, "{form}"))"""
    with Path("/dev/full").open("w") as full:
        made = subprocess.run(
            [sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    return made.returncode, made.stderr


@pytest.mark.parametrize("form", ["text", "json"])
def test_an_output_on_a_full_disk_is_unknown_and_not_wrong(form: str) -> None:
    show = {"text": "output.say('x')", "json": "output.json({})"}[form]
    assert _on_a_full_disk(f"{show} or 1", form) == (2, _FULL)


def test_an_error_on_a_full_disk_is_unknown_and_not_wrong() -> None:
    assert _on_a_full_disk("fail()", "json") == (2, f"Error: no such Service\n{_FULL}")


def test_an_error_after_lines_of_json_is_one_more_line(capsys) -> None:
    def run() -> int:
        output.json_line({"change": "new"})
        raise QuestionError("no such Service")

    assert completed(run, "json") == UNKNOWN
    first, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first, last["error"]) == ({"change": "new"}, "no such Service")


def test_an_error_contains_no_secret_in_any_form(capsys) -> None:
    secret = "eyJhbGciOi.abcdefgh.signature"

    def run() -> int:
        raise NoAnswerError(f"the plugin printed {secret}", f"renew {secret}", more=f"the server got {secret}")

    assert completed(run, "json") == UNKNOWN
    out, err = capsys.readouterr()
    assert (secret in out, secret in err) == (False, False)
    assert json.loads(out)["fix"] == "renew <redacted>"


def test_a_warning_of_a_command_contains_no_secret_and_no_control_character() -> None:
    program = """
import logging
from kubeproxy.commands.parsers import run

run(["completion", "bash"])
logging.getLogger("kubeproxy.api").warning("Cannot watch: token=%s", "abcdefgh\\x1b")"""
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert made.stderr == "Cannot watch: token=<redacted>\\x1b\n"
