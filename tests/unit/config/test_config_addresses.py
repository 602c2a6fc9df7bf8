"""Addresses are parsed as in Go."""

import pytest

from kubeproxy.config.types import KubeProxyConfiguration, with_defaults, with_port
from kubeproxy.model.addresses import network_text, pack, parse_cidr, split_host_port, unpack

IPS = [
    ("10.0.0.1", "10.0.0.1"),
    ("0.0.0.0", "0.0.0.0"),
    ("010.001.000.1", "10.1.0.1"),
    ("100.20.3.0", "100.20.3.0"),
    ("::", "::"),
    ("fd00::10", "fd00::10"),
    ("::ffff:192.0.2.1", "192.0.2.1"),
    ("", None),
    ("10.0.0", None),
    ("10.0.0.256", None),
    ("fe80::1%eth0", None),
    ("[::1]", None),
    (" 10.0.0.1", None),
    ("node-1", None),
]


@pytest.mark.parametrize(("text", "address"), IPS)
def test_ips(text, address):
    parsed = pack(text)
    assert (None if parsed is None else unpack(parsed)) == address


CIDRS = [
    ("10.0.0.0/8", "10.0.0.0/8"),
    ("10.1.2.3/8", "10.0.0.0/8"),
    ("010.0.0.0/08", "10.0.0.0/8"),
    ("0.0.0.0/0", "0.0.0.0/0"),
    ("fd00::1/64", "fd00::/64"),
    ("::ffff:10.0.0.0/104", "10.0.0.0/8"),
    ("::ffff:10.0.0.0/64", None),
    ("10.0.0.0", None),
    ("10.0.0.0/33", None),
    ("10.0.0.0/255.0.0.0", None),
    ("10.0.0.0/-1", None),
    ("10.0.0.0/8 ", None),
    (" 10.0.0.0/8", None),
    ("fd00::/129", None),
    ("primary", None),
    ("", None),
]


@pytest.mark.parametrize(("text", "network"), CIDRS)
def test_cidrs(text, network):
    parsed = parse_cidr(text)
    assert (None if parsed is None else network_text(parsed)) == network


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("1.2.3.4:80", ("1.2.3.4", "80")),
        ("[::1]:80", ("::1", "80")),
        (":80", ("", "80")),
        ("1.2.3.4:", ("1.2.3.4", "")),
        ("1.2.3.4", None),
        ("::1", None),
        ("[::1]", None),
        ("[::1", None),
        ("a:b:c", None),
        ("", None),
    ],
)
def test_host_and_port(text, parts):
    assert split_host_port(text) == parts


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("127.0.0.1", "127.0.0.1:10256"),
        ("127.0.0.1:99", "127.0.0.1:99"),
        ("::1", "[::1]:10256"),
        ("[::1]", "[::1]:10256"),
        ("[::1]:99", "[::1]:99"),
        ("localhost", "localhost"),
        ("", ""),
    ],
)
def test_a_missing_port_is_appended(text, result):
    assert with_port(text, 10256) == result


@pytest.mark.parametrize(
    ("bind", "healthz"),
    [
        ("::", "[::]:10256"),
        ("0.0.0.0", "0.0.0.0:10256"),
        ("::ffff:10.0.0.1", "0.0.0.0:10256"),
        ("nonsense", "0.0.0.0:10256"),
    ],
)
def test_ipv6_is_distinguished_from_ipv4(bind, healthz):
    assert with_defaults(KubeProxyConfiguration(bind_address=bind), set()).healthz_bind_address == healthz
