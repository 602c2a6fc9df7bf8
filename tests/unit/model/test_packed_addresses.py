"""Addresses and networks: accepted and refused texts, and that no text raises an error."""

import ipaddress
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.model.addresses import (
    Family,
    covers_all,
    destination_text,
    destination_texts,
    family_of,
    merge_ranges,
    network_text,
    pack,
    parse_network,
    parse_networks,
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
    ("text", "meant"),
    [
        ("010.0.0.1", "10.0.0.1"),
        ("10.010.000.0000001", "10.10.0.1"),
        ("00.0.0.0", "0.0.0.0"),
        ("08.09.0.1", "8.9.0.1"),
        ("0256.0.0.1", None),
        ("0x10.0.0.1", None),
        ("010.0.0", None),
        ("fd00::00001", "fd00::1"),
        ("fd00:0000::1", "fd00::1"),
        ("fd00::1:00.2.3.04", "fd00::1:2:304"),
        ("fd00::10000", None),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("::FFFF:0a00:0001", "10.0.0.1"),
        ("::ffff:010.0.0.01", "10.0.0.1"),
        ("0:0:0:0:0:ffff:1.2.3.4", "1.2.3.4"),
        ("::fffe:1.2.3.4", "::fffe:102:304"),
        ("::1.2.3.4", "::1.2.3.4"),
    ],
)
def test_addresses_are_read_as_the_go_kube_proxy_reads_stored_ones(text, meant):
    assert pack(text) == (pack(meant) if meant else None)
    assert meant is None or unpack(pack(text)) == unpack(pack(meant))


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 5), min_size=4, max_size=4))
def test_leading_zeros_mean_nothing(number, zeros):
    plain = str(ipaddress.IPv4Address(number))
    padded = ".".join("0" * count + part for count, part in zip(zeros, plain.split("."), strict=True))
    assert pack(padded) == pack(plain) == pack(f"::ffff:{padded}")


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
        ("10.0.0.0/0008", "10.0.0.0/8"),
        ("10.0.0.0/000", "0.0.0.0/0"),
        ("010.01.0.0/16", "10.1.0.0/16"),
        ("0010.1.2.3/08", "10.0.0.0/8"),
        ("::ffff:10.1.2.3/104", "10.0.0.0/8"),
        ("::ffff:10.1.2.3/128", "10.1.2.3/32"),
        ("::ffff:10.1.2.3/96", "0.0.0.0/0"),
        ("::ffff:10.1.2.3/95", "::fffe:0:0/95"),
        ("::ffff:10.1.2.3/64", "::/64"),
        ("::ffff:10.1.2.3/129", None),
        ("::/0", "::/0"),
        ("10.0.0.0 /8", None),
        ("10.0.0.0/+8", None),
        ("10.0.0.0/8_0", None),
        ("/8", None),
        ("", None),
        ("fe80::%eth0/64", None),
    ],
)
def test_networks(text, expected):
    network = parse_network(text)
    assert (network_text(network) if network is not None else None) == expected


@given(networks_v4 | networks_v6)
def test_networks_are_ranges_and_texts(network):
    ends = (network.network_address.packed, network.broadcast_address.packed)
    assert parse_network(str(network)) == ends
    assert parse_network(network_text(ends)) == ends
    assert covers_all(ends) is (network.prefixlen == 0)


def test_networks_of_a_family_keep_their_order():
    texts = ["10.1.0.0/16", "nonsense", "fd00::/8", "10.0.0.0/16", "::ffff:10.2.0.0/112"]
    networks = [parse_networks(texts, family) for family in Family]
    assert [[network_text(network) for network in family] for family in networks] == [
        ["10.1.0.0/16", "10.0.0.0/16", "10.2.0.0/16"],
        ["fd00::/8"],
    ]


@given(st.text())
def test_no_text_raises(text):
    pack(text)
    parse_network(text)
    parse_network(f"{text}/{text}")


@given(st.lists(networks_v4, max_size=12) | st.lists(networks_v6, max_size=12))
def test_merged_ranges_hold_the_same_addresses(networks):
    merged = merge_ranges(tuple((n.network_address.packed, n.broadcast_address.packed) for n in networks))
    as_networks = [
        network
        for first, last in merged
        for network in ipaddress.summarize_address_range(ipaddress.ip_address(first), ipaddress.ip_address(last))
    ]
    assert sorted(as_networks) == sorted(ipaddress.collapse_addresses(networks))


@given(st.lists(networks_v4, max_size=12))
def test_merged_ranges_are_sorted_and_apart(networks):
    merged = merge_ranges(tuple((n.network_address.packed, n.broadcast_address.packed) for n in networks))
    for (_, last), (first, _) in itertools.pairwise(merged):
        assert int.from_bytes(last, "big") + 1 < int.from_bytes(first, "big")


def test_destinations_are_written_as_users_write_them():
    assert destination_text(b"\x0a\0\0\x01\x1f\x90") == "10.0.0.1:8080"
    assert destination_text(b"\xfd" + b"\0" * 14 + b"\x01\0\x50") == "[fd00::1]:80"


def test_destinations_are_reported_with_their_addresses():
    found = destination_texts([b"\x0a\0\0\x02\x1f\x90", b"\x0a\0\0\x01\0\x50"])
    assert list(found.items()) == [("10.0.0.2:8080", "10.0.0.2"), ("10.0.0.1:80", "10.0.0.1")]
    assert destination_texts([b"\xfd" + b"\0" * 14 + b"\x01\0\x50"]) == {"[fd00::1]:80": "fd00::1"}


def test_families_have_names_and_sizes():
    assert [(f.label, f.address_size) for f in Family] == [("IPv4", 4), ("IPv6", 16)]
