"""Which clients may connect, and which connections are closed for others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.kernel.proc.processes import Shares, shares_of
from kubeproxy.server.admission import Admission, peer_of


class Connection:
    def __init__(self, name: str) -> None:
        self.name = name
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True

    def __repr__(self) -> str:
        return self.name


class Door:
    """An admission for this number of connections, and the admitted clients."""

    def __init__(self, most: int) -> None:
        self.admission = Admission(lambda: (most, 1))
        self.held: list[Connection] = []

    def come(self, address: str, name: str) -> None:
        """Accept a connection like a server: if there is no room, some time after another connection had to close."""
        if not self.admission.has_room():
            self.admission.make_room()
            for one in [one for one in self.held if one.aborted]:
                self.admission.leave(one)
                self.held.remove(one)
        assert self.admission.has_room()
        self.held.append(Connection(name))
        self.admission.enter(self.held[-1], address)


def test_the_client_with_most_connections_loses_one_first() -> None:
    door = Door(4)
    door.come("10.0.0.9", "probe")
    for n in range(20):
        door.come("192.0.2.1", f"flood {n}")
    door.come("10.0.0.8", "prometheus")
    for n in range(20, 40):
        door.come("192.0.2.1", f"flood {n}")
    assert repr(door.held) == "[probe, prometheus, flood 38, flood 39]"


def test_among_equals_the_oldest_goes() -> None:
    door = Door(3)
    for n in range(5):
        door.come(f"192.0.2.{n}", str(n))
    assert repr(door.held) == "[2, 3, 4]"


def test_no_endpoint_leaves_without_a_tracker() -> None:
    door = Door(2)
    door.come("192.0.2.1", "a")
    door.come("192.0.2.1", "b")
    assert not door.admission.has_room()
    assert not any(one.aborted for one in door.held)


def test_a_closing_connection_still_counts_its_descriptor() -> None:
    admission = Admission(lambda: (2, 1))
    first, second = Connection("first"), Connection("second")
    admission.enter(first, "192.0.2.1")
    admission.enter(second, "192.0.2.1")
    admission.make_room()
    assert (first.aborted, second.aborted, admission.connected, admission.has_room()) == (True, False, 2, False)
    admission.leave(first)
    admission.leave(first)
    assert (admission.connected, admission.has_room()) == (1, True)
    admission.leave(second)
    assert admission.connected == 0


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("192.0.2.1", "192.0.2.2", False),
        ("192.0.2.1", "::ffff:192.0.2.1", True),
        ("2001:db8::1", "2001:db8::2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::1", True),
    ],
)
def test_the_identity_of_a_client(one: str, other: str, same: bool) -> None:
    assert (peer_of(one) == peer_of(other)) == same


@pytest.mark.parametrize(
    ("limit", "shares"),
    [
        (256, (32, 32, 128)),
        (1024, (128, 128, 512)),
        (4096, (512, 512, 2560)),
        (524288, (1024, 65536, 262144)),
        (-1, (1024, 1 << 27, 262144)),
    ],
)
def test_shares_of_the_limit(limit: int, shares: tuple[int, int, int]) -> None:
    assert shares_of(limit) == Shares(*shares)


@given(st.integers(16, 1 << 20))
def test_something_is_always_left_for_the_proxy_itself(limit: int) -> None:
    assert sum(shares_of(limit)) <= limit - min(512, limit // 4)
