"""The Host headers that each server accepts."""

from __future__ import annotations

import pytest

from kubeproxy.server.http import refused_host


@pytest.mark.parametrize("local", ["127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1"])
@pytest.mark.parametrize(
    ("host", "answered"),
    [
        ("", True),
        ("localhost", True),
        ("localhost:10249", True),
        ("LocalHost.", True),
        ("127.0.0.1:10249", True),
        ("10.0.0.7", True),
        ("[::1]:10249", True),
        ("::1", True),
        ("[fe80::1%eth0]", True),
        ("evil.example", False),
        ("evil.example:10249", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("[evil.example]", False),
        ("::1.evil.example", False),
        ("2130706433", False),
        (":10249", False),
    ],
)
def test_loopback_answers_addresses_and_localhost(local: str, host: str, answered: bool) -> None:
    assert (refused_host(host, local) is None) == answered


@pytest.mark.parametrize("local", ["10.0.0.7", "2001:db8::7", "::ffff:10.0.0.7"])
def test_other_addresses_answer_any_name(local: str) -> None:
    assert refused_host("node-a.example:10256", local) is None
