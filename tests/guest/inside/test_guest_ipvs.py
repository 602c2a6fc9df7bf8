"""Virtual and real servers in the kernel: they are read as written, and a refusal names its object."""

from __future__ import annotations

import errno

import pytest

from kubeproxy.errors import Unsupported
from kubeproxy.kernel.ipvs import (
    FALLBACK,
    GENERIC,
    PERSISTENT,
    PORT,
    Ipvs,
    RealServer,
    ServerChange,
    Timeouts,
    Verb,
    VirtualServer,
    family_id,
)
from kubeproxy.kernel.netlink.protocol import NETLINK_GENERIC, Netlink, RefusedError, parts
from support.virtual_servers import SCTP, UDP, real, server

SERVERS = [
    server("10.96.0.1"),
    server("10.96.0.1", 53, UDP, scheduler="lc"),
    server("10.96.0.1", 9999, SCTP, scheduler="wrr"),
    server("10.96.0.2", flags=PERSISTENT, timeout=10800),
    server("10.96.0.3", flags=PERSISTENT, timeout=7, prefixlen=24),
    server("10.96.0.4", scheduler="mh", flags=PORT),
    server("10.96.0.5", scheduler="sh", flags=PORT | FALLBACK | PERSISTENT, timeout=60),
    server("fd00:10:96::1"),
    server("fd00:10:96::1", 53, UDP, scheduler="wlc"),
    server("fd00:10:96::2", flags=PERSISTENT, timeout=86400),
    server("fd00:10:96::3", scheduler="sed", flags=PERSISTENT, timeout=1, prefixlen=64),
    *(server("10.96.0.6", number, scheduler=name) for number, name in enumerate(("dh", "nq", "lblc"), 1)),
]


def everything(ipvs: Ipvs) -> dict[bytes, tuple[VirtualServer, dict[bytes, RealServer]]]:
    return {one.key: (one, ipvs.destinations(one.key)) for one in ipvs.servers()}


def timeouts() -> Timeouts:
    """Return the timeouts in the kernel (IPVS_CMD_GET_CONFIG)."""
    with Netlink.open(NETLINK_GENERIC) as netlink:
        (place,) = netlink.ask(family_id(netlink, "IPVS"), GENERIC.pack(13, 1, 0), "the IPVS timeouts", GENERIC.size)
    found = parts(*place)
    return Timeouts(*(int.from_bytes(found[kind], "little") for kind in (4, 5, 6)))


def test_every_kind_of_virtual_server_is_read_back_as_written() -> None:
    with Ipvs.open() as ipvs:
        ipvs.apply([ServerChange(Verb.ADD_SERVICE, one) for one in SERVERS])
        assert everything(ipvs) == {one.key: (one, {}) for one in SERVERS}
        changed = [one._replace(scheduler="rr", flags=PERSISTENT, timeout=33, prefixlen=0) for one in SERVERS]
        ipvs.apply([ServerChange(Verb.SET_SERVICE, one) for one in changed])
        assert everything(ipvs) == {one.key: (one, {}) for one in changed}
        ipvs.apply([ServerChange(Verb.DELETE_SERVICE, one) for one in changed])
        assert everything(ipvs) == {}


def test_real_servers_come_change_and_go() -> None:
    for one, reals in (
        (server("10.96.0.1"), [real("10.244.0.1"), real("10.244.0.1", 9090, weight=7), real("10.244.0.2", weight=0)]),
        (server("fd00:10:96::1"), [real("fd00:244::1"), real("fd00:244::2", weight=65535)]),
    ):
        with Ipvs.open() as ipvs:
            ipvs.apply([ServerChange(Verb.ADD_SERVICE, one), *(ServerChange(Verb.ADD_SERVER, one, e) for e in reals)])
            assert ipvs.destinations(one.key) == {each.key: each for each in reals}
            lighter = reals[0]._replace(weight=0)
            ipvs.apply([ServerChange(Verb.SET_SERVER, one, lighter), ServerChange(Verb.DELETE_SERVER, one, reals[1])])
            assert everything(ipvs)[one.key] == (one, {e.key: e for e in [lighter, *reals[2:]]})
            ipvs.apply([ServerChange(Verb.DELETE_SERVICE, one)])
            assert ipvs.destinations(one.key) == {}


def test_a_refusal_names_its_object_and_stops_nothing_else() -> None:
    one, six, missing = server("10.96.0.1"), server("fd00:10:96::1", protocol=UDP), server("10.96.0.9", 99)
    batch = [
        ServerChange(Verb.ADD_SERVICE, one),
        ServerChange(Verb.ADD_SERVICE, one),
        ServerChange(Verb.DELETE_SERVICE, missing),
        ServerChange(Verb.DELETE_SERVER, one, real("10.244.0.1")),
        ServerChange(Verb.SET_SERVICE, one._replace(scheduler="nonsense")),
        ServerChange(Verb.ADD_SERVICE, six),
    ]
    with Ipvs.open() as ipvs:
        with pytest.raises(RefusedError) as caught:
            ipvs.apply(batch)
        assert [(operation, error.code) for operation, error in caught.value.refused] == [
            (batch[1], errno.EEXIST),
            (batch[2], errno.ESRCH),
            (batch[3], errno.ENOENT),
            (batch[4], errno.ENOENT),
        ]
        assert "cannot delete virtual server TCP 10.96.0.9:99" in str(caught.value)
        assert "real server 10.244.0.1:8080 of virtual server TCP 10.96.0.1:80" in str(caught.value)
        assert "and 1 more" in str(caught.value)
        assert set(everything(ipvs)) == {one.key, six.key}


def test_thousands_at_once() -> None:
    """More messages than fit into one send, and more refusals than fit into one answer."""
    wanted = {
        one.key: (one, {each.key: each for each in (real(f"10.244.{n % 256}.{m}", weight=m) for m in range(1, 5))})
        for n in range(500)
        for one in [server(f"10.96.{n // 256}.{n % 256}", n + 1)]
    }
    batch = [ServerChange(Verb.ADD_SERVICE, one) for one, _ in wanted.values()]
    batch += [ServerChange(Verb.ADD_SERVER, one, each) for one, reals in wanted.values() for each in reals.values()]
    with Ipvs.open() as ipvs:
        ipvs.apply(batch)
        assert everything(ipvs) == wanted
        with pytest.raises(RefusedError) as caught:
            ipvs.apply(batch)
        assert [operation for operation, _ in caught.value.refused] == batch
        ipvs.apply([ServerChange(Verb.DELETE_SERVICE, one) for one, _ in wanted.values()])
        assert everything(ipvs) == {}


def test_timeouts() -> None:
    with Ipvs.open() as ipvs:
        ipvs.set_timeouts(Timeouts(tcp=123, tcp_fin=45, udp=6))
        ipvs.set_timeouts(Timeouts(tcp=0, tcp_fin=0, udp=7))
        assert timeouts() == Timeouts(123, 45, 7)


def test_a_missing_family_is_reported() -> None:
    with Netlink.open(NETLINK_GENERIC) as netlink, pytest.raises(Unsupported, match="NONSENSE"):
        family_id(netlink, "NONSENSE")
