"""ipvs mode on a kernel with IPVS: start, restart, drift, cleanup, and real servers that are removed under traffic."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from kubeproxy.backends.ipvs import INTERFACE
from kubeproxy.backends.ipvs.cleanup import cleanup
from kubeproxy.backends.ipvs.desired import ActualServer
from kubeproxy.backends.ipvs.layout import IpsetId, scheduler_named
from kubeproxy.backends.ipvs.mode import OPERATIONS, used_commands
from kubeproxy.backends.ipvs.wire import NodeKernel
from kubeproxy.backends.leftovers import remove_iptables_rules
from kubeproxy.backends.mode import Depth
from kubeproxy.config.fields import IPVS
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.errors import Unsupported
from kubeproxy.kernel import ipvs
from kubeproxy.kernel.ipset import Ipsets
from kubeproxy.kernel.ipvs import Ipvs, VirtualServer, server_key
from kubeproxy.kernel.proc.sysctl import read_sysctl
from kubeproxy.kernel.route import link_addresses, link_index
from kubeproxy.kernel.xtables import xtables
from kubeproxy.model.addresses import Family, pack
from kubeproxy.model.objects import EndpointPort, ServicePort
from kubeproxy.model.plan import Detector
from kubeproxy.registry import CounterMetric
from lab.netns import open_socket_in
from support.cluster_objects import HERE, endpoint, parsed, service, world
from support.compiled import compile_service
from support.namespaces import namespace, run
from support.places import ROOT

V4, V6 = Family.IPV4, Family.IPV6
VIPS = {V4: "10.96.0.1", V6: "fd00:10:96::1"}
PODS = {V4: ("10.244.0.11", "10.244.0.12"), V6: ("fd00:244::11", "fd00:244::12")}
WORLDS = {
    V4: world(detector=Detector("network", "10.244.0.0/16"), families=[V4]),
    V6: world(detector=Detector("network", "fd00:244::/64"), families=[V6]),
}
NAME = ("default", "web")


class Silent:
    """Metrics that are discarded."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: self


@contextmanager
def opened(family=V4, **settings) -> Iterator:
    config = KubeProxyConfiguration(mode="ipvs", ipvs=IPVS(**settings))
    OPERATIONS.check(config, [family])
    OPERATIONS.prepare(config)
    (backend,) = OPERATIONS.open(config, WORLDS[family], Silent())
    with closing(backend):
        yield backend


def wanted(family, pods, protocol="TCP", **spec):
    ports = [ServicePort(port=80, name="p", protocol=protocol, node_port=30080)]
    subject = service("web", VIPS[family], ports=ports, **spec)
    ends = [endpoint(pod, HERE) for pod in pods]
    piece = parsed(*ends, family=family.label, ports=[EndpointPort(port=8080, name="p", protocol=protocol)])
    return {NAME: compile_service(subject, [piece], WORLDS[family]).plans}


def each_second(backend):
    """The upkeep that the engine requests each second."""
    backend.upkeep()
    return backend.inspect(Depth.QUICK)


def do(steps) -> int:
    return sum(steps)


def sync(backend, plans) -> None:
    do(backend.sync([(NAME, plans.get(NAME, ()))]))


def weights(family=V4, protocol=socket.IPPROTO_TCP):
    with Ipvs.open() as kernel:
        found = kernel.destinations(server_key(pack(VIPS[family]), protocol, 80))
    return {socket.inet_ntop(family, key[:-2]): real.weight for key, real in found.items()}


@pytest.mark.parametrize("family", [V4, V6])
def test_start_programs_the_kernel_and_a_restart_changes_nothing(family) -> None:
    plans = wanted(family, PODS[family], ingress=["203.0.113.1" if family is V4 else "2001:db8:2::1"])
    with opened(family) as backend:
        assert do(backend.resync(plans)) > 0
        assert not each_second(backend)
        assert not backend.inspect(Depth.THOROUGH)
    assert weights(family) == dict.fromkeys(PODS[family], 1)
    assert len(link_addresses(INTERFACE, family)) == 2
    with Ipsets.open() as sets:
        assert len(sets.entries(IpsetId.CLUSTER_IP.named(family))) == 1
    with opened(family) as again:
        assert do(again.resync(plans)) == 0
        assert not each_second(again)


@pytest.mark.parametrize("family", [V4, V6])
def test_an_examination_shows_exactly_the_removals_of_another_program(family) -> None:
    vip, source = ("203.0.113.1", "198.51.100.0/24") if family is V4 else ("2001:db8:2::1", "2001:db8:3::/64")
    plans = wanted(family, PODS[family], ingress=[vip], load_balancer_source_ranges=[source])
    config = KubeProxyConfiguration(mode="ipvs", ipvs=IPVS())
    with opened(family) as backend:
        do(backend.resync(plans))
        (examiner,) = OPERATIONS.examine(config, WORLDS[family], [family])
        with closing(examiner):
            assert list(examiner.everything(plans)) == list(examiner.some(plans)) == []
            assert examiner.caveats == []
            pod = pack(PODS[family][0]) + (8080).to_bytes(2, "big")
            server = VirtualServer(server_key(pack(VIPS[family]), socket.IPPROTO_TCP, 80))
            with Ipvs.open() as kernel:
                kernel.apply([ipvs.ServerChange(ipvs.Verb.DELETE_SERVER, server, ipvs.RealServer(pod))])
            run(used_commands(family).name, "-t", "nat", "-F", "KUBE-LOAD-BALANCER")
            shown = [finding.what for finding in examiner.everything(plans)]
            assert len(shown) == 2
            assert shown[0].startswith("endpoint ")
            assert shown[1] == "the rules of chain KUBE-LOAD-BALANCER"


def test_start_sets_the_sysctls_of_the_mode() -> None:
    with opened(strict_arp=True):
        for key in ("net/ipv4/vs/conntrack", "net/ipv4/vs/expire_nodest_conn", "net/ipv4/conf/all/arp_ignore"):
            assert read_sysctl(key) == "1"


def test_a_scheduler_that_the_kernel_lacks_is_reported() -> None:
    with pytest.raises(Unsupported, match=r"ipvs\.scheduler: .* has no scheduler 'twos'"):
        OPERATIONS.check(KubeProxyConfiguration(mode="ipvs", ipvs=IPVS(scheduler="twos")), [V4])
    with Ipvs.open() as kernel:
        assert kernel.servers() == []


# All schedulers of the guest's kernel; it lacks twos, the newest one.
@pytest.mark.parametrize(
    "name", ["rr", "wrr", "lc", "wlc", "sed", "nq", "sh", "mh", "dh", "lblc", "lblcr", "fo", "ovf"]
)
def test_every_scheduler_is_taken_and_read_back(name: str) -> None:
    OPERATIONS.check(KubeProxyConfiguration(mode="ipvs", ipvs=IPVS(scheduler=name)), [V4])
    key = server_key(pack(VIPS[V4]), socket.IPPROTO_TCP, 80)
    server = scheduler_named(name).server(key, affinity=30)
    with closing(NodeKernel.open(used_commands(V4), CounterMetric())) as kernel:
        kernel.operate([ipvs.ServerChange(ipvs.Verb.ADD_SERVICE, server)])
        assert kernel.servers()[key] == ActualServer(server, {})
        kernel.operate([ipvs.ServerChange(ipvs.Verb.DELETE_SERVICE, server)])


def lose_interface() -> None:
    run("ip", "link", "del", INTERFACE)


def lose_entries() -> None:
    run("ipset", "flush", IpsetId.CLUSTER_IP)


def lose_rules() -> None:
    run(used_commands(V4).name, "-t", "nat", "-F")


def lose_servers() -> None:
    with Ipvs.open() as kernel:
        kernel.apply([ipvs.ServerChange(ipvs.Verb.DELETE_SERVICE, server) for server in kernel.servers()])


def test_removals_by_other_programs_are_repaired() -> None:
    plans = wanted(V4, PODS[V4])
    with opened() as backend:
        do(backend.resync(plans))
        for lose in (lose_interface, lose_entries, lose_rules, lose_servers):
            assert not each_second(backend)
            lose()
            assert "another program" in each_second(backend).what, lose
            do(backend.resync(plans))
        assert not each_second(backend)
        assert not backend.inspect(Depth.THOROUGH)


@pytest.mark.slow("each table of an emulated kernel")
def test_cleanup_removes_exactly_our_objects() -> None:
    foreign = VirtualServer(server_key(pack("198.51.100.1"), socket.IPPROTO_TCP, 443))
    with opened(exclude_cidrs=("198.51.100.0/24",)) as backend, Ipvs.open() as kernel:
        kernel.apply([ipvs.ServerChange(ipvs.Verb.ADD_SERVICE, foreign)])
        do(backend.resync(wanted(V4, PODS[V4])))
        assert foreign.key in {server.key for server in kernel.servers()}
        assert cleanup() == []
        assert remove_iptables_rules() == []
        assert [server.key for server in kernel.servers()] == [foreign.key]
    assert link_index(INTERFACE) is None
    with Ipsets.open() as sets:
        assert sets.counts() == {}
    assert [rule for table in xtables.tables(used_commands(V4).name) for rule in table.rules] == []


# -- under traffic ---------------------------------------------------------------------------------------------------


@pytest.fixture
def pods() -> Iterator[str]:
    """A namespace with two pods, which answer with their address; the test's own namespace is the node."""
    with namespace() as name:
        run("ip", "link", "add", "pods", "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "addr", "add", "10.244.0.1/24", "dev", "pods")
        run("ip", "link", "set", "pods", "up")
        for pod in PODS[V4]:
            run("ip", "-n", name, "addr", "add", f"{pod}/24", "dev", "eth0")
        run("ip", "-n", name, "link", "set", "eth0", "up")
        run("ip", "-n", name, "route", "add", "default", "via", "10.244.0.1")
        with serving(name):
            yield name


@contextmanager
def serving(name: str) -> Iterator[None]:
    program = ROOT / "tests/support/echo_pods.py"
    command = ["ip", "netns", "exec", name, sys.executable, "-ISE", program, *PODS[V4]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def connect() -> socket.socket:
    return socket.create_connection((VIPS[V4], 80), timeout=20)


def ask(connection: socket.socket) -> str:
    connection.sendall(b"?")
    return connection.recv(64).decode()


def test_a_connection_outlives_its_endpoint(pods) -> None:
    first, second = PODS[V4]
    late = 0.0
    with opened() as backend:
        backend._clock = lambda: time.monotonic() + late
        do(backend.resync(wanted(V4, [first])))
        with connect() as old:
            assert ask(old) == first
            sync(backend, wanted(V4, [second]))
            assert weights() == {first: 0, second: 1}
            assert ask(old) == first
            with connect() as new:
                assert ask(new) == second
            late = 7 * 24 * 3600.0
            assert not each_second(backend)
            assert weights() == {first: 0, second: 1}
            assert ask(old) == first
            sync(backend, wanted(V4, [first, second]))
            assert weights() == {first: 1, second: 1}


def test_an_endpoint_without_connections_goes_at_the_first_look(pods) -> None:
    late = 0.0
    with opened() as backend:
        backend._clock = lambda: time.monotonic() + late
        do(backend.resync(wanted(V4, PODS[V4])))
        sync(backend, wanted(V4, PODS[V4][1:]))
        late = 60.0
        assert not each_second(backend)
        assert weights() == {PODS[V4][1]: 1}


def test_a_udp_request_is_answered_if_its_endpoint_goes_meanwhile_and_then_the_flow_moves_on(pods) -> None:
    slow, late = "10.244.0.13", 0.0
    run("ip", "-n", pods, "addr", "add", f"{slow}/24", "dev", "eth0")
    pod = open_socket_in(pods, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    with opened() as backend, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client, pod:
        backend._clock = lambda: time.monotonic() + late
        pod.bind((slow, 8080))
        do(backend.resync(wanted(V4, [slow], protocol="UDP")))
        for end in (pod, client):
            end.settimeout(20)
        client.connect((VIPS[V4], 80))
        client.send(b"?")
        _, peer = pod.recvfrom(64)
        sync(backend, wanted(V4, PODS[V4][1:], protocol="UDP"))
        time.sleep(0.1)  # the kernel removes the connections of a deleted real server within a tick
        pod.sendto(b"!", peer)
        assert client.recv(64) == b"!"
        late = 60.0
        assert not each_second(backend)
        assert weights(protocol=socket.IPPROTO_UDP) == {PODS[V4][1]: 1}
        client.settimeout(0.3)
        assert answer(client, PODS[V4][1])


def answer(client: socket.socket, expected: str) -> bool:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            client.send(b"?")
            if client.recv(64).decode() == expected:
                return True
        except OSError:
            continue
    return False


# -- after a take-over by the Go kube-proxy ------------------------------------------------------------------------

# Chains that its ipvs mode rewrites at each sync, and that its other modes and --cleanup remove (pkg/proxy/ipvs of
# v1.36, iptablesChains and iptablesCleanupChains); no other objects of ours are removed with them.
GO_CHAINS = {
    "nat": ("KUBE-SERVICES", "KUBE-POSTROUTING", "KUBE-NODE-PORT", "KUBE-LOAD-BALANCER", "KUBE-MARK-MASQ"),
    "filter": (
        *("KUBE-FORWARD", "KUBE-NODE-PORT", "KUBE-PROXY-FIREWALL", "KUBE-SOURCE-RANGES-FIREWALL"),
        *("KUBE-IPVS-FILTER", "KUBE-IPVS-OUT-FILTER"),
    ),
}
GO_SETS = {set_id for set_id in IpsetId if set_id not in (IpsetId.DROP, IpsetId.DROP_OUTSIDE)}


def go_writes() -> None:
    """Empty the chains that the Go kube-proxy declares."""
    text = ""
    for table, chains in GO_CHAINS.items():
        text += f"*{table}\n" + "".join(f":{chain} - [0:0]\n" for chain in chains) + "COMMIT\n"
    used_commands(V4).restore([text])


def go_removes() -> None:
    """Remove the jumps to the Go kube-proxy's chains, and these chains."""
    for table in xtables.tables(used_commands(V4).name):
        chains = [chain for chain in GO_CHAINS.get(table.name, ()) if chain in table.chains]
        outside = [rule for rule in table.rules if xtables.chain_of(rule) not in chains]
        rules = [f"-D{rule[2:]}" for rule in outside if xtables.target_of(rule) in chains]
        lines = [f":{chain} - [0:0]" for chain in chains] + rules + [f"-X {chain}" for chain in chains]
        if lines:
            used_commands(V4).restore(["\n".join([f"*{table.name}", *lines, "COMMIT", ""])])


DROPPING = {
    "a local policy without local endpoints": {"internal_traffic_policy": "Local"},
    "source ranges": {"ingress": ["203.0.113.1"], "load_balancer_source_ranges": ["198.51.100.0/24"]},
}


def is_answered(address: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as client:
        client.settimeout(2.5)  # two SYNs
        try:
            client.connect((address, 80))
        except TimeoutError:
            return False
        return bool(ask(client))


@pytest.mark.slow("rules of iptables in an emulated kernel")
@pytest.mark.parametrize("case", DROPPING)
def test_the_go_proxys_rules_remove_our_drops_of_the_nodes_own_connections(pods, case) -> None:
    spec = DROPPING[case]
    front = spec.get("ingress", [VIPS[V4]])[0]
    ports = [ServicePort(port=80, name="p", protocol="TCP")]
    ends = parsed(endpoint(PODS[V4][0], "node-b"), ports=[EndpointPort(port=8080, name="p", protocol="TCP")])
    plans = {NAME: compile_service(service("web", VIPS[V4], ports=ports, **spec), [ends], WORLDS[V4]).plans}
    with opened() as backend:
        do(backend.resync(plans))
        assert not is_answered(front)
        go_writes()
        with Ipvs.open() as kernel:
            server = next(one for one in kernel.servers() if one.key[:-3] == pack(front))
            if not kernel.destinations(server.key):
                real = ipvs.RealServer(pack(PODS[V4][0]) + (8080).to_bytes(2, "big"))
                kernel.apply([ipvs.ServerChange(ipvs.Verb.ADD_SERVER, server, real)])
        assert is_answered(front)


def test_the_go_proxys_cleanup_removes_all_of_our_iptables_rules() -> None:
    with opened() as backend:
        do(
            backend.resync(
                wanted(V4, PODS[V4], ingress=["203.0.113.1"], load_balancer_source_ranges=["198.51.100.0/24"])
            )
        )
        go_removes()
        left = [rule for table in xtables.tables(used_commands(V4).name) for rule in (*table.chains, *table.rules)]
        assert not [text for text in left if "KUBE-" in text]
        with Ipsets.open() as sets:
            for set_id in GO_SETS:
                sets.destroy(set_id.named(V4))
