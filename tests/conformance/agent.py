"""Runs inside one namespace: answers like endpoints on given ports, and sends probes on request.

Reads and writes lines of JSON on stdin and stdout. Request: {"proto", "src", "dst", "port", "tries", "distinct"};
reply: {"endpoints": {"address|port": ["address that it saw", ...]}, "refused": count, "timeout": count}.
"""

import contextlib
import errno
import itertools
import json
import os
import selectors
import socket
import sys
import threading
import time

TIMEOUT = float(os.environ.get("PATIENCE", "0.25"))  # seconds; without an answer by then a packet counts as dropped
# TCP sends its second SYN after a second. The cases record "dropped" for a refusal that only this SYN gets, because an
# IPv6 socket ignores an ICMP error that arrives while it still sends the first.
SECOND_SYN = 0.9
IPV6_RECVPKTINFO, IPV6_PKTINFO = 49, 50  # linux/in6.h: the destination address of the request
REJECTED = {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH}
# Each UDP probe leaves from a different port, so that it matches no flow of an earlier step.
SOURCE_PORTS = itertools.cycle(range(33000, 60000))


def plain(address: str) -> str:
    """Return the IPv4 form of a mapped address."""
    return address.removeprefix("::ffff:")


def listening(port: int, kind: socket.SocketKind) -> socket.socket:
    """Return a socket of both families on all addresses."""
    made = socket.socket(socket.AF_INET6, kind)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    if kind == socket.SOCK_DGRAM:
        made.setsockopt(socket.IPPROTO_IPV6, IPV6_RECVPKTINFO, 1)
    made.bind(("::", port))
    if kind == socket.SOCK_STREAM:
        made.listen(128)
    return made


def answer(asked: socket.socket, port: int) -> None:
    """Answer one connection or packet with [destination, source]."""
    if asked.type == socket.SOCK_STREAM:
        connection, peer = asked.accept()
        with connection:
            connection.sendall(json.dumps([f"{plain(connection.getsockname()[0])}|{port}", plain(peer[0])]).encode())
        return
    _, ancillary, _, peer = asked.recvmsg(256, 256)
    own = ancillary[0][2][:16]
    text = json.dumps([f"{plain(socket.inet_ntop(socket.AF_INET6, own))}|{port}", plain(peer[0])])
    # From the request's destination address, on any interface.
    asked.sendmsg([text.encode()], [(socket.IPPROTO_IPV6, IPV6_PKTINFO, own + bytes(4))], 0, peer)


def serve(ports: list[int]) -> None:
    """Answer on ports, by TCP and UDP, in a thread."""
    ready = selectors.DefaultSelector()
    for port in ports:
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            ready.register(listening(port, kind), selectors.EVENT_READ, port)

    def loop() -> None:
        while True:
            for key, _ in ready.select():
                try:
                    answer(key.fileobj, key.data)
                except OSError as error:
                    print("agent:", error, file=sys.stderr)

    threading.Thread(target=loop, daemon=True).start()


def once(proto: str, source: str | None, destination: str, port: int) -> list[str] | str:
    """Send one request; return the endpoint that answered and the source that it saw, or the failure."""
    family = socket.AF_INET6 if ":" in destination else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM if proto == "tcp" else socket.SOCK_DGRAM) as made:
        made.settimeout(TIMEOUT)
        began = time.monotonic()
        try:
            if proto == "udp":
                made.bind((source or ("::" if family == socket.AF_INET6 else "0.0.0.0"), next(SOURCE_PORTS)))
            elif source:
                made.bind((source, 0))
            made.connect((destination, port))
            if proto == "udp":
                with contextlib.suppress(PermissionError):  # dropped or rejected on the way out: recv returns which
                    made.send(b"?")
            return json.loads(made.recv(512))
        except TimeoutError:
            return "timeout"
        except json.JSONDecodeError:  # a connection that ended without an answer
            return "refused"
        except OSError as error:
            late = proto == "tcp" and time.monotonic() - began > SECOND_SYN
            return ("timeout" if late else "refused") if error.errno in REJECTED else f"error {error}"


def probe(request: dict) -> dict:
    """Send requests until a further endpoint is very unlikely: twelve attempts for each known one.

    Or until all expected endpoints have answered, and an unexpected one had the same chance.
    """
    reply: dict = {"endpoints": {}, "refused": 0, "timeout": 0}
    sent = 0
    while sent < (request["tries"] or 12 * max(1, len(reply["endpoints"])) + 10):
        sent += 1
        seen = once(request["proto"], request.get("src"), request["dst"], request["port"])
        if isinstance(seen, list):
            endpoint, client = seen
            clients = reply["endpoints"].setdefault(endpoint, [])
            if client not in clients:
                clients.append(client)
            distinct = request.get("distinct")
            if distinct and len(reply["endpoints"]) >= distinct and sent >= 5 * distinct + 3:
                break
        else:
            reply[seen] = reply.get(seen, 0) + 1
            if reply[seen] >= 2:
                break
    return reply


if __name__ == "__main__":
    if numbers := [int(word) for word in sys.argv[1:]]:
        serve(numbers)
    for line in sys.stdin:
        print(json.dumps(probe(json.loads(line))), flush=True)
