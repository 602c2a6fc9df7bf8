"""Access to the page: by the client's address, the name in Host, and the browser's site of origin."""

from __future__ import annotations

import pytest

from kubeproxy.config.options import PageAccess, page_access
from kubeproxy.errors import ConfigError
from kubeproxy.page.pages import refusal
from kubeproxy.server.http import Request

LOOPBACK = page_access(["127.0.0.0/8", "::1/128"], [])
OPEN = page_access(["0.0.0.0/0", "::/0"], ["node-a.example", "192.0.2.9"])


def asked(
    access: PageAccess = LOOPBACK,
    peer: str = "127.0.0.1",
    host: str = "localhost:10249",
    origin: str = "",
    site: str = "",
    local: str = "127.0.0.1",
    *,
    is_state: bool = True,
) -> str | None:
    request = Request("GET", "/ui/", "", peer=peer, local=local, host=host, origin=origin, site=site)
    return refusal(access, request, is_state=is_state)


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.3.2.1", "::1", "::ffff:127.0.0.1"])
def test_loopback_is_let_in(peer: str) -> None:
    assert asked(peer=peer) is None


@pytest.mark.parametrize("peer", ["10.0.0.1", "fe80::1%eth0", "::ffff:10.0.0.1", "2001:db8::1", "", "nonsense"])
def test_refused_clients_get_the_allowed_ways(peer: str) -> None:
    why = asked(peer=peer)
    assert why is not None
    assert f"not available to clients at {peer}" in why
    assert "kubectl port-forward" in why
    assert "--page-from" in why


@pytest.mark.parametrize(
    ("host", "answered"),
    [
        ("localhost", True),
        ("localhost:10249", True),  # kubectl port-forward, and ssh -L
        ("localhost:8080", True),  # forwarded to another port of the user's machine
        ("LOCALHOST.", True),
        ("127.0.0.1:10249", True),
        ("127.9.9.9", True),
        ("[::1]:10249", True),
        ("[::ffff:127.0.0.1]:80", True),
        ("", False),
        ("evil.example", False),
        ("evil.example:10249", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example:10249", False),
        ("127.0.0.1@evil.example", False),
        ("0.0.0.0:10249", False),
        ("[::]:10249", False),
        ("10.0.0.7:10249", False),
        ("2130706433", False),
        ("0x7f.1", False),
        ("localhost:80:80", False),
        ("[evil.example]", False),
    ],
)
def test_loopback_is_asked_by_its_own_names(host: str, answered: bool) -> None:
    why = asked(host=host)
    assert (why is None) == answered
    assert asked(host=host, is_state=False) == why
    if why is not None:
        assert "--page-hosts" in why


@pytest.mark.parametrize(
    ("host", "answered"),
    [
        ("10.0.0.7:10249", True),  # the destination address of the connection
        ("node-a.example:10249", True),
        ("NODE-A.example.", True),
        ("192.0.2.9", True),
        ("10.0.0.8:10249", False),
        ("node-b.example", False),
        ("anode-a.example", False),
    ],
)
def test_other_addresses_need_a_listed_host_name(host: str, answered: bool) -> None:
    assert (asked(OPEN, "10.0.0.1", host, local="10.0.0.7") is None) == answered


@pytest.mark.parametrize(
    ("origin", "site", "answered"),
    [
        ("", "", True),
        ("", "same-origin", True),
        ("", "none", True),
        ("http://localhost:10249", "same-origin", True),
        ("https://LOCALHOST:10249", "", True),
        ("http://localhost", "", False),
        ("http://localhost:3000", "same-site", False),
        ("http://evil.example", "cross-site", False),
        ("null", "", False),
        ("", "cross-site", False),
        ("", "same-site", False),
    ],
)
def test_pages_of_others_get_no_state(origin: str, site: str, answered: bool) -> None:
    assert (asked(origin=origin, site=site) is None) == answered
    assert asked(origin=origin, site=site, is_state=False) is None  # any site may contain a link to the page


def test_all_errors_in_flags_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        page_access(["10.0.0.0/33", "x"], ["a b", "node:80", "ok.example"])
    assert str(caught.value).splitlines() == [
        '--page-from: "10.0.0.0/33" is no CIDR such as 10.0.0.0/8',
        '--page-from: "x" is no CIDR such as 10.0.0.0/8',
        '--page-hosts: "a b" is no name or IP address; give one without scheme and port, as node-a.example',
        '--page-hosts: "node:80" is no name or IP address; give one without scheme and port, as node-a.example',
    ]
