"""Rules compiled from nft's language, and listed in it. tests/kernel/nftables compares the results with nft."""

import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.errors import ApplyError
from kubeproxy.kernel.netlink.protocol import attribute, number_attribute, text_attribute
from kubeproxy.kernel.nftables import compiling, listing
from kubeproxy.kernel.nftables import expressions as x
from kubeproxy.model.addresses import Family, pack

LISTED = [
    ("ip", "ip daddr . meta l4proto . th dport @firewalled-services goto source-ranges"),
    ("ip", "th dport set ip daddr . meta l4proto . th dport map @cluster-services goto cluster"),
    ("ip6", "ip6 daddr set ct original ip6 daddr drop"),
    ("ip", "meta l4proto @transports dnat ip to meta l4proto . th dport . numgen random mod 5 map @nodeport-endpoints"),
    ("ip", "ct original packets >= 20 jump fast-forward"),
    ("ip6", "meta l4proto { tcp, udp } dnat to [fd00::9]:ip6 daddr . meta l4proto . th dport map @pod-services"),
    ("ip6", "meta l4proto { tcp, udp } dnat to [2001:db8::9]:meta l4proto . th dport map @pod-nodeports"),
    ("ip", "fib daddr type local ip daddr != 127.0.0.0/8 goto nodeports"),
    ("ip", "numgen random mod 2 vmap { 0 : goto one, 1 : goto other }"),
    ("ip", "meta l4proto tcp flow add @fast"),
    ("ip", "update @clients { ip saddr . ip daddr timeout 1h30m }"),
    ("ip", "update @clients { jhash ct original ip saddr mod 8 seed 0x1 . ip saddr timeout 3h : ip daddr }"),
    ("ip6", "delete @clients { jhash ct original ip6 saddr mod 8 seed 0x1 . ip6 saddr : ip6 daddr }"),
    ("ip6", "ip6 daddr set jhash ct original ip6 saddr mod 8 seed 0x1 . ip6 saddr map @clients goto known"),
    ("ip", "ip saddr set ip daddr"),
    ("ip6", "dnat to ip6 daddr"),
    ("ip", "ip daddr 192.0.0.0/2 return"),
    ("ip", "iif { 4294967294, 4294967295 } drop"),
]


@pytest.mark.parametrize(("ip", "text"), LISTED)
def test_a_listed_rule_compiles_to_a_rule_with_the_same_listing(ip, text):
    assert listing.text(compiling.rule(text, ip), ip) == text


@pytest.mark.parametrize(
    ("family", "flags", "text"),
    [(Family.IPV4, 3, "dnat to 10.244.0.9:3000"), (Family.IPV6, 3, "dnat to [fd00::9]:3000"), (Family.IPV4, 1, "")],
)
def test_a_translation_by_iptables_is_listed_with_its_destination(family, flags, text):
    address = pack("10.244.0.9" if family is Family.IPV4 else "fd00::9").ljust(16, b"\0")
    info = struct.pack("=I", flags) + address * 2 + (3000).to_bytes(2, "big") * 2 + bytes(8)
    attributes = text_attribute(1, "DNAT") + number_attribute(2, 2) + attribute(3, info)
    ip = "ip" if family is Family.IPV4 else "ip6"
    assert listing.text((x.Opaque("target", attributes),), ip) == (text or 'xt target "DNAT"')


@pytest.mark.parametrize(
    ("name", "info", "text"),
    [
        ("SNAT", struct.pack("=I", 1) + b"\xc0\0\2\x09".ljust(16, b"\0") * 2 + bytes(12), "snat to 192.0.2.9"),
        ("CT", struct.pack("=H", 1) + bytes(30), "notrack"),
        ("CT", struct.pack("=HH", 0, 7) + bytes(28), "ct zone set 7"),
        ("CT", bytes(32), 'xt target "CT"'),
    ],
)
def test_targets_of_iptables_that_change_a_connection_are_listed_like_those_of_nft(name, info, text):
    attributes = text_attribute(1, name) + number_attribute(2, 2) + attribute(3, info)
    assert listing.text((x.Opaque("target", attributes),), "ip") == text


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (
            (x.Immediate(1, b"\x0a\xf4\0\x09"), x.Immediate(2, b"\0P"), x.Nat(1, 2, 1, None, 2, None, 3)),
            "dnat to 10.244.0.9:80",
        ),
        ((x.Immediate(1, b"\0P"), x.Nat(1, 2, port=1)), "dnat to :80"),
        ((x.Immediate(1, b"\x1f\x90"), x.Redirect(1)), "redirect to :8080"),
        ((x.Immediate(1, struct.pack("=I", 0x4000)), x.Meta(3, sreg=1)), "meta mark set 0x00004000"),
        ((x.Immediate(2, b"\1\2\3"),), "[ immediate dreg 2, value 0x010203 ]"),
        ((x.Opaque("notrack", b""),), "notrack"),
    ],
)
def test_rules_of_other_programs_are_listed_in_readable_form(rule, text):
    assert listing.text(rule, "ip") == text


@pytest.mark.parametrize(("ip", "text"), LISTED)
def test_packed_expressions_parse_to_the_same_values(ip, text):
    plain = [each for each in compiling.rule(text, ip) if not isinstance(getattr(each, "set", ""), x.Inline)]
    assert x.parse(b"".join(map(x.pack, plain))) == tuple(plain)


@pytest.mark.parametrize(
    "text", ["ip daddr", "goto", "ip daddr nonsense drop", "tcp dport 80 accept", "th dport set 5", "meta mark set 1"]
)
def test_text_outside_of_the_language_is_an_error(text):
    with pytest.raises(ValueError):
        compiling.rule(text, "ip")


def test_the_index_of_an_interface_is_listed_as_its_name():
    index = socket.if_nametoindex("lo").to_bytes(4, "little")
    loaded = x.Meta(4, dreg=1), x.Compare(1, 0, index), x.Meta(5, dreg=1), x.Compare(1, 1, index)
    assert listing.text(loaded, "ip") == 'iif "lo" oif != "lo"'


def test_a_range_and_an_unknown_expression_are_listed_in_brackets():
    rule = (x.Opaque("log", b"\1\2"), x.Immediate(x.VERDICT, x.RuleVerdict(x.DROP)))
    assert listing.text(rule, "ip") == "[ log 0102 ] drop"
    assert listing.text((x.Range(1, 0, b"\1", b"\2"),), "ip").startswith("[ range sreg 1")


@given(st.integers(min_value=0, max_value=40 * 86400).map(lambda seconds: seconds * 1000))
def test_a_time_reads_back_as_it_is_listed(milliseconds):
    assert compiling.milliseconds(listing.duration(milliseconds)) == milliseconds


@given(st.binary(max_size=200), st.sampled_from(sorted(x.KINDS)))
def test_attributes_of_any_layout_are_kept(body, kind):
    try:
        parsed = x.parse(x.pack(x.Opaque(kind, body)))
    except (KeyError, ValueError, ApplyError):
        return  # As in other parsers of the kernel's bytes: `understood` converts the error to an ApplyError.
    assert len(parsed) == 1
