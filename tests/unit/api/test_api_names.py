"""Host names are resolved in threads that block neither the kernel's work nor the end of the program."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from kubeproxy.api import connection
from kubeproxy.api.cluster import Cluster, Trust, parse_server
from kubeproxy.api.connection import Loop
from kubeproxy.api.credentials import Credentials
from kubeproxy.api.http import HttpClient
from kubeproxy.api.status import ConnectionFailed

ADDRESS = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 1))]


class Resolver:
    """A getaddrinfo whose name servers do not answer until `answer` is set."""

    def __init__(self):
        self.answer = threading.Event()
        self.asked = []

    def __call__(self, *question):
        self.asked.append(question)
        self.answer.wait(30)
        if question[0] == "missing.test":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ADDRESS


@pytest.fixture
def resolver(monkeypatch):
    made = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", made)
    yield made
    made.answer.set()


def run(work):
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(work)


def client(name="api.test", timeout=0.05):
    cluster = Cluster(parse_server(f"http://{name}:1", "test"), Trust(), Credentials())
    return HttpClient(cluster, connect_timeout=timeout)


def test_neither_the_kernel_nor_the_end_waits_for_a_name(resolver, monkeypatch):
    monkeypatch.setattr(connection, "JOINED", 0.0)

    async def main():
        asked = client()
        for _ in range(40):  # more than the threads of an event loop
            with pytest.raises(ConnectionFailed, match="the name cannot be resolved: no answer in 0 s"):
                await asked.request("GET", "/")
        return await asyncio.to_thread(lambda: "done")

    assert run(main()) == "done"
    assert len(resolver.asked) == 40
    assert not resolver.answer.is_set()


def test_equal_concurrent_questions_share_an_answer(resolver):
    async def main():
        loop = asyncio.get_running_loop()
        asking = [asyncio.create_task(loop.getaddrinfo("api.test", 1)) for _ in range(5)]
        await asyncio.sleep(0)
        asking[0].cancel()
        resolver.answer.set()
        found = await asyncio.gather(*asking, return_exceptions=True)
        return found, await loop.getaddrinfo("api.test", 1)

    found, again = run(main())
    assert isinstance(found[0], asyncio.CancelledError)
    assert [*found[1:], again] == [ADDRESS] * 5
    assert len(resolver.asked) == 2


def test_an_unresolvable_name_is_an_error_for_each_caller(resolver):
    async def main():
        asked = client("missing.test", 30)
        asking = [asyncio.create_task(asked.request("GET", "/")) for _ in range(3)]
        await asyncio.sleep(0.05)
        resolver.answer.set()
        return await asyncio.gather(*asking, return_exceptions=True)

    found = run(main())
    assert all(isinstance(error, ConnectionFailed) for error in found), found
    assert len({id(error.__cause__) for error in found}) == 3
    assert len(resolver.asked) == 1
