"""Transactions: packed messages parse to the rendered elements, and their sizes are acceptable to the kernel."""

from collections import Counter

import pytest
from hypothesis import given

from kubeproxy.backends.nftables.layout import OF_RANGES, SHARED, VERDICT_MAPS, Layout, SetId
from kubeproxy.backends.nftables.packing import Packers, Transaction
from kubeproxy.backends.nftables.render import render, translate
from kubeproxy.backends.state import diff
from kubeproxy.kernel.netlink.protocol import HEADER, attributes, messages
from kubeproxy.kernel.nftables import nfnetlink
from kubeproxy.model.addresses import Family
from support.nftables_plans import placed
from support.random_plans import histories

NAMES = {name.encode() + b"\0": name for name in Layout(Family.IPV4, OF_RANGES).sets}


def read(parts):
    """Return (kind, set, key, data) of each element in messages; a verdict's data is the name of its chain."""
    found = []
    for part in parts:
        (at,) = messages(part)
        assert len(part) <= 0xFFFF
        top = {kind: (s, e) for kind, s, e in attributes(part, at.start + 4, at.end)}
        assert part[slice(*top[1])] == b"kube-proxy\0"
        set_id = NAMES[part[slice(*top[2])]]
        for _, first, last in attributes(part, *top[3]):
            key, data = b"", b""
            for kind, s, e in attributes(part, first, last):
                if kind == 1 or kind == 10:
                    key += value(part, s, e)
                elif kind == 2:
                    data = value(part, s, e)
            found.append((at.kind, set_id, key, data))
    return found


def value(part, start, end):
    for kind, s, e in attributes(part, start, end):
        if kind == 1:
            return part[s:e]
        return verdict(part, s, e)
    raise AssertionError


def verdict(part, start, end):
    parts = {kind: part[s:e] for kind, s, e in attributes(part, start, end)}
    assert int.from_bytes(parts[1], "big", signed=True) == -4  # NFT_GOTO
    return parts[2].rstrip(b"\0")


def transaction(family, users=None):
    return Transaction(Packers(family), {set_id: Counter() for set_id in SHARED} if users is None else users)


def flat(kind, elements):
    return sorted((kind, set_id, key, data) for set_id, entries in elements.items() for key, data in entries.items())


@given(histories(max_size=1))
def test_packed_messages_contain_the_rendered_elements(history):
    globals_, (plans,) = history
    (family,) = globals_.families
    items = placed(p for found in plans.values() for p in found)
    subject = transaction(family)
    for item in items:
        translate(item, subject)
    elements = render(items)
    assert sorted(read(subject.messages())) == flat(nfnetlink.NEW_ELEMENT, elements)
    assert subject.elements == sum(map(len, elements.values()))
    assert {str(name).encode() for name in subject.chains()} == {
        chain for set_id in (*VERDICT_MAPS, SetId.RANGE_CHAINS) for chain in elements.get(set_id, {}).values()
    }


@given(histories(min_size=2, max_size=2))
def test_removals_come_before_additions(history):
    globals_, states = history
    (family,) = globals_.families
    one, two = (render(placed(p for found in plans.values() for p in found)) for plans in states)
    delta = diff(one, two)
    subject = transaction(family, {})
    for set_id, entries in delta.added.items():
        for key, data in entries:
            subject.add(set_id, key, data)
    for set_id, keys in delta.removed.items():
        for key in keys:
            subject.remove(set_id, key)
    found = read(subject.messages())
    removed = [entry for entry in found if entry[0] == nfnetlink.DELETE_ELEMENT]
    assert found[: len(removed)] == removed
    assert sorted(e[1:3] for e in removed) == sorted((s, k) for s, keys in delta.removed.items() for k in keys)
    assert sorted(e[1:] for e in found[len(removed) :]) == sorted(
        (s, k, d) for s, entries in delta.added.items() for k, d in entries
    )


@pytest.mark.parametrize("family", list(Family))
def test_many_elements_are_cut_between_elements(family):
    subject = transaction(family)
    size = family.address_size
    pool = tuple(n.to_bytes(size + 2, "big") for n in range(3000))
    key = bytes(size + 8)
    subject.pool(SetId.ENDPOINTS, key, pool)
    for n in range(3000):
        address = n.to_bytes(size, "big")
        subject.add(SetId.AFFINITY_SERVICES, address + bytes(8), b"cluster-%d-30s" % n)
        subject.add(SetId.CLUSTER_SERVICES, address + bytes(8), b"\0\4")
        subject.add(SetId.FIREWALL_ALLOW, (address + address) * 2, b"")
        subject.add(SetId.HAIRPIN, address + address, b"")
        subject.remove(SetId.NO_ENDPOINT_SERVICES, address + bytes(8))
    parts = subject.messages()
    assert len(parts) > 5
    assert all(HEADER.unpack_from(part)[0] == len(part) for part in parts)
    found = read(parts)
    assert Counter(set_id for _, set_id, _, _ in found) == dict.fromkeys(
        (
            SetId.ENDPOINTS,
            SetId.AFFINITY_SERVICES,
            SetId.CLUSTER_SERVICES,
            SetId.FIREWALL_ALLOW,
            SetId.HAIRPIN,
            SetId.NO_ENDPOINT_SERVICES,
        ),
        3000,
    )
    assert [d for _, set_id, _, d in found if set_id == SetId.ENDPOINTS] == [d + b"\0\0" for d in pool]


def test_shared_elements_are_added_for_the_first_service_and_removed_with_the_last():
    users = {set_id: Counter() for set_id in SHARED}
    key = b"\x0a\0\0\1"
    first, second, third = (transaction(Family.IPV4, users) for _ in range(3))
    for _ in range(2):  # two Services with two ports each
        first.next_service()
        first.entry(SetId.CLUSTER_IPS, key, b"")
        first.entry(SetId.CLUSTER_IPS, key, b"")
    assert first.elements == 1
    assert users[SetId.CLUSTER_IPS] == {key: 2}
    second.release(SetId.CLUSTER_IPS, key)
    assert second.elements == 0
    third.release(SetId.CLUSTER_IPS, key)
    assert third.elements == 1
    assert not users[SetId.CLUSTER_IPS]
