"""/debug/state: its parameters, which Services they find, and the answer as JSON or text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from heapq import merge
from typing import Final, NamedTuple

from kubeproxy.ask import state
from kubeproxy.ask.snapshot import Snapshot, unwatched
from kubeproxy.ask.state.text import node_text, service_text
from kubeproxy.model.addresses import Family, pack
from kubeproxy.model.plan import NOTHING, Frontend, ServiceName
from kubeproxy.model.planner import Planner
from kubeproxy.server.http import JSON, TEXT, Request, Response, refused
from kubeproxy.server.text import json_bytes, printable

_PARAMETERS: Final = frozenset(("namespace", "name", "address", "port", "limit", "continue", "format"))
_AT_ONCE: Final = 16  # Services written before the loop has its turn: 1 ms
_RUN: Final = 200  # names looked at before the loop has its turn: below 1 ms
_LONGEST_NUMBER: Final = 9  # digits: what is longer is no number of anything here


class Query(NamedTuple):
    """The parameters of a request; '', b'' and 0 select everything. `after` is the last Service of the previous page.

    `address` is packed.
    """

    namespace: str = ""
    name: str = ""
    address: bytes = b""
    port: int = 0
    limit: int = 0
    after: ServiceName | None = None
    text: bool = False

    def covers(self, name: ServiceName) -> bool:
        """Return whether a Service's name matches the query."""
        return (
            self.namespace in ("", name[0]) and self.name in ("", name[1]) and (self.after is None or name > self.after)
        )

    def finds(self, planner: Planner, name: ServiceName) -> bool:
        """Return whether a Service has the address and the port.

        As a frontend, a NodePort (of which an address of this node is the address only if the port is given too), a
        health check port, or an endpoint, ready or not.
        """
        if not (self.address or self.port):
            return True
        compiled = planner.compiled.get(name, NOTHING)
        if any(self._is(planner, plan.key.family, f) for plan in compiled.plans for f in plan.frontends):
            return True
        check = compiled.health
        if check is not None and check.port == self.port:
            return any(self._answers(planner, family) for family, _ in check.counts)
        return bool(self.address) and self._has_endpoint(planner, name)

    def _is(self, planner: Planner, family: Family, frontend: Frontend) -> bool:
        if self.port and frontend.port != self.port:
            return False
        return frontend.address == self.address if frontend.address and self.address else self._answers(planner, family)

    def _answers(self, planner: Planner, family: Family) -> bool:
        """Return whether the query selects a port of the node: by its number alone, or with an address of the node."""
        if not self.address:
            return True
        ours = planner.world.of(family)
        return bool(self.port) and ours is not None and self.address in {*ours.node_ips, *(ours.nodeport_ips or ())}

    def _has_endpoint(self, planner: Planner, name: ServiceName) -> bool:
        slices = planner.slices.get(name, {}).values()
        return any(
            piece.holds(self.address) and (not self.port or any(port.port == self.port for port in piece.ports))
            for piece in slices
        )


def parse_query(request: Request) -> Query:
    """Return the parsed query. Raises ValueError with the parameter and its expected form."""
    given = dict(request.parameters)
    if unknown := given.keys() - _PARAMETERS:
        raise ValueError(f"unknown parameter {sorted(unknown)[0]}; there are {', '.join(sorted(_PARAMETERS))}")
    after, form, address = given.get("continue", ""), given.get("format", ""), given.get("address", "")
    packed = pack(address) if address else b""
    if packed is None:
        raise ValueError(f"address: expected an IPv4 or IPv6 address, got {address!r}")
    if form not in {"", "json", "text"}:
        raise ValueError(f"format: expected json or text, got {form!r}")
    if after and "/" not in after:
        raise ValueError(f"continue: expected namespace/name, got {after!r}")
    port = _number("port", given, "a number from 1 to 65535")
    if port > 65535 or (port == 0 and given.get("port")):
        raise ValueError(f"port: expected a number from 1 to 65535, got {given['port']!r}")
    prefers_text = "text/plain" in request.accept and "json" not in request.accept
    namespace, _, name = after.partition("/")
    return Query(
        given.get("namespace", ""),
        given.get("name", ""),
        packed,
        port,
        _number("limit", given, "a number"),
        (namespace, name) if after else None,
        form == "text" or (not form and prefers_text),
    )


def _number(parameter: str, given: dict[str, str], expected: str) -> int:
    text = given.get(parameter) or "0"
    if not (text.isascii() and text.isdigit() and len(text) <= _LONGEST_NUMBER):
        raise ValueError(f"{parameter}: expected {expected}, got {text[:40]!r}")
    return int(text)


class StatePage:
    """Answers /debug/state. Services are written a few at a time, with the event loop running in between: a change in
    the meantime is seen when its Service's turn comes.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def handle(self, request: Request) -> Response:
        """Answer a request; see docs/operating.md."""
        try:
            query = parse_query(request)
        except ValueError as error:
            return refused(400, str(error))
        if query.namespace and query.name and self._snapshot.verdict((query.namespace, query.name)) is None:
            return refused(404, unwatched((query.namespace, query.name)))
        return Response(200, TEXT if query.text else JSON, self._pieces(query))

    async def _names(self, query: Query) -> AsyncGenerator[ServiceName, None]:
        """Yield the matching Services in order, with pauses for the event loop."""
        if query.namespace and query.name:
            yield (query.namespace, query.name)
            return
        known = list(dict.fromkeys((*self._snapshot.names, *self._snapshot.planner.slices)))
        runs = []
        for start in range(0, len(known), _RUN):
            runs.append(sorted(filter(query.covers, known[start : start + _RUN])))
            await asyncio.sleep(0)
        for count, name in enumerate(merge(*runs), 1):
            yield name
            if count % _RUN == 0:
                await asyncio.sleep(0)  # skipped Services take time as well

    async def _pieces(self, query: Query) -> AsyncGenerator[bytes, None]:
        """Write the node, and the Services in the order of their names."""
        node = state.node(self._snapshot)
        # Without the closing brace of the node's JSON: the list of Services follows inside it.
        yield node_text(node) if query.text else json_bytes(node)[:-1] + b',\n"services":['
        count, batch, last, more = 0, bytearray(), None, False
        async for name in self._names(query):
            found = state.service(self._snapshot, name) if query.finds(self._snapshot.planner, name) else None
            if found is None:
                continue  # deleted meanwhile, or only slices of it are known
            if query.limit and count == query.limit:
                more = True
                break
            batch += service_text(found) if query.text else (b",\n" if count else b"\n") + json_bytes(found)
            count, last = count + 1, name
            if count % _AT_ONCE == 0:
                yield bytes(batch)
                batch.clear()
                await asyncio.sleep(0)
        token = f"{last[0]}/{last[1]}" if more and last is not None else ""
        if query.text:
            batch += f"\nmore: add continue={printable(token)}\n".encode() * bool(token)
        else:
            batch += b'\n],"continue":' + json_bytes(token or None) + b"}\n"
        yield bytes(batch)
