"""The kernel's tracing with real packets: the traced packets, the reports about them, and the removal of the mark."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest

from kubeproxy.kernel.netlink.protocol import Netlink
from kubeproxy.kernel.nftables.listing import shortened, text
from kubeproxy.kernel.nftables.reader import TableReader
from kubeproxy.kernel.nftables.tables import Hook
from kubeproxy.kernel.nftables.trace import INPUT, OUTPUT, PREROUTING, Mark, MarkedFlow, Step, Traces, base_chains
from kubeproxy.model.addresses import PROTOCOLS, pack
from support.own_network import own_network
from support.places import ROOT

RULES = """
table inet firewall {
    chain input {
        type filter hook input priority 0; policy accept;
        udp dport 5353 jump dns
        tcp dport 81 drop
    }
    chain dns { counter accept
    }
}
"""
LOOPBACK = {"IPv4": "127.0.0.1", "IPv6": "::1"}


@pytest.fixture
def rules(netns) -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["nft", "-f", "-"], input=RULES, text=True, check=True)


def flow(family: str, protocol: str, port: int) -> MarkedFlow:
    return MarkedFlow(b"", pack(LOOPBACK[family]) or b"", PROTOCOLS[protocol], port, (OUTPUT,))


def datagram(family: str, port: int) -> None:
    kind = socket.AF_INET6 if family == "IPv6" else socket.AF_INET
    with socket.socket(kind, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"?", (LOOPBACK[family], port))


def heard(traces: Traces) -> list[Step]:
    return list(traces.steps(time.monotonic() + 0.2))


@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
def test_the_rules_that_a_packet_passes_are_reported(rules, family):
    with Traces.listen() as traces, Mark.open(flow(family, "UDP", 5353)):
        datagram(family, 5354)
        datagram(family, 5353)
        steps = [step for step in heard(traces) if step.table == "firewall"]
    steps = [step for step in steps if step.packet == steps[0].packet]  # an ICMP error comes back
    assert [(step.chain, step.kind, step.verdict, step.leads_to) for step in steps] == [
        ("input", "rule", -3, "dns"),
        ("dns", "rule", 1, ""),
    ]
    headers = steps[0].headers
    assert headers is not None
    assert (headers.destination, headers.destination_port, headers.protocol) == (pack(LOOPBACK[family]), 5353, 17)
    assert listed()[steps[0].handle] == "udp dport 5353 jump dns"


def listed():
    with Netlink.open() as link:
        rules = TableReader(1, "firewall", link).chain_rules("input")
    return {handle: shortened(text(rule, "ip")) for handle, rule in rules.items()}


def test_a_dropping_rule_and_a_policy_are_reported(rules):
    with Traces.listen() as traces, Mark.open(flow("IPv4", "TCP", 81)), socket.socket() as sock:
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            sock.connect(("127.0.0.1", 81))
        steps = heard(traces)
    last = steps[-1]
    assert (last.table, last.chain, last.verdict) == ("firewall", "input", 0)
    assert listed()[last.handle] == "tcp dport 81 drop"
    policies = [step.verdict for step in steps if step.kind == "policy"]
    assert set(policies) == {1}


@pytest.mark.parametrize(
    "rule",
    [
        "tcp flags syn / fin,syn,rst,ack limit rate 10/second drop",
        "tcp dport 80 tcp flags syn,ack / syn,ack limit rate over 100/minute burst 20 packets accept",
        "tcp flags != syn drop",
        "tcp flags == syn drop",
        "tcp flags syn,rst drop",
        "tcp flags ! fin,rst drop",
        "tcp flags != syn / fin,syn drop",
        "tcp flags { syn, ack } drop",
        "limit rate over 3 mbytes/second burst 5 kbytes drop",
        "limit rate 1000 bytes/hour drop",
    ],
)
def test_rules_of_other_programs_are_printed_as_nft_lists_them(rule):
    with own_network():
        text_ = f"table inet firewall {{\nchain input {{\ntype filter hook input priority 0;\n{rule}\n}}\n}}\n"
        subprocess.run(["nft", "-f", "-"], input=text_, text=True, check=True)
        printed = subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True, check=True).stdout
        assert f"\t{rule}\n" in printed
        assert list(listed().values()) == [rule]


def test_few_packets_a_second_are_traced(rules):
    mark = flow("IPv4", "UDP", 5353)
    with Traces.listen() as traces, Mark.open(mark) as marked:
        for _ in range(500):
            datagram("IPv4", 5353)
        marks = [step for step in heard(traces) if step.table == marked.table and step.handle]
    packets = {step.packet for step in marks if step.chain == "requests-output"}
    assert 0 < len(packets) <= 45


@pytest.mark.parametrize("client", ["127.0.0.1", "127.0.0.9"])
def test_only_replies_to_the_given_clients_are_traced(rules, client):
    mark = flow("IPv4", "UDP", 5353)._replace(hooks=(), clients=(pack(client) or b"",))
    with socket.socket(type=socket.SOCK_DGRAM) as server, socket.socket(type=socket.SOCK_DGRAM) as sock:
        server.bind(("127.0.0.1", 5353))
        sock.connect(server.getsockname())
        with Traces.listen() as traces, Mark.open(mark) as marked:
            sock.send(b"?")
            server.sendto(b"!", server.recvfrom(9)[1])
            chains = {step.chain for step in heard(traces) if step.table == marked.table and step.handle}
    assert bool(chains) is (client == "127.0.0.1")


def test_base_chains_are_reported_with_their_hooks(rules):
    with Netlink.open() as link, Mark.open(flow("IPv4", "UDP", 5353)) as mark:
        chains = base_chains(link)
    assert chains[1, "firewall", "input"] == Hook("filter", INPUT, 0)
    assert chains[2, mark.table, "requests-output"] == Hook("filter", OUTPUT, -350)
    assert chains[2, mark.table, "answers-prerouting"] == Hook("filter", PREROUTING, -190)


def test_the_table_goes_when_its_process_is_killed(rules):
    program = (
        "import sys\nfrom kubeproxy.kernel.nftables.trace import *\n"
        "mark = Mark.open(MarkedFlow(b'', b'\\x7f\\0\\0\\1', 17, 5353, (OUTPUT,)))\n"
        "print('open', flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        assert f"kube-proxy-trace-{process.pid}" in tables()
        process.kill()
        process.wait()
    assert "kube-proxy-trace" not in tables()


def test_another_program_cannot_change_the_table(rules):
    with Mark.open(flow("IPv4", "UDP", 5353)) as mark:
        done = subprocess.run(["nft", "delete", "table", "ip", mark.table], capture_output=True, check=False)
        assert done.returncode != 0
        assert f"kube-proxy-trace-{os.getpid()}" in tables()


def tables() -> str:
    return subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True).stdout
