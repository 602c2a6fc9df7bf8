"""Addresses and networks: what is read, what is refused, and that nothing raises."""

import ipaddress
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.model.addresses import (
    Family,
    destination_text,
    destination_texts,
    family_of,
    merge_networks,
    pack,
    parse_network,
    unpack,
)

networks_v4 = st.builds(
    lambda first, prefix: ipaddress.IPv4Network((first, prefix), strict=False),
    st.integers(0, 2**32 - 1),
    st.integers(20, 32) | st.integers(0, 32),
)
networks_v6 = st.builds(
    lambda first, prefix: ipaddress.IPv6Network((first, prefix), strict=False),
    st.integers(0, 2**128 - 1) | st.integers(0, 2**64),
    st.integers(0, 128),
)


@pytest.mark.parametrize("text", ["10.0.0.1", "255.255.255.255", "::1", "fd00::1", "2001:db8::a:b"])
def test_addresses_survive_packing(text):
    packed = pack(text)
    assert packed is not None
    assert unpack(packed) == text
    assert family_of(packed) is (Family.IPV6 if ":" in text else Family.IPV4)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "1",
        "1.2.3",
        "1.2.3.4.5",
        "01.2.3.4",
        "1.2.3.4 ",
        " 1.2.3.4",
        "1.2.3.4/32",
        ":",
        ":::",
        "fe80::1%1",
        "\0",
    ],
)
def test_no_address(text):
    assert pack(text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.0.0.0/8", "10.0.0.0/8"),
        ("10.1.2.3/8", "10.0.0.0/8"),
        (" 10.0.0.0/8\n", "10.0.0.0/8"),
        ("fd00::1/64", "fd00::/64"),
        ("10.0.0.1/32", "10.0.0.1/32"),
        ("10.0.0.1", None),
        ("10.0.0.0/", None),
        ("10.0.0.0/33", None),
        ("10.0.0.0/-1", None),
        ("10.0.0.0/255.0.0.0", None),
        ("10.0.0.0/0.255.255.255", None),
        ("10.0.0.0/8/8", None),
        ("10.0.0.0/\u0668", None),
        ("10.0.0.0/" + "9" * 10_000, None),
        ("/8", None),
        ("", None),
        ("fe80::%eth0/64", None),
    ],
)
def test_networks(text, expected):
    found = parse_network(text)
    assert (str(found) if found is not None else None) == expected


@given(st.text())
def test_no_text_raises(text):
    pack(text)
    parse_network(text)
    parse_network(f"{text}/{text}")


@given(st.lists(networks_v4, max_size=12) | st.lists(networks_v6, max_size=12))
def test_merged_ranges_hold_the_same_addresses(networks):
    merged = merge_networks(networks)
    as_networks = [
        network
        for first, last in merged
        for network in ipaddress.summarize_address_range(ipaddress.ip_address(first), ipaddress.ip_address(last))
    ]
    assert sorted(as_networks) == sorted(ipaddress.collapse_addresses(networks))


@given(st.lists(networks_v4, max_size=12))
def test_merged_ranges_are_sorted_and_apart(networks):
    merged = merge_networks(networks)
    for (_, last), (first, _) in itertools.pairwise(merged):
        assert int.from_bytes(last, "big") + 1 < int.from_bytes(first, "big")


def test_destinations_are_written_as_users_write_them():
    assert destination_text(b"\x0a\0\0\x01\x1f\x90") == "10.0.0.1:8080"
    assert destination_text(b"\xfd" + b"\0" * 14 + b"\x01\0\x50") == "[fd00::1]:80"


def test_destinations_are_told_with_their_addresses():
    found = destination_texts([b"\x0a\0\0\x02\x1f\x90", b"\x0a\0\0\x01\0\x50"])
    assert list(found.items()) == [("10.0.0.2:8080", "10.0.0.2"), ("10.0.0.1:80", "10.0.0.1")]
    assert destination_texts([b"\xfd" + b"\0" * 14 + b"\x01\0\x50"]) == {"[fd00::1]:80": "fd00::1"}


def test_families_know_their_names_and_sizes():
    assert [(f.label, f.address_size) for f in Family] == [("IPv4", 4), ("IPv6", 16)]
