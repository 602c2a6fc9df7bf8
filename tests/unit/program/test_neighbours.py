"""Two kube-proxies on a node: the second one's message about a port in use, and the first one's log."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest

from kubeproxy.errors import ApplyError
from kubeproxy.kernel.proc.processes import Process
from kubeproxy.program.serving import PAUSE, Neighbours, port_failure, user_agent

OURS = os.getpid()
HIDDEN = "the process that uses it is not visible from here (it has other rights, or is in a container)"
BOTH = "both write rules for the same Services, stop one of them"


class Clock:
    now = 5.0

    def __call__(self):
        return self.now


def first(clock):
    said = []
    return said, Neighbours("nftables", ("127.0.0.1", 1), said.append, lambda *_: None, clock)


def test_the_sender_of_a_mode_request_is_logged_once_a_minute():
    clock = Clock()
    said, neighbours = first(clock)
    for _ in range(3):
        neighbours.asked_by(user_agent(4711, "iptables"))
    (line,) = said
    assert line.startswith(
        "another kube-proxy (pid 4711 as it reports, in mode iptables) runs on this node and tries to "
    )
    assert line.endswith(f"the ports of this proxy (pid {OURS}, in mode nftables): {BOTH}")
    clock.now += PAUSE
    neighbours.asked_by(user_agent(4711, "nftables"))
    assert len(said) == 2
    assert said[1].endswith(": stop one of them")


@pytest.mark.parametrize(
    "agent",
    [
        "",
        "curl/7.88.1",
        "kube-proxy/v1.36.2 (linux/amd64) kubernetes/abcdef",
        user_agent(OURS, "nftables"),
        user_agent(1, "x\nI1122 forged"),
        user_agent(1, "x" * 5000),
        user_agent(10**12, "iptables"),
        user_agent(1, "\x1b[31m"),
        "kube-proxy/v1 (pid 1; mode iptables) and more",
    ],
    ids=["none", "curl", "Go", "itself", "line", "long", "number", "terminal", "more"],
)
def test_another_program_cannot_cause_this_report(agent):
    said, neighbours = first(Clock())
    neighbours.asked_by(agent)
    assert said == []


def answering(answer, find, port=None):
    """Return the message about port 10256 (or the page's) if the page's port gives `answer` to any request."""
    heard = []

    async def serve(reader, writer):
        heard.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def main():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        page = server.sockets[0].getsockname()[1]
        neighbours = Neighbours("nftables", ("0.0.0.0", page), heard.append, lambda at, name: find.get(at == page))
        said = await neighbours.holding(page if port is None else port)
        server.close()
        await server.wait_closed()
        return said.replace(str(page), "PAGE"), heard

    return asyncio.run(main())


def page(body, status=b"200 OK"):
    return b"HTTP/1.0 %b\r\nContent-Type: text/plain\r\n\r\n%b" % (status, body)


GO, NGINX = Process(812, "kube-proxy"), Process(55, "nginx")


@pytest.mark.parametrize(
    ("answer", "health", "metrics", "said"),
    [
        (page(b"ipvs"), GO, GO, f"process kube-proxy (pid 812) has it, a kube-proxy in mode ipvs: {BOTH}"),
        (
            page(b"nftables"),
            GO,
            GO,
            "process kube-proxy (pid 812) has it, a kube-proxy in mode nftables: stop one of them",
        ),
        (page(b"ipvs"), None, None, f"{HIDDEN}; a kube-proxy in mode ipvs answers on PAGE: {BOTH}"),
        (page(b"ipvs"), NGINX, GO, f"process nginx (pid 55) has it; a kube-proxy in mode ipvs answers on PAGE: {BOTH}"),
        (page(b"404 not found", b"404 Not Found"), NGINX, None, "process nginx (pid 55) has it"),
        (page(b"\x1b[31mipvs"), NGINX, NGINX, "process nginx (pid 55) has it"),
        (page(b"i" * 100_000), NGINX, NGINX, "process nginx (pid 55) has it"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", None, None, HIDDEN),
    ],
)
def test_the_process_that_uses_the_port(answer, health, metrics, said):
    assert answering(answer, {False: health, True: metrics}, 10256)[0] == said


def test_it_names_itself_to_the_one_that_has_it_and_never_asks_itself():
    said, heard = answering(page(b"ipvs"), {True: GO})
    assert said.startswith("process kube-proxy (pid 812) has it, a kube-proxy in mode ipvs")
    (request,) = heard
    assert request.startswith("GET /proxyMode HTTP/1.0\r\n")
    assert f"\r\nUser-Agent: {user_agent(OURS, 'nftables')}\r\n" in request
    said, heard = answering(page(b"ipvs"), {False: NGINX, True: Process(OURS, "kube-proxy")}, 10256)
    assert (said, heard) == ("process nginx (pid 55) has it", [])


def refused(code):
    error = ApplyError("cannot serve healthz on 0.0.0.0:10256: no")
    error.__cause__ = OSError(code, "no")
    return error


def test_a_port_that_is_taken_is_explained_once_a_minute():
    clock, said = Clock(), []

    async def main():
        neighbours = Neighbours("nftables", ("127.0.0.1", 1), said.append, lambda *_: NGINX, clock)
        failed = port_failure(neighbours, 10256, said.append, clock)
        for _ in range(24):  # two minutes of attempts
            failed(refused(errno.EADDRINUSE))
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
            clock.now += 5
        port_failure(neighbours, 10256, said.append, clock)(refused(errno.EACCES))

    asyncio.run(main())
    why = "cannot serve healthz on 0.0.0.0:10256: no"
    assert said == [f"{why}; process nginx (pid 55) has it"] * 2 + [why]
