"""Faults in recorded rules of the Go kube-proxy are found with a witness, and real packets have its outcomes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice, product

import pytest

from kubeproxy.meaning import found
from kubeproxy.meaning.compare import FirstPacket, Shares, Witness, compare
from kubeproxy.meaning.found import place_of
from kubeproxy.meaning.rules import CompiledRules, NodePlace
from kubeproxy.model.addresses import Family
from support import recorded_rules
from support.namespaces import inside, namespace, run
from support.probed_node import NODE, Node, stated
from support.recorded_rules import HARMLESS, written

PLAIN = "10.96.1.0"
PACKETS = 150
FEW = 10
"""Number of packets if all have the same outcome: the kernel limits the rate of errors."""
ROUNDS = 8
"""Rounds after which a client has reached all of three endpoints, with an error of 1 in 10^13."""
FAR = 0.15
"""Permitted difference of a measured share from that of the rules: five standard deviations of 1/3."""

NFT = {
    "element": (r"\n.*10\.96\.1\.1 \. tcp \. 80 : goto service-.*", ""),
    "endpoint": (r"(mod 3 map { 0 : )10\.244\.0\.10", r"\g<1>10.244.0.13"),
    "share": (r"mod 3 map { 0 : (\S+ \. \d+), 1 : (\S+ \. \d+)", r"mod 4 map { 0 : \1, 3 : \1, 1 : \2"),
    "masquerade": (r"\n.*masquerade clusterIP traffic from outside cluster.*", ""),
    "hairpin": (r"\n.*10\.244\.0\.11 \. 10\.244\.0\.11 \. tcp \. 3000,", ""),
    "priority": (r"(hook prerouting priority) dstnat - 10", r"\1 filter"),
    "port": (rf"({PLAIN} \. tcp \.) 80", r"\1 81"),
    "protocol": (rf"({PLAIN} \.) udp( \. 80)", r"\1 sctp\2"),
    "target port": (r"(mod 3 map { 0 : 10\.244\.0\.10 \.) 3000", r"\1 3001"),
    "reject": (r"\n\s*reject\n", "\n"),
    "jump": (r"(chain filter-forward {\n.*\n.*)\n.*jump cluster-ips-check", r"\1"),
}
"""Faults by name: a pattern in the listing of nft, and its replacement."""
IPTABLES = {
    "rule": (rf"\n-A KUBE-SERVICES -d {PLAIN}/32 -p tcp .*", ""),
    "endpoint": (r"(default/plain:tcp.*--to-destination 10\.244\.0\.)10:", r"\g<1>13:"),
    "share": (r"(default/plain:tcp -> .* --probability) 0\.33\d+", r"\1 0.60000000000"),
    "masquerade": (r"\n.*default/plain:tcp cluster IP.*KUBE-MARK-MASQ", ""),
    "port": (rf"(-A KUBE-SERVICES -d {PLAIN}/32 -p tcp .*--dport) 80", r"\1 81"),
    "protocol": (rf"(-A KUBE-SERVICES -d {PLAIN}/32 -p) udp (.* -m) udp", r"\1 sctp \2 sctp"),
    "target port": (r"(default/plain:tcp.*--to-destination \S+:)3000", r"\g<1>3001"),
    "reject": (r"\n-A KUBE-SERVICES .*default/none:tcp has no endpoints.*", ""),
    "source range": (r"\n-A KUBE-PROXY-FIREWALL .*default/ranged:tcp.*", ""),
    "jump": (r"\n-A PREROUTING .*KUBE-SERVICES", ""),
}
"""The same in the text of iptables-save."""


FAULTS = {"nftables": NFT, "iptables": IPTABLES}
COMMANDS = {"nftables": ["nft", "-f", "-"], "iptables": ["iptables-nft-restore"]}


def rules_and_place() -> tuple[CompiledRules, NodePlace]:
    place = place_of(Family.IPV4)
    return found.rules_of_kube_proxy(Family.IPV4, place), place


@contextmanager
def two_nodes(program: str, *texts: str) -> Iterator[tuple[list[Node], list[str]]]:
    """Two nodes with these rules; also their namespaces."""
    with ExitStack() as stack, namespace() as world, namespace() as first, namespace() as second:
        nodes = [Node(first, world, "w0", stack), Node(second, world, "w1", stack)]
        for name, rules in zip((first, second), texts, strict=True):
            run("ip", "netns", "exec", name, *COMMANDS[program], text=rules)
        yield nodes, [first, second]


CONFIRMED = {
    "nftables": (3, 5, 7, 10, 13, 16, 21, 24, 28, 34, 38, 44, 52, 59, 66, 75, 83, 99, 112, 124),
    "iptables": (1, 3, 5, 9, 14, 18, 25, 33, 38, 43, 46, 54, 60, 68, 74, 81, 90, 100, 109, 123),
}
"""Numbers of random mutations whose witness arrives from the world."""
CLIENTS = (
    *("198.51.100.7", "10.0.0.5", "192.168.100.1", "203.0.113.6", "10.244.0.200", ""),
    *("10.244.0.10", "10.244.0.11", "10.244.0.12", "10.244.0.13", "10.244.1.10", "10.244.1.11"),
)
"""Clients inside and outside of the source ranges, a pod without Service, the node itself, and all endpoints."""
STICKY = {("10.96.1.9", 80), ("10.96.1.10", 80), ("203.0.113.4", 80), (NODE, 30094), (NODE, 30095)}
NETWORKS = ("198.51", "10.244", "10.0")
REST = ("10.96.99.99", "192.0.2.7", NODE)
"""Addresses without a Service, and the node."""


def is_sendable(witness: Witness) -> bool:
    """Return whether a packet arrives from the world, and whether endpoints keep all of its clients, or none."""
    kept = [{outcome.remembered for outcome, _ in side} for side in (witness.first, witness.second)]
    return bool(witness.packet.interface) and witness.packet.protocol in {6, 17} and all(len(each) < 2 for each in kept)


def check_outcomes(node: Node, packet: FirstPacket, shares: Shares) -> None:
    """Check that real packets have the outcomes of a witness: a client with affinity has only one."""
    wanted = stated(packet, shares)
    seen = node.fates(packet, PACKETS if len(wanted) > 1 else FEW)
    if any(outcome.remembered for outcome, _ in shares):
        assert len(seen) == 1, str(packet)
        assert seen.keys() <= wanted.keys(), str(packet)
        return
    assert seen.keys() == wanted.keys(), str(packet)
    assert all(abs(seen[words] - share) < FAR for words, share in wanted.items()), (wanted, seen)


def check_witnesses(program: str, text: str, changed: str) -> None:
    """Check that a comparison finds witnesses, and that real packets have their outcomes."""
    with two_nodes(program, text, changed) as (nodes, names):
        sides = [inside(name, rules_and_place) for name in names]
        found = compare(sides[0][0], sides[1][0], sides[0][1])
        assert not found.unknown
        assert found.causes
        sendable = [cause.witness for cause in found.causes if is_sendable(cause.witness)]
        assert sendable
        for packet, *both in sendable[:3]:
            for node, shares in zip(nodes, both, strict=True):
                check_outcomes(node, packet, shares)


@pytest.mark.quick
@pytest.mark.parametrize(("program", "fault"), [(name, fault) for name, faults in FAULTS.items() for fault in faults])
def test_a_fault_has_a_witness_and_the_kernel_agrees(program: str, fault: str) -> None:
    text = recorded_rules.text(program)
    changed, times = re.subn(*FAULTS[program][fault], text, count=1)
    assert times == 1
    check_witnesses(program, text, changed)


def numbered(program: str, number: int) -> tuple[str, str]:
    """Return the recorded rules, and those with a random mutation."""
    mutation = next(islice(recorded_rules.mutations(program), number, None))
    return written(recorded_rules.lines(program)), written(mutation.lines)


@pytest.mark.quick("nftables-13", "nftables-38", "iptables-9", "iptables-33")
@pytest.mark.parametrize(("program", "number"), [(name, number) for name in CONFIRMED for number in CONFIRMED[name]])
def test_a_random_mutation_has_a_witness_and_the_kernel_agrees(program: str, number: int) -> None:
    check_witnesses(program, *numbered(program, number))


@pytest.mark.quick("nftables-1", "iptables-39")
@pytest.mark.parametrize(
    ("program", "number"), [(name, number) for name in HARMLESS for number in sorted(HARMLESS[name])]
)
def test_a_harmless_mutation_changes_the_outcome_of_no_packet(program: str, number: int) -> None:
    """Sends packets of every client to every address, protocol and port of the rules."""
    texts = numbered(program, number)
    addresses = {*re.findall(r"\b(?:10\.96|10\.244|203\.0)\.\d+\.\d+(?=/32|[^\d./])", texts[0]), *REST}
    ports = {80, 81, 3000, *map(int, re.findall(r"\b30\d{3}\b", texts[0]))}
    with two_nodes(program, *texts) as (nodes, _):
        translated = []
        for address, protocol, port in product(sorted(addresses), (6, 17), sorted(ports)):
            packets = [packet_of(client, address, protocol, port) for client in CLIENTS]
            first, second = (node.outcomes(packets) for node in nodes)
            if any(
                word.startswith("to ") and not word.startswith(f"to {address}:{port}") for word in (*first, *second)
            ):
                translated.append((address, protocol, port))
            else:
                assert first == second, (address, protocol, port)
        assert len(translated) > 50
        for number, (address, protocol, port) in enumerate(translated):
            if (address, port) in STICKY:
                clients = [f"{net}.{number}.{host}" for net in NETWORKS for host in range(30)]
            else:
                clients = list(CLIENTS)
            check_same_endpoints(nodes, clients, address, protocol, port)


def packet_of(client: str, address: str, protocol: int, port: int) -> FirstPacket:
    """Return a packet from the world, or from the node if `client` is ''."""
    return FirstPacket(client or NODE, address, protocol, port, "eth0" if client else "", "")


def check_same_endpoints(nodes: list[Node], clients: list[str], address: str, protocol: int, port: int) -> None:
    """Check that each client reaches the same endpoints on both nodes.

    With affinity, each client, which is new to the Service, reaches only one endpoint, and all clients together reach
    the same endpoints.
    """
    seen: list[dict[str, set[str]]] = [{}, {}]
    is_sticky = (address, port) in STICKY
    for _ in range(ROUNDS):
        for node, outcomes in zip(nodes, seen, strict=True):
            found = node.outcomes([packet_of(client, address, protocol, port) for client in clients * FEW])
            for client, word in zip(clients * FEW, found, strict=True):
                outcomes.setdefault(client, set()).add(word)
        if is_sticky:
            assert all(len(words) == 1 for outcomes in seen for words in outcomes.values()), (address, protocol, port)
            together = [{word for words in outcomes.values() for word in words} for outcomes in seen]
            assert together[0] == together[1], (address, protocol, port)
            return
        if seen[0] == seen[1]:
            return
        clients = [client for client in clients if seen[0][client] != seen[1][client]]
    raise AssertionError(f"{address}:{port}: {seen}")
