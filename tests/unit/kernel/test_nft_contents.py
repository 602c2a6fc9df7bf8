"""The parser of whole dumps of elements gives the same result as the parser of single elements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.kernel.netlink.protocol import attribute
from kubeproxy.kernel.nftables import nfta
from kubeproxy.kernel.nftables.elements import _alike
from kubeproxy.kernel.nftables.reader import TableReader


def both_ways():
    """Return the elements of a dump from the parser of dumps, and from the parser of single elements."""
    reader = TableReader(2, "t", None)
    at_once = [pair for part in reader.pairs("s") for pair in part]
    return at_once, [(element.key, element.data) for element in reader.all_elements("s")]


def element(key, data=b"", *, more=b""):
    """Return an element as the kernel writes it: without the flag of nested attributes."""
    value = attribute(nfta.SET_ELEM_DATA, attribute(nfta.DATA_VALUE, data)) if data else b""
    return attribute(nfta.LIST_ELEM, attribute(nfta.SET_ELEM_KEY, attribute(nfta.DATA_VALUE, key)) + value + more)


KEYS = st.binary(min_size=8, max_size=8)
VALUES = st.binary(min_size=8, max_size=8)
MORE = st.sampled_from([b"", b"", attribute(nfta.SET_ELEM_TIMEOUT, bytes(8))])


@pytest.fixture
def dumped(monkeypatch):
    def dump(*lists):
        data = b"".join(lists)
        ends = [sum(map(len, lists[: n + 1])) for n in range(len(lists))]
        spans = [(data, end - len(each), end) for each, end in zip(lists, ends, strict=True)]
        monkeypatch.setattr(TableReader, "element_lists", lambda *_: iter(spans))
        return both_ways()

    return dump


@given(data=st.data())
def test_at_once_is_as_one_by_one(data):
    with pytest.MonkeyPatch.context() as patch:
        draw = data.draw
        valued = draw(st.booleans())
        lists = [
            b"".join(
                element(draw(KEYS), draw(VALUES) if valued else b"", more=draw(MORE))
                for _ in range(draw(st.integers(0, 4)))
            )
            for _ in range(draw(st.integers(0, 3)))
        ]
        spans = [(each, 0, len(each)) for each in lists]
        patch.setattr(TableReader, "element_lists", lambda *_: iter(spans))
        at_once, one_by_one = both_ways()
        assert at_once == one_by_one


def test_one_that_is_packed_otherwise_is_read_all_the_same(dumped):
    plain, verdict = element(b"k" * 8, b"v" * 8), element(b"k" * 12, b"v" * 4)
    assert len(plain) == len(verdict)
    found, expected = dumped(plain + verdict)
    assert found == expected
    assert found == [(b"k" * 8, b"v" * 8), (b"k" * 12, b"v" * 4)]


def test_elements_with_timeouts_are_alike(dumped):
    """The end of a key with the size of a timeout is still parsed as a key."""
    timed = [element(bytes([n]) * 8, more=attribute(nfta.SET_ELEM_TIMEOUT, bytes([n]) * 8)) for n in (1, 2)]
    assert dumped(b"".join(timed))[0] == [(b"\1" * 8, b""), (b"\2" * 8, b"")]
    assert _alike(b"".join(timed), 0, len(timed[0]) * 2) is not None
    ended = element(b"k" * 8, more=attribute(nfta.SET_ELEM_KEY_END, attribute(nfta.DATA_VALUE, b"end!")))
    assert len(ended) == len(timed[0])
    assert dumped(timed[0] + ended)[0] == [(b"\1" * 8, b""), (b"k" * 8 + b"end!", b"")]


def test_an_element_that_is_listed_twice_is_yielded_twice(dumped):
    found, _ = dumped(element(b"k" * 8) * 2)
    assert found == [(b"k" * 8, b"")] * 2
