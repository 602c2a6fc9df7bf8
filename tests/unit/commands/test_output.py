"""What commands print for programs goes to a terminal all the same: it has no raw marks of others' texts."""

from __future__ import annotations

import json

import pytest

from kubeproxy.commands import exit_code, output

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
def test_what_is_wrong_outranks_what_is_unknown(wrong, unknown, code):
    assert exit_code(wrong=wrong, unknown=unknown) == code
