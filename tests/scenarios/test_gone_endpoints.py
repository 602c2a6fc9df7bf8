"""--reset-gone-endpoints: clients of a deleted endpoint are reset at once, and no others.

Kubernetes issues 46753 and 104098: without it clients hang for minutes. All tests share one cluster; each has a
separate Service.
"""

from __future__ import annotations

import asyncio
import errno
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from lab.netns import open_socket_in
from support.documents import document
from support.live import Front, Live
from support.modes import modes
from support.traffic import DUAL, REQUEST

FLAG = ["--reset-gone-endpoints"]
PLACES = ("pod", "outside", "node")
WAIT = 5.0
(DOCUMENTED,) = (
    text.partition("#")[0]
    for _, text in document("docs/beyond.md").commands
    if text.strip().startswith("nft list set ip kube-proxy gone")
)
SILENCE = 1.5
"""Seconds after which a client counts as not reset; a reset takes at most one second here."""


class Client:
    """An open connection of a place."""

    def __init__(self, live: Live, place: str, front: Front) -> None:
        family = socket.AF_INET6 if ":" in front.address else socket.AF_INET
        self.name = f"{place} to {front.address}:{front.port}"
        self._sock = open_socket_in(live.cluster.namespace_of(place), lambda: socket.socket(family, socket.SOCK_STREAM))
        self._sock.settimeout(WAIT)
        self._sock.connect(front)

    def close(self) -> None:
        self._sock.close()

    def ask(self) -> str:
        """Send a request; return the pod that answers, or 'reset', 'timeout' or 'end'."""
        try:
            self._sock.send(REQUEST)
            answer = self._sock.recv(4096)
            return str(json.loads(answer.partition(b"\r\n\r\n")[2])["pod"]) if answer else "end"
        except TimeoutError:
            return "timeout"
        except OSError as error:
            return "reset" if error.errno in {errno.ECONNRESET, errno.EPIPE} else str(error)

    def read(self, patience: float) -> str:
        """Return the event without a request: 'nothing', 'reset' or 'end'."""
        self._sock.settimeout(patience)
        try:
            return "answer" if self._sock.recv(4096) else "end"
        except TimeoutError:
            return "nothing"
        except OSError:
            return "reset"

    def finish(self) -> None:
        """Close the sending side."""
        self._sock.shutdown(socket.SHUT_WR)


@contextmanager
def clients(live: Live, name: str) -> Iterator[list[Client]]:
    """Open connections to a Service from everywhere, in both families; each was answered."""
    with ExitStack() as stack:
        made = []
        for family in ("IPv4", "IPv6"):
            for place in PLACES:
                front = live.front(name, "nodeport" if place == "outside" else "cluster", family)
                made.append(Client(live, place, front))
                stack.callback(made[-1].close)
        yield made


async def asked(made: list[Client]) -> dict[str, str]:
    """Return the results of each connection's next request."""
    found = await asyncio.gather(*(asyncio.to_thread(each.ask) for each in made))
    return dict(zip((each.name for each in made), found, strict=True))


async def serve(live: Live, name: str, pod: str) -> None:
    live.service(name, pod, type="NodePort", **DUAL)
    for family in ("IPv4", "IPv6"):
        await live.programmed(live.front(name, "cluster", family), pod)


async def gone(live: Live, pod: str) -> None:
    """Wait until the kernel resets connections to a pod."""

    async def check() -> str:
        return "" if await known(live, pod) == 4 else f"{pod} is not known to be gone"

    await live.eventually(check)


async def known(live: Live, pod: str) -> int:
    """Return the number of elements for a deleted pod: TCP and UDP, in two families."""
    lists = [await live.run(*DOCUMENTED.replace(" ip ", f" {table} ").split()) for table in ("ip", "ip6")]
    return sum(text.count(f"{ip} . ") for text, ip in zip(lists, live.ips[pod].values(), strict=True))


async def silence(live: Live, pod: str) -> None:
    """Remove a pod's network without an announcement, as when its node fails."""
    await live.run("ip", "link", "set", "eth0", "down", place=pod)


@modes("nftables")
async def test_only_connections_to_deleted_endpoints_are_reset(bare: Live) -> None:
    await bare.start(args=FLAG)
    await killed(bare)
    await drained(bare)
    await label_changed(bare)
    await address_reused(bare)
    await moved(bare)
    await bare.proxy.kill()
    await bare.start(args=FLAG)
    assert not bare.logged("Replacing the table")
    assert await known(bare, "b1") == 4, "a restart lets the kernel keep what it knows"
    status, text = await bare.ask("verify")
    assert status == 0, text
    await bare.nft(
        "add", "element", "ip", "kube-proxy", "gone-endpoints", f"{{ {bare.ips['a3']['IPv4']} . tcp . 3000 }}"
    )
    status, text = await bare.ask("verify")
    assert status == 1, text
    assert "whose connections are reset as if it were deleted" in text, text


async def killed(live: Live) -> None:
    """The endpoint is deleted while it is terminating: its clients through a Service are reset, from its address."""
    await serve(live, "killed", "b1")
    with clients(live, "killed") as made:
        direct, followed = (
            Client(live, "pod", Front(live.ips["b1"]["IPv4"], 3000)),
            Client(live, "pod", live.front("killed")),
        )
        assert set((await asked([*made, direct, followed])).values()) == {"b1"}
        live.endpoints("killed", "b1/draining")
        assert set((await asked(made)).values()) == {"b1"}, "who is terminating goes on answering"
        await silence(live, "b1")
        live.endpoints("killed", "")
        await gone(live, "b1")
        await told(live, "b1", followed, live.front("killed"))
        found = await asked(made)
        assert set(found.values()) == {"reset"}, found
        assert await asyncio.to_thread(direct.ask) == "timeout", "no Service led there"
        direct.close()


async def told(live: Live, pod: str, client: Client, front: Front) -> None:
    """`why` names the deleted endpoint, and `trace` the chain that resets a client."""
    where = live.ips["pod"]["IPv4"], f"{front.address}:{front.port}"
    _, text = await live.ask("why", *where)
    assert f"not to {live.ips[pod]['IPv4']}:3000: deleted after its termination" in text, text
    assert "(--reset-gone-endpoints)" in text, text
    traced = asyncio.ensure_future(live.ask("trace", *where, "--no-send", "--seconds", "8", "--packets", "1"))

    async def listening() -> str:
        return "" if "kube-proxy-trace" in await live.nft("list", "tables") else "the trace has not begun"

    await live.eventually(listening)
    assert await asyncio.to_thread(client.ask) == "reset"
    client.close()
    _, text = await traced
    assert "the connection's endpoint is deleted: reset" in text, text


async def drained(live: Live) -> None:
    """A client whose connection the endpoint has finished sees its end, and no reset, at any later time."""
    await serve(live, "drained", "a1")
    with clients(live, "drained") as made:
        assert set((await asked(made)).values()) == {"a1"}
        live.endpoints("drained", "a1/draining")
        for each in made:
            each.finish()
        await asyncio.sleep(0.2)  # both ends are closed
        live.endpoints("drained", "")
        await gone(live, "a1")
        found = {each.name: each.read(SILENCE) for each in made}
        assert set(found.values()) == {"end"}, found


async def label_changed(live: Live) -> None:
    """An endpoint that is removed while its pod runs, ready or not, keeps its connections."""
    await serve(live, "relabelled", "a2")
    with clients(live, "relabelled") as made:
        assert set((await asked(made)).values()) == {"a2"}
        live.endpoints("relabelled", "a2/unready")
        live.endpoints("relabelled", "")
        await live.programmed(live.front("relabelled"), "")
        await asyncio.sleep(SILENCE)
        found = await asked(made)
        assert set(found.values()) == {"a2"}, found
    assert await known(live, "a2") == 0


async def address_reused(live: Live) -> None:
    """A new pod with the same address is not affected: from its first connection on."""
    await serve(live, "before", "a3")
    live.endpoints("before", "a3/draining")
    live.endpoints("before", "")
    await gone(live, "a3")
    await serve(live, "after", "a3")
    with clients(live, "after") as made:
        found = await asked(made)
        assert set(found.values()) == {"a3"}, found
    assert await known(live, "a3") == 0


async def moved(live: Live) -> None:
    """A slice that is deleted with its Service, or written in two steps, does not mean that endpoints are deleted."""
    await serve(live, "deleted", "b2")
    await serve(live, "moved", "b3")
    with clients(live, "deleted") as made, clients(live, "moved") as others:
        assert set((await asked(made)).values()) == {"b2"}
        live.endpoints("deleted", "b2/draining")
        live.delete("deleted")
        live.endpoints("moved", "b3/draining")
        live.endpoints("moved", "")
        live.endpoints("moved", "b3/draining")
        await asyncio.sleep(SILENCE)
        found = await asked([*made, *others])
        assert set(found.values()) == {"b2", "b3"}, found
    assert [await known(live, pod) for pod in ("b2", "b3")] == [0, 0]
