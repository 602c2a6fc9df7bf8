"""Upstream's "Conntrack" and "KubeProxy": the effects of changes on tracked connections.

UDP clients whose endpoints cycle are in test_udp_clients.py.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from typing import NamedTuple

from lab.netns import open_socket_in, run_in_async
from support.crowd import Crowd
from support.stage import Stage
from support.upstream import modes, upstream

CLIENTS = 20
"""UDP clients of each kind; upstream has one."""
HEADER = struct.Struct("!HHLLBBHHH")
"""A TCP header without options: ports, sequence, acknowledgement, offset, flags, window, checksum, urgent."""
RST, PSH, ACK = 4, 8, 16
OLD, FUTURE = -100_000, 1 << 30
"""Sequence numbers of the bad segment: as upstream sends it, repeated after a long time, and far beyond the window."""
FAR = dict.fromkeys(("iptables-nft", "iptables-legacy"), (OLD, FUTURE))
"""Expected results by mode: nftables mode (also the Go kube-proxy's) has no rule for the second segment. Since Linux
6.1 the first segment needs no rule.
"""


@upstream(
    "Conntrack should be able to cleanup conntrack entries when UDP service target port changes for a NodePort service",
    "Conntrack should be able to cleanup conntrack entries when UDP service target port changes for a ClusterIP"
    " service",
)
async def test_udp_clients_follow_a_changed_target_port(stage: Stage) -> None:
    port = {"name": "udp", "port": 80, "protocol": "UDP", "targetPort": 8080}
    stage.service(type="NodePort", ports=[port])
    await stage.pods("server-1@b", ports=[8080], hostNetwork=True)
    nodeport, cluster = stage.front("nodeport", host="neighbour"), stage.front()
    ways = [("client-a", nodeport), ("outside", nodeport), ("client-a", cluster), ("neighbour", cluster)]
    with Crowd(stage.live, ways, CLIENTS) as crowd:
        await crowd.all_notice("server-1")
        await stage.pods("server-2@b", ports=[9090], hostNetwork=True)
        changed = stage.get()["spec"]["ports"][0] | {"targetPort": 9090}
        stage.patch(ports=[changed])
        stage.delete_pod("server-1")
        await crowd.all_notice("server-2")


class Segment(NamedTuple):
    """The used fields of a TCP segment from a raw socket."""

    client: tuple[str, int]
    sequence: int
    acknowledgement: int
    flags: int
    length: int


def received(raw: socket.socket) -> Segment:
    """Return the next TCP segment that reaches the pod."""
    packet, (address, _) = raw.recvfrom(65536)
    packet = packet[(packet[0] & 15) * 4 :]
    port, _, sequence, acknowledgement, offset, flags, *_ = HEADER.unpack_from(packet)
    return Segment((address, port), sequence, acknowledgement, flags, len(packet) - (offset >> 4) * 4)


def send(raw: socket.socket, own: tuple[str, int], client: tuple[str, int], sequence: int, ack: int) -> None:
    """Send a segment with data outside of the window."""
    data = b"boom"
    fields = [own[1], client[1], sequence & 0xFFFFFFFF, ack, 5 << 4, PSH | ACK, 1000, 0, 0]
    pseudo = socket.inet_aton(own[0]) + socket.inet_aton(client[0]) + struct.pack("!HH", 6, HEADER.size + len(data))
    checked = pseudo + HEADER.pack(*fields) + data
    total = sum(struct.unpack(f"!{len(checked) // 2}H", checked))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    fields[7] = ~total & 0xFFFF
    raw.sendto(HEADER.pack(*fields) + data, client)


def talk(
    client: socket.socket, server: socket.socket, raw: socket.socket, own: tuple[str, int], places: tuple[int, ...]
) -> list[Segment]:
    """Exchange words before and after a segment of the server outside of the window; return the pod's received
    segments.
    """
    client.sendall(b"hello")
    while (known := received(raw)).length != len(b"hello"):
        pass
    assert server.recv(100) == b"hello"
    # Its acknowledgement number is correct, so a reset by the client would reach the connection.
    ack = known.sequence + known.length
    for far in places:
        send(raw, own, known.client, known.acknowledgement + far, ack)
    for number in range(5):
        time.sleep(0.02)
        message = b"still %d" % number
        client.sendall(message)
        assert server.recv(100) == message
        server.sendall(message)
        assert client.recv(100) == message
    since = []
    while not since or since[-1].length != len(b"last word"):
        if not since:
            client.sendall(b"last word")
        since.append(received(raw))
    return since


@upstream("Conntrack proxy implementation should not be vulnerable to the invalid conntrack state bug [Privileged]")
@modes("nftables", "iptables-nft", "iptables-legacy")
async def test_a_packet_of_invalid_state_resets_no_connection(stage: Stage) -> None:
    """Kubernetes issue 74839: without translation, the client's node resets the unknown connection."""
    stage.service(ports=[{"name": "boom", "port": 9000}, {"name": "whoami", "port": 80, "targetPort": 3000}])
    await stage.pods("boom-server@b")
    await stage.expect(stage.front(port=1), {"client-a": "boom-server"}, "tcp")
    pod = stage.cluster.namespace_of(stage.place("boom-server"))
    own = (stage.live.ips[stage.place("boom-server")]["IPv4"], 9000)
    front, place = stage.front(), stage.cluster.namespace_of("client-a")
    with (
        open_socket_in(pod, lambda: socket.create_server(("0.0.0.0", 9000))) as listener,
        open_socket_in(pod, lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP)) as raw,
        open_socket_in(place, lambda: socket.create_connection(front, 5)) as client,
    ):
        server, _ = listener.accept()
        with server:
            for sock in (server, raw):
                sock.settimeout(5)
            places = FAR.get(stage.mode.name, (OLD,))
            segments = await asyncio.to_thread(talk, client, server, raw, own, places)
    assert not [segment for segment in segments if segment.flags & RST]


@upstream("KubeProxy should set TCP CLOSE_WAIT timeout [Privileged]")
async def test_close_wait_lasts_an_hour(stage: Stage) -> None:
    """The client has closed its side of a connection, the server has not: the client's node tracks it as CLOSE_WAIT."""
    server_place, client_place = stage.cluster.namespace_of("neighbour"), stage.cluster.namespace_of("client-a")
    address = stage.live.ips["neighbour"]["IPv4"]
    with open_socket_in(server_place, lambda: socket.create_server((address, 11302))) as listener:
        listener.settimeout(5)
        with await run_in_async(client_place, lambda: socket.create_connection((address, 11302), 5)) as client:
            server, _ = listener.accept()
            with server:
                client.shutdown(socket.SHUT_WR)

                async def tracked() -> str:
                    table = await stage.live.run("cat", "/proc/net/nf_conntrack")
                    found = [line.split() for line in table.splitlines() if "dport=11302" in line]
                    states = {fields[5]: int(fields[4]) for fields in found}
                    return "" if 3540 < states.get("CLOSE_WAIT", 0) <= 3600 else f"{states}"

                await stage.live.eventually(tracked)
