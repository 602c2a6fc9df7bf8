"""The page of a running proxy, requested like a browser behind `kubectl port-forward`: from loopback, for localhost."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lab.netns import run_in
from lab.proxyprocess import METRICS_PORT, Proxy
from support.live import Live

FORWARDED = "localhost:52001"
"""The headers of a browser: the user's port differs from the proxy's."""


async def opened(proxy: Proxy, path: str, host: str = FORWARDED) -> tuple[Any, Any, int]:
    """Send a request; return the reader, the writer to close, and the status."""
    made = run_in(proxy.namespace, lambda: socket.create_connection(("127.0.0.1", METRICS_PORT), timeout=5.0))
    reader, writer = await asyncio.open_connection(sock=made)
    writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}\r\nSec-Fetch-Site: same-origin\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    return reader, writer, int(head.split()[1])


class Events:
    """The events that an open page received, by kind; events that no test has read yet are kept."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        self._kept: dict[str, deque[dict[str, Any]]] = defaultdict(deque)

    async def next(self, kind: str) -> dict[str, Any]:
        """Return the data of the next event of a kind."""
        while not self._kept[kind]:
            block = (await self._reader.readuntil(b"\n\n")).decode()
            fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
            if "event" in fields:
                self._kept[fields["event"]].append(json.loads(fields["data"]))
        return self._kept[kind].popleft()

    async def row(self, name: str, *wanted: Any) -> list[Any]:
        """Return a Service's row when it begins with this text."""
        while True:
            for row in (await self.next("now"))["rows"]:
                if row[: len(wanted) + 1] == [f"default/{name}", *wanted]:
                    return row


@asynccontextmanager
async def page(proxy: Proxy) -> AsyncIterator[Events]:
    """Open a page."""
    async with asyncio.timeout(90):
        reader, writer, status = await opened(proxy, "/ui/api/events")
        try:
            assert status == 200
            yield Events(reader)
        finally:
            writer.close()


async def zones(proxy: Proxy, name: str) -> set[str]:
    """Return the zones of a Service's endpoints, as the page shows them."""
    reader, writer, status = await opened(proxy, f"/ui/api/service?name=default/{name}")
    try:
        assert status == 200
        return {one["zone"] for one in json.loads(await reader.read())["endpoints"]}
    finally:
        writer.close()


async def form_answer(proxy: Proxy, question: str) -> Any:
    """Return the answer to a question of the form; repeat it on a machine that exceeds the 10 s of the page."""
    while True:
        reader, writer, status = await opened(proxy, f"/ui/api/why?{question}")
        text = await reader.read()
        writer.close()
        if b"took longer than" not in text:
            assert status == 200
            return json.loads(text)


def beside(proxy: Proxy) -> set[int]:
    """Return the processes that the proxy started."""
    return {int(pid) for pid in Path(f"/proc/{proxy.pid}/task/{proxy.pid}/children").read_text().split()}


def looks(proxy: Proxy) -> set[str]:
    """Return the questions that these processes answer."""
    words = [Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0") for pid in beside(proxy)]
    return {line[line.index("companion") + 1] for line in words if "companion" in line}


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_changes_connections_and_problems_are_seen_as_they_happen(live: Live) -> None:
    async with page(live.proxy) as events:
        hello = await events.next("hello")
        assert (hello["facts"]["node"], hello["facts"]["mode"]) == ("node-a", "nftables")
        live.service("seen", "a1 b1")
        row = await events.row("seen", "programmed", 2, 2)  # two pods, once each although two ports lead to them
        front = live.front("seen")
        assert f"{front.address}:{front.port}/tcp" in row[6]
        live.endpoints("seen", "a1 b1/unready")
        await events.row("seen", "programmed", 1, 2)
        assert await zones(live.proxy, "seen") == {"zone-a", "zone-b"}
        _, why = await live.ask("why", "node", "default/seen:80")
        assert "on node-a in zone zone-a" in why

        told = await form_answer(live.proxy, f"from=node&to={front.address}:{front.port}")
        assert told["answer"] == "yes", told
        assert told["heading"].endswith("/tcp: kube-proxy forwards it")
        assert [one["what"].partition(": ")[0] for one in told["findings"]][-1] == "TCP from this node"

        problems = await events.next("problems")
        while problems["looking"]:
            problems = await events.next("problems")
        assert not [one for one in problems["findings"] if one["severity"] == "unknown"], problems
        assert looks(live.proxy) == {"flows", "problems"}

        namespace = live.cluster.namespace_of("pod")
        while True:
            run_in(namespace, lambda: socket.create_connection(front, timeout=5.0)).close()
            flows = await events.next("flows")
            assert flows["error"] == ""
            if found := flows["services"].get("default/seen"):
                break
        assert found["new"] > 0
        assert found["endpoints"] == {"tcp/TCP/IPv4": {f"{live.ips['a1']['IPv4']}:3000": 1.0}}
        live.delete("seen")
        while "default/seen" not in (await events.next("now"))["gone"]:
            pass
    await live.until(lambda: not beside(live.proxy), "nothing runs beside the proxy without a page")


@pytest.mark.parametrize(
    ("path", "host", "status"),
    [
        ("/ui", FORWARDED, 301),
        ("/ui/api/facts", FORWARDED, 200),
        ("/ui/api/services", "[::1]:1", 200),
        ("/ui/api/facts", "evil.example:10249", 403),
        ("/ui/api/events", "evil.example", 403),
        ("/ui/api/facts", "10.0.0.1", 403),
    ],
)
async def test_names_that_others_may_have_are_refused(live: Live, path: str, host: str, status: int) -> None:
    reader, writer, answered = await opened(live.proxy, path, host)
    writer.close()
    assert answered == status
    assert reader is not None


async def test_the_form_reports_the_cause_while_the_proxy_has_no_list(bare: Live) -> None:
    bare.service("before")
    await bare.start()
    await bare.proxy.stop()
    await bare.cluster.server.refuse()
    proxy = await bare.start(ready_within=None)

    async def check() -> str:
        try:
            reader, writer, status = await opened(proxy, "/ui/api/why?from=node&to=before:80")
        except OSError as error:  # the proxy does not listen yet
            return str(error)
        try:
            text = (await reader.read()).decode()
        finally:
            writer.close()
        is_right = "never had a list" in text and "API server cannot be reached at" in text
        return "" if status == 503 and is_right else f"{status} {text}"

    await bare.eventually(check)


async def test_a_proxy_that_is_killed_takes_its_companions_along(bare: Live) -> None:
    proxy = await bare.start()
    async with page(proxy) as events:
        await events.next("flows")
        pids = beside(proxy)
        assert looks(proxy) == {"flows", "problems"}
        await proxy.kill()
        await bare.until(lambda: not any(map(is_there, pids)), "they have ended as well")
    again = await bare.start()
    async with page(again) as events:
        await events.next("hello")
        await bare.until(lambda: len(looks(again)) == 2, "both run")
        pids = beside(again)
        assert await again.stop() == 0  # with a page open
    assert not any(map(is_there, pids))
