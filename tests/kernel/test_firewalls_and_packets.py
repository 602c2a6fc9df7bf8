"""Typical firewalls of nodes: real connections through a router, compared with the findings about their packets.

A finding that a chain drops a connection must be true, and a failing connection needs a finding or a note.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from kubeproxy.ask.checks import packets
from kubeproxy.ask.checks.checkup import _rules
from kubeproxy.ask.checks.node import CheckedNode
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.model.answer import Packet
from kubeproxy.setup import modes
from support.namespaces import inside, namespace, run

CLIENT, FRONT, ENDPOINT = "10.0.0.1", "10.0.0.2", "10.244.1.10"
NAT = f"""
table ip kube-proxy {{
  chain translate {{ ip daddr {FRONT} meta l4proto {{ tcp, udp }} th dport 30086 dnat to {ENDPOINT}:3000; }}
  chain a {{ type nat hook prerouting priority -100; jump translate; }}
  chain b {{ type nat hook output priority -100; jump translate; }}
  chain c {{ type nat hook postrouting priority 100; ip saddr {FRONT} masquerade; }}
}}
"""
FORWARD = "table inet f {{\n{more}\nchain f {{ type filter hook forward priority 0; policy {policy}; {rules}; }}\n}}\n"
LINKS = (
    "link add eth0 netns {client} type veth peer name eth0 netns {node}",
    "-n {client} addr add 10.0.0.1/24 dev eth0",
    "-n {node} addr add 10.0.0.2/24 dev eth0",
    "link add eth0 netns {server} type veth peer name cbr0 netns {node}",
    "-n {server} addr add 10.244.1.10/24 dev eth0",
    "-n {node} addr add 10.244.1.1/24 dev cbr0",
    "-n {client} link set eth0 up",
    "-n {node} link set eth0 up",
    "-n {node} link set cbr0 up",
    "-n {server} link set eth0 up",
    "-n {server} route add default via 10.244.1.1",
)
TIMEOUT = 0.3
"""Seconds within which an answer arrives unless it is dropped."""


class Way(NamedTuple):
    """The namespaces of a client, and of the node between the client and the server."""

    client: str
    node: str


@pytest.fixture(scope="module")
def way() -> Iterator[Way]:
    with namespace() as client, namespace() as node, namespace() as server:
        for line in LINKS:
            run("ip", *line.format(client=client, node=node, server=server).split())
        run("ip", "netns", "exec", node, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        run("ip", "netns", "exec", node, "nft", "-f", "-", text=NAT)
        with served(server):
            yield Way(client, node)


@contextlib.contextmanager
def served(where: str) -> Iterator[None]:
    stream = inside(where, lambda: socket.create_server((ENDPOINT, 3000)))
    datagrams = inside(where, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    datagrams.bind((ENDPOINT, 3000))

    def echo() -> None:
        with contextlib.suppress(OSError):
            while True:
                data, place = datagrams.recvfrom(100)
                if place is None:
                    return
                with contextlib.suppress(PermissionError):
                    datagrams.sendto(data, place)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                stream.accept()[0].close()

    for each in (echo, accept):
        threading.Thread(target=each, daemon=True).start()
    try:
        yield
    finally:
        for one in (stream, datagrams):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def connected(where: str, protocol: int) -> bool:
    kind = socket.SOCK_STREAM if protocol == 6 else socket.SOCK_DGRAM
    with inside(where, lambda: socket.socket(socket.AF_INET, kind)) as sock:
        sock.settimeout(TIMEOUT)
        try:
            sock.connect((FRONT, 30086))
            if protocol == 17:
                sock.send(b"x")
                sock.recv(1)
        except OSError:
            return False
        return True


def told(client: str | None, protocol: int) -> tuple[bool, bool]:
    """Return whether the findings say that the connection is stopped, and whether a note names a chain."""
    place = [socket.inet_aton(one) for one in (FRONT, "10.244.1.1")]
    source = socket.inet_aton(client) if client else None
    asked = packets.CheckedConnection(Packet(source, place[0], protocol, 30086), place)
    end = (socket.inet_aton(ENDPOINT), 3000)
    passing = [*packets.early(asked), *packets.translated(asked, end, masqueraded=client is None)]
    masqueraded = frozenset({end} if client is None else ())
    node = CheckedNode(
        None,
        0,
        modes.named("nftables"),
        KubeProxyConfiguration(),
        hooks={one.hook for one in passing},
        passing=passing,
        possible=list(packets.masqueraded_answers(passing, masqueraded, place)),
        packet=asked.packet,
        targets=frozenset({end}),
        masqueraded=masqueraded,
        covered=True,
    )
    found = [one for one in _rules(node) if one.about in {"firewall", "notrack"}]
    return any(one.is_wrong for one in found), bool(found)


def check(way: Way, wanted: str) -> None:
    """`wanted` has a letter for each of TCP and UDP from outside, TCP and UDP from the node.

    `+`: passes, without a finding. `x`: stopped, with a finding. `-`: stopped, and only noted.
    """
    seen = ""
    for client, protocol in ((CLIENT, 6), (CLIENT, 17), (None, 6), (None, 17)):
        passes = connected(way.client if client else way.node, protocol)
        claimed, noted = inside(way.node, lambda c=client, p=protocol: told(c, p))
        seen += ("!" if claimed else "+") if passes else "x" if claimed else "-" if noted else "?"
    assert seen == wanted


NFT = {
    "nothing": ("++++", "accept", "accept", ""),
    "server of a wiki": (
        "xx++",
        "drop",
        "ct state { established, related } accept; ct state invalid drop; tcp dport { 22, 80, 443 } accept",
        "chain i { type filter hook input priority 0; policy drop; ct state established accept; }",
    ),
    "firewalld": (
        "++++",
        "accept",
        "ct state established accept; ct status dnat accept; ct state invalid drop; reject with icmpx admin-prohibited",
        "",
    ),
    "zones": (
        "xx++",
        "drop",
        'iifname { "eth0", "wlan0" } goto wan; iifname cbr0 accept',
        "chain wan { ct state vmap { established : accept }; tcp dport { 80, 443 } accept; log; drop; }",
    ),
    "flags that no first packet has": (
        "++++",
        "accept",
        "tcp flags & (fin|syn|rst|ack) != syn ct state new drop; tcp flags & (fin|syn) == (fin|syn) drop",
        "",
    ),
    "first packets of TCP": ("x+++", "accept", "tcp flags syn drop", ""),
    "first answers of TCP": ("x+++", "accept", "tcp flags & (syn|ack) == syn|ack drop", ""),
    "packets that ask for no ECN": ("-+++", "accept", "tcp flags == syn drop", ""),
    "verdicts by flags": ("-+++", "accept", "tcp flags vmap { syn : drop, ack : accept }", ""),
    "verdicts by a mark": ("++++", "accept", "ct mark vmap { 0 : accept, 1 : drop }; drop", ""),
    "verdicts by a source port": ("++++", "accept", "th sport vmap { 1-65535 : accept }; drop", ""),
    "verdicts by TTL": (
        "--++",
        "drop",
        "ct state established accept; ip ttl vmap { 1-255 : goto a }; accept",
        "chain a { return; }",
    ),
    "verdicts with a rest": ("++++", "accept", "ip saddr vmap { 192.0.2.1 : drop, * : accept }; drop", ""),
    "set that packets fill": (
        "++++",
        "accept",
        "ct state established accept; add @seen { ip saddr }; ip saddr @seen accept; drop",
        "set seen { type ipv4_addr; flags dynamic,timeout; timeout 1m; }",
    ),
    "rate": ("++++", "accept", "ct state established accept; limit rate 1000/second accept; drop", ""),
    "count": (
        "++++",
        "accept",
        "ct state new add @c { ip saddr ct count over 20 } reject with tcp reset",
        "set c { type ipv4_addr; flags dynamic; }",
    ),
    "intervals": (
        "x-++",
        "accept",
        "ct state new tcp dport != @p drop; udp dport @p drop",
        "set p { type inet_service; flags interval; elements = { 1-2999, 3001-65535 } }",
    ),
    "ranges of addresses": (
        "xx++",
        "accept",
        "ip saddr @bad log drop",
        "set bad { type ipv4_addr; flags interval; elements = { 10.0.0.0-10.0.0.9 } }",
    ),
    "a map of verdicts": (
        "x+++",
        "drop",
        "ct state established accept; meta l4proto . th dport vmap @v",
        "map v { type inet_proto . inet_service : verdict; elements = { tcp . 3000 : drop, udp . 3000 : accept } }",
    ),
    "goto and return": ("xx++", "drop", "goto a; accept", "chain a { ip saddr 10.0.0.1 return; accept; }"),
    "mark": (
        "--++",
        "accept",
        "meta mark 1 drop",
        "chain p { type filter hook prerouting priority -150; meta mark set 1; }",
    ),
    "addresses of this node": (
        "xxxx",
        "accept",
        "accept",
        "chain p { type filter hook prerouting priority -150; fib daddr type local drop; }",
    ),
    "reverse path": (
        "++++",
        "accept",
        "accept",
        "chain p { type filter hook prerouting priority -300; fib saddr . iif oif missing drop; }",
    ),
    "users": ("++--", "accept", "accept", "chain o { type filter hook output priority 0; meta skuid 0 drop; }"),
    "no tracking": (
        "xx++",
        "accept",
        "accept",
        "chain p { type filter hook prerouting priority -300; ip daddr 10.0.0.2 notrack; }",
    ),
    "answers of the endpoint": (
        "++-x",
        "accept",
        "accept",
        "chain i { type filter hook input priority 0; policy drop; tcp dport 22 accept; }",
    ),
}
IPTABLES = {
    "ufw": (
        "xx++",
        "-P FORWARD DROP",
        "-N ufw-user",
        "-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
        "-A FORWARD -j ufw-user",
        "-A ufw-user -p tcp --dport 22 -j ACCEPT",
    ),
    "docker": (
        "xx++",
        "-P FORWARD DROP",
        "-N DOCKER-USER",
        "-A FORWARD -j DOCKER-USER",
        "-A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
        "-A FORWARD -i docker0 ! -o docker0 -j ACCEPT",
        "-A DOCKER-USER -j RETURN",
    ),
    "calico": (
        "+-++",
        "-N cali-tw",
        "-A FORWARD -o cbr+ -g cali-tw",
        "-A cali-tw -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
        "-A cali-tw -j MARK --set-xmark 0x0/0x10000",
        "-A cali-tw -p tcp -m multiport --dports 3000 -j MARK --set-xmark 0x10000/0x10000",
        "-A cali-tw -m mark --mark 0x10000/0x10000 -j RETURN",
        "-A cali-tw -j DROP",
    ),
    "kube-router": (
        "--++",
        "-N KUBE-POD-FW-A",
        "-A FORWARD -d 10.244.1.10 -j KUBE-POD-FW-A",
        "-A KUBE-POD-FW-A -m mark ! --mark 0x10000/0x10000 -j REJECT",
    ),
    "fail2ban": (
        "x+++",
        "-N f2b",
        "-I FORWARD -p tcp --dport 3000 -j f2b",
        "-A f2b -s 10.0.0.1 -j REJECT",
        "-A f2b -j RETURN",
    ),
    "translated connections": (
        "++++",
        "-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED,DNAT -j ACCEPT",
        "-A FORWARD -j DROP",
    ),
    "flags": (
        "x+++",
        "-A FORWARD -p tcp --tcp-flags ALL NONE -j DROP",
        "-A FORWARD -p tcp ! --syn -m conntrack --ctstate NEW -j DROP",
        "-A FORWARD -p tcp --syn -j REJECT --reject-with tcp-reset",
    ),
    "recent": ("--++", "-A FORWARD -m recent --name seen --set", "-A FORWARD -m recent --name seen --rcheck -j DROP"),
    "rate": (
        "++++",
        "-A FORWARD -m conntrack --ctstate ESTABLISHED -j ACCEPT",
        "-A FORWARD -m hashlimit --hashlimit-upto 1000/sec --hashlimit-mode srcip --hashlimit-name x -j ACCEPT",
        "-A FORWARD -p tcp -m connlimit --connlimit-above 100 -j REJECT",
        "-A FORWARD -m limit --limit 1000/sec --limit-burst 1000 -j ACCEPT",
        "-A FORWARD -j DROP",
    ),
    "no tracking": ("+x+x", "-t raw -A PREROUTING -p udp -j CT --notrack"),
    "no tracking by the older name": ("+x+x", "-t raw -A PREROUTING -p udp -j NOTRACK"),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", NFT)
def test_rules_of_nf_tables(way, name):
    wanted, policy, rules, more = NFT[name]
    with loaded(way, "nft", "-f", "-", text=FORWARD.format(policy=policy, rules=rules, more=more)):
        check(way, wanted)


@pytest.mark.quick
@pytest.mark.parametrize("variant", ["nft", "legacy"])
@pytest.mark.parametrize("name", IPTABLES)
def test_rules_of_iptables(way, name, variant):
    wanted, *rules = IPTABLES[name]
    lines = "\n".join(f"iptables-{variant} {rule}" for rule in rules)
    with loaded(way, "sh", "-e", text=lines):
        check(way, wanted)


@contextlib.contextmanager
def loaded(way: Way, *command: str, text: str) -> Iterator[None]:
    inside_node = ("ip", "netns", "exec", way.node)
    run(*inside_node, *command, text=text)
    try:
        yield
    finally:
        filters = "*filter\n:INPUT ACCEPT\n:FORWARD ACCEPT\n:OUTPUT ACCEPT\nCOMMIT\n*raw\nCOMMIT\n"
        run(*inside_node, "iptables-legacy-restore", text=filters)
        run(*inside_node, "nft", "-f", "-", text=f"flush ruleset\n{NAT}")
