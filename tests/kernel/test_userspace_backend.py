"""Userspace mode's rules on a real kernel: redirects, repairs of damage, and connections that must not loop.

The test's thread is the node, in a separate network namespace; a client is in another one.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import pairwise

import pytest
from hypothesis import given
from msgspec.structs import replace

from kubeproxy.backends.mode import Depth, ForeignChange
from kubeproxy.backends.userspace import backend
from kubeproxy.backends.userspace.backend import UserspaceBackend
from kubeproxy.backends.userspace.cleanup import cleanup
from kubeproxy.backends.userspace.listeners import Listeners
from kubeproxy.backends.userspace.ruleset import TABLE
from kubeproxy.backends.userspace.udp import Sessions
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.netlink.protocol import Netlink
from kubeproxy.kernel.nftables.nfnetlink import Transactions
from kubeproxy.kernel.nftables.reader import TableReader
from kubeproxy.model.addresses import Family, pack
from kubeproxy.model.plan import (
    Action,
    FamilyGlobals,
    Frontend,
    FrontendKind,
    Globals,
    Policies,
    Policy,
    ServicePlan,
    ServicePortKey,
)
from kubeproxy.model.plan import Traffic as Treatment
from support.carrying import (
    TCP,
    TIMEOUT,
    UDP,
    Stage,
    accept,
    connect,
    destination,
    doing,
    endpoint,
    received,
    stage,
    until,
)
from support.effort import examples
from support.namespaces import inside, namespace, run
from support.random_plans import histories

V4, V6 = Family.IPV4, Family.IPV6
NODE = {V4: "192.0.2.1", V6: "2001:db8::1"}
CLIENT = {V4: "192.0.2.2", V6: "2001:db8::2"}
VIP = {V4: "10.96.0.1", V6: "fd00:96::1"}
ALL = {action: Treatment(action, action, action) for action in Action}
SCTP = socket.IPPROTO_SCTP


def world(family: Family, **fields) -> Globals:
    ours = FamilyGlobals(node_ips=(pack(NODE[family]),), nodeport_ips=None)
    ours = replace(ours, **fields)
    return Globals("node", ipv4=ours if family is V4 else None, ipv6=ours if family is V6 else None)


def frontend(address: str, port: int, protocol: int = TCP, kind: FrontendKind = FrontendKind.CLUSTER, **fields):
    packed = pack(address) if address else b""
    return Frontend(kind, packed + bytes((protocol,)) + port.to_bytes(2, "big"), **fields)


def plan(name: str, frontends, pool=(), action: Action = Action.CLUSTER, protocol: int = TCP, family: Family = V4):
    pool = tuple(sorted(e if isinstance(e, bytes) else destination(e) for e in pool))
    return ServicePlan(
        key=ServicePortKey("ns", name, "", protocol, family),
        frontends=tuple(frontends),
        cluster=pool,
        local=pool,
        policies=Policies(Policy.CLUSTER, Policy.CLUSTER),
        internal=ALL[action],
        external=ALL[action],
        affinity=0,
        hairpin=(),
        serving=pool,
    )


class Node:
    """The backend with its data path, and functions that change Services."""

    def __init__(self, made: Stage, family: Family, ports: range = range(0)) -> None:
        self.stage = made
        self.backend = UserspaceBackend.open(
            family, world(family), made.path, Listeners(made.path, Sessions(made.path), ports)
        )
        self.wanted: dict[tuple[str, str], tuple[ServicePlan, ...]] = {}

    def resync(self) -> None:
        list(self.backend.resync(self.wanted))

    def sync(self, name: str, *plans: ServicePlan) -> None:
        self.wanted = {key: value for key, value in self.wanted.items() if key[1] != name}
        if plans:
            self.wanted["ns", name] = plans
        list(self.backend.sync([(("ns", name), plans)]))


def difference(backend: UserspaceBackend) -> ForeignChange | None:
    """Return the reason why an inspection has to read everything, because another program committed a transaction."""
    run("nft", "add table ip elsewhere; delete table ip elsewhere")
    return backend.inspect(Depth.THOROUGH)


@contextmanager
def node(family: Family = V4, **fields) -> Iterator[tuple[Node, str]]:
    """A node with an empty table, and the name of its client's namespace."""
    with stage() as made, namespace() as client:
        run("ip", "link", "add", "up0", "type", "veth", "peer", "name", "up0", "netns", client)
        for where, own in (((), NODE), (("-n", client), CLIENT)):
            run("ip", *where, "link", "set", "up0", "up")
            bits = "24" if family is V4 else "64"
            nodad = () if family is V4 else ("nodad",)
            run("ip", *where, "address", "add", f"{own[family]}/{bits}", "dev", "up0", *nodad)
        run("ip", "-n", client, "-6" if family is V6 else "-4", "route", "add", "default", "via", NODE[family])
        # The node sends packets to Services by its default route; the rules redirect them.
        run("ip", "-6" if family is V6 else "-4", "route", "add", "default", "via", CLIENT[family])
        found = Node(made, family, **fields)
        found.resync()
        with closing(found.backend):
            yield found, client


def outcome(address: str, port: int, protocol: int = TCP, source: str = "") -> str:
    """Return a client's result: the endpoint's answer, or the kind of refusal."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM if protocol == TCP else socket.SOCK_DGRAM) as sock:
        sock.settimeout(TIMEOUT)
        if source:
            sock.bind((source, 0))
        try:
            sock.connect((address, port))
            with suppress(PermissionError):  # UDP that is rejected on its way out; recv returns the reason
                sock.send(b"?")
            return sock.recv(100).decode()
        except OSError as error:
            return errno.errorcode[error.errno or 0]


@contextmanager
def answering(sock: socket.socket, answer: bytes = b"hello") -> Iterator[socket.socket]:
    """An endpoint that answers one client after the other."""
    tcp = sock.type == socket.SOCK_STREAM
    with closing(sock):
        ended = False

        def work() -> None:
            sock.settimeout(0.05)
            while not ended:
                try:
                    if tcp:
                        with accept(sock) as link:
                            link.sendall(answer)
                    else:
                        sock.sendto(answer, sock.recvfrom(100)[1])
                except TimeoutError:
                    continue

        with doing(work):
            try:
                yield sock
            finally:
                ended = True


def test_rules_of_other_programs_are_detected_when_the_table_is_created(monkeypatch) -> None:
    with node() as (made, _):
        commit = Transactions.commit

        def meddled(transactions: Transactions, parts: Sequence[bytes]) -> None:
            commit(transactions, parts)
            run("nft", f"insert rule ip {TABLE} nat-prerouting accept")

        monkeypatch.setattr(Transactions, "commit", meddled)
        made.resync()
        monkeypatch.setattr(Transactions, "commit", commit)
        assert "changed by another program" in made.backend.inspect(Depth.QUICK).what
        made.resync()
        assert difference(made.backend) is None
        assert "\taccept" not in run("nft", "list", "chain", "ip", TABLE, "nat-prerouting")


def test_no_program_is_started_to_make_the_table(monkeypatch) -> None:
    with node() as (made, _), monkeypatch.context() as without:
        without.setattr(subprocess, "Popen", None)
        made.resync()


def test_a_service_that_waits_for_a_port_gets_the_next_free_one() -> None:
    with node(ports=range(4100, 4101)) as (made, _), answering(endpoint()) as server:
        made.sync("one", plan("one", [frontend(VIP[V4], 80)], [server]))
        made.sync("two", plan("two", [frontend(VIP[V4], 81)], [server]))
        assert [outcome(VIP[V4], port) for port in (80, 81)] == ["hello", "ECONNREFUSED"]
        made.sync("one")
        assert outcome(VIP[V4], 81) == "hello"
        made.wanted = {("ns", "three"): (plan("three", [frontend(VIP[V4], 82)], [server]),)}
        made.resync()
        assert outcome(VIP[V4], 82) == "hello"
        made.sync("four", plan("four", [frontend(VIP[V4], 83)], [server]))
        made.sync("four")
        made.sync("three")
        assert not list(made.backend._listeners.names()), "who left the queue gets no port"
        assert difference(made.backend) is None


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Make this process unable to open further descriptors."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_services_that_found_no_descriptor_are_served_once_there_are_some(monkeypatch) -> None:
    monkeypatch.setattr(backend, "AGAIN", 1)
    with node() as (made, _), answering(endpoint()) as server:
        with no_descriptors():
            for port in (80, 81):
                made.sync(str(port), plan(str(port), [frontend(VIP[V4], port)], [server]))
            made.backend.upkeep()
        assert [outcome(VIP[V4], port) for port in (80, 81)] == ["ECONNREFUSED"] * 2
        made.backend.upkeep()
        made.backend.upkeep()
        assert [outcome(VIP[V4], port) for port in (80, 81)] == ["hello"] * 2
        assert difference(made.backend) is None


@pytest.mark.parametrize("family", [V4, V6])
@pytest.mark.parametrize("protocol", [TCP, UDP])
def test_traffic_of_others_and_of_the_node_is_carried(family: Family, protocol: int) -> None:
    with node(family) as (made, client), answering(endpoint(protocol, family)) as server:
        nodeport = frontend("", 30080, protocol, FrontendKind.NODEPORT)
        fronts = [frontend(VIP[family], 80, protocol), nodeport]
        made.sync("web", plan("web", fronts, [server], protocol=protocol, family=family))
        for address, port in ((VIP[family], 80), (NODE[family], 30080)):
            assert inside(client, lambda a=address, p=port: outcome(a, p, protocol)) == "hello"
            assert outcome(address, port, protocol) == "hello"
        made.sync("web", plan("web", fronts, action=Action.REJECT, protocol=protocol, family=family))
        assert inside(client, lambda: outcome(VIP[family], 80, protocol)) == "ECONNREFUSED"
        assert outcome(NODE[family], 30080, protocol) == "ECONNREFUSED"


def test_an_interface_without_an_address_will_do() -> None:
    """Interfaces of pods often have no address; a plain redirect would drop packets from them."""
    with node() as (made, client), answering(endpoint()) as server:
        run("ip", "link", "add", "pod0", "type", "veth", "peer", "name", "pod0", "netns", client)
        run("ip", "link", "set", "pod0", "up")
        run("ip", "route", "add", "10.244.0.9/32", "dev", "pod0")
        run("ip", "-n", client, "link", "set", "pod0", "up")
        run("ip", "-n", client, "address", "add", "10.244.0.9/32", "dev", "pod0")
        run("ip", "-n", client, "route", "add", f"{VIP[V4]}/32", "via", "169.254.1.1", "dev", "pod0", "onlink")
        hardware = run("ip", "-o", "link", "show", "pod0").split("link/ether ")[1].split()[0]
        run("ip", "-n", client, "neighbour", "add", "169.254.1.1", "lladdr", hardware, "dev", "pod0")
        made.sync("web", plan("web", [frontend(VIP[V4], 80)], [server]))
        assert inside(client, lambda: outcome(VIP[V4], 80, source="10.244.0.9")) == "hello"


def test_an_endpoint_that_is_the_service_itself_does_not_loop() -> None:
    with node() as (made, client):
        itself = pack(VIP[V4]) + (80).to_bytes(2, "big")
        made.sync("web", plan("web", [frontend(VIP[V4], 80)], [itself]))
        run("ip", "address", "add", f"{VIP[V4]}/32", "dev", "lo")  # so that the attempt fails at once
        assert inside(client, lambda: outcome(VIP[V4], 80)) == "ECONNRESET"
        until(lambda: made.stage.path.descriptors.used == 0, "one connection, not one after the other")


def test_connections_survive_a_resync_and_a_failed_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    with node() as (made, _), endpoint() as server:
        made.sync("web", plan("web", [frontend(VIP[V4], 80)], [server]))
        with connect((VIP[V4], 80)) as client, accept(server) as link:
            made.resync()
            client.sendall(b"1")
            assert link.recv(1) == b"1"

            def refuse(parts: object) -> None:
                raise ApplyError("no")

            with monkeypatch.context() as broken:
                broken.setattr(made.backend._transactions, "commit", refuse)
                with pytest.raises(ApplyError):
                    made.sync("more", plan("more", [frontend("10.96.0.2", 80)], [server]))
                with pytest.raises(ApplyError):
                    made.sync("web")
            made.wanted["ns", "web"] = (plan("web", [frontend(VIP[V4], 80)], [server]),)
            made.resync()
            client.sendall(b"2")
            assert link.recv(1) == b"2"
            link.shutdown(socket.SHUT_WR)
            assert received(client) == (b"", False)
        with answering(server):
            assert outcome("10.96.0.2", 80) == "hello"


@examples(15)
@given(histories(max_size=3))
def test_syncs_and_a_resync_have_the_same_result(history) -> None:
    """The kernel lists the result of each; its rules are those that were written."""
    globals_, states = history
    (family,) = globals_.families
    with stage() as made:
        backend = UserspaceBackend.open(
            family, globals_, made.path, Listeners(made.path, Sessions(made.path), range(0))
        )
        with closing(backend):
            list(backend.resync({}))
            for earlier, later in pairwise([{}, *states]):
                names = earlier.keys() | later.keys()
                changed = [name for name in sorted(names) if earlier.get(name) != later.get(name)]
                list(backend.sync([(name, later.get(name, ())) for name in changed]))
                assert difference(backend) is None
            synced, listening = backend._served, set(backend._listeners.names())
            list(backend.resync(states[-1]))
            assert (backend._served, set(backend._listeners.names())) == (synced, listening)
            assert difference(backend) is None
            with closing(TableReader(family, TABLE, Netlink.open())) as view:
                assert view.contents().chains == backend._ruleset.definition().chains
            list(backend.sync([(name, ()) for name in states[-1]]))
            assert (backend._served, list(backend._listeners.names())) == ({}, [])
            assert difference(backend) is None


def test_changes_by_other_programs_are_noticed() -> None:
    with node() as (made, _), endpoint() as server:
        made.sync("web", plan("web", [frontend(VIP[V4], 80)], [server]))
        table = "kube-proxy-userspace"
        assert difference(made.backend) is None
        run("nft", f"delete element ip {table} outside-services {{ {VIP[V4]} . tcp . 80 }}")
        assert made.backend.inspect(Depth.QUICK) is None
        found = made.backend.inspect(Depth.THOROUGH)
        assert "elements of outside-services" in found.what
        assert not found.certain
        made.resync()
        assert difference(made.backend) is None
        run("nft", f"flush chain ip {table} nat-output")
        assert "changed by another program" in made.backend.inspect(Depth.QUICK).what
        run("nft", "delete", "table", "ip", table)
        assert "changed by another program" in made.backend.inspect(Depth.QUICK).what
        made.resync()
        assert difference(made.backend) is None
        for harm in (
            f"add table ip {table} {{ flags dormant ; }}",
            f"add chain ip {table} nat-output {{ policy drop ; }}",
            f"add chain ip {table} stray {{ type filter hook forward priority 0 ; policy drop ; }}",
        ):
            run("nft", harm)
            assert "changed by another program" in made.backend.inspect(Depth.QUICK).what
            made.resync()
            assert difference(made.backend) is None


def test_other_programs_changes_elsewhere_cause_one_read() -> None:
    with node() as (made, _), endpoint() as server:
        made.sync("web", plan("web", [frontend(VIP[V4], 80)], [server]))
        before = made.backend._generation
        assert difference(made.backend) is None
        assert made.backend._generation > before
        assert made.backend.inspect(Depth.THOROUGH) is None


def test_the_address_that_traffic_is_sent_to_may_change() -> None:
    with node() as (made, client), answering(endpoint()) as server:
        made.sync("web", plan("web", [frontend(VIP[V4], 80)], [server]))
        run("ip", "address", "add", "192.0.2.9/24", "dev", "up0")
        assert made.backend.inspect(Depth.QUICK) is None
        run("sysctl", "-qw", "net.ipv4.conf.up0.promote_secondaries=1")
        run("ip", "address", "del", f"{NODE[V4]}/24", "dev", "up0")
        run("ip", "-n", client, "route", "replace", "default", "via", "192.0.2.9")
        assert "addresses changed" in made.backend.inspect(Depth.QUICK).what
        made.resync()
        assert made.backend.inspect(Depth.QUICK) is None
        assert inside(client, lambda: outcome(VIP[V4], 80)) == "hello"


def test_changed_globals_ask_for_a_resync() -> None:
    with node() as (made, _):
        assert not made.backend.set_world(world(V4))
        assert made.backend.set_world(world(V4, nodeport_ips=(pack(NODE[V4]),)))
        made.resync()
        assert made.backend.set_world(replace(world(V4), masquerade_mark=0x8))


def test_sctp_is_refused_and_reported(caplog) -> None:
    with node() as (made, _), endpoint() as server:
        made.sync("assoc", plan("assoc", [frontend(VIP[V4], 80, SCTP)], [server], protocol=SCTP))
        assert "ns/assoc/SCTP: userspace mode carries TCP and UDP" in caplog.text
        rejected = run("nft", "list", "set", "ip", "kube-proxy-userspace", "node-services-rejected")
        assert f"{VIP[V4]} . sctp . 80" in rejected


def test_clean_up_removes_the_tables() -> None:
    with node() as (made, _), endpoint() as server:
        made.sync("web", plan("web", [frontend(VIP[V4], 80)], [server]))
        assert cleanup() == []
        assert cleanup() == []
        assert run("nft", "list", "tables") == ""


def test_listeners_of_refused_syncs_are_closed_when_their_services_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    with node() as (made, _), endpoint() as server:
        made.sync("web", plan("web", [frontend(VIP[V4], 80)], [server]))

        def refuse(*_: object) -> None:
            raise ApplyError("no")

        with monkeypatch.context() as broken:
            broken.setattr(Transactions, "commit", refuse)
            for number in range(10):
                name = f"s{number}"
                made.wanted = {("ns", name): (plan(name, [frontend("10.96.0.2", 80)], [server]),)}
                with pytest.raises(ApplyError):
                    made.resync()
        # The listener that rules still lead to, and the one that the Service needs now.
        assert {name.key.name for name in made.backend._listeners.names()} == {"web", "s9"}
        with answering(server):
            assert outcome(VIP[V4], 80) == "hello"
        made.resync()
        assert {name.key.name for name in made.backend._listeners.names()} == {"s9"}
