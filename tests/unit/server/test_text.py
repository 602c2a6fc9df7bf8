"""External text, made safe to show."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.server.text import LINE, clean, json_bytes, printable, redact

TOKEN = "eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJrdWJlIn0.c2lnbmF0dXJl-_x"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"Authorization: Bearer {TOKEN}", "Authorization: Bearer <redacted>"),
        ("headers={'authorization': 'bearer abc.def-123'}", "headers={'authorization': 'bearer <redacted>'}"),
        ("Authorization: Basic dXNlcjpwYXNz", "Authorization: Basic <redacted>"),
        (f"read {TOKEN} from the file", "read <redacted> from the file"),
        ('{"token": "0123456789abcdef"}', '{"token": "<redacted>"}'),
        ("password=hunter2hunter2 user=x", "password=<redacted> user=x"),
        ("client-key-data: LS0tLS1CRUdJTg==", "client-key-data: <redacted>"),
        ("see https://user:hunter2@10.0.0.1:6443/x", "see https://<redacted>@10.0.0.1:6443/x"),
        ("https://hunter2@proxy", "https://<redacted>@proxy"),
        ("https://10.0.0.1:6443/x and mail@y", "https://10.0.0.1:6443/x and mail@y"),
        ("the bearer of this", "the bearer of this"),
        ("token expired, service web/tokens:80", "token expired, service web/tokens:80"),
    ],
)
def test_secrets_are_not_shown(text: str, shown: str) -> None:
    assert redact(text) == shown


def test_long_text_is_cut_and_counted() -> None:
    assert clean("x" * LINE) == "x" * LINE
    assert clean("x" * (LINE + 5)) == "x" * LINE + "... (5 more characters)"
    assert clean("x" * 10_000_000).endswith(f"... ({10_000_000 - LINE} more characters)")
    assert TOKEN not in clean("x" * 10 + f" Bearer {TOKEN}" * 1000)


@given(st.text(st.characters()))
def test_text_becomes_one_line_with_visible_control_characters(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert (shown == text) == text.isprintable()


@given(st.text())
def test_json_has_the_same_content(text: str) -> None:
    data = json_bytes({"name": text})
    assert json.loads(data) == {"name": text}
    assert data.decode().isprintable()
