"""Targets for data from an API server, real or forged: HTTP, lists, watches, objects."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from kubeproxy.api.cluster import validities
from kubeproxy.api.connection import ApiConnection, Exchange
from kubeproxy.api.credentials import ExecConfig, ExecPlugin
from kubeproxy.api.decode import WatchDecoder, decode_object, decode_page
from kubeproxy.api.manifests import read_documents
from kubeproxy.api.status import StatusError, decode_status
from kubeproxy.backends.iptables.contents import Contents
from kubeproxy.backends.iptables.skeleton import SHARED, RuleSettings, StartOptions
from kubeproxy.backends.nftables.render import Numbers, place, render
from kubeproxy.errors import KubeProxyError
from kubeproxy.model.addresses import Family
from kubeproxy.model.events import Deleted, Replaced, Upserted
from kubeproxy.model.objects import Resource
from kubeproxy.model.plan import ServiceName, ServicePlan
from kubeproxy.model.planner import Planner
from support.cluster_objects import world
from support.fuzz.transports import Deaf, deliver

RESOURCES: Final[tuple[Resource, ...]] = ("services", "endpointslices", "nodes", "servicecidrs")
_WORLD = world()


def lists(data: bytes) -> None:
    """A page of a list; the first byte selects the resource."""
    resource = RESOURCES[data[0] & 3] if data else "services"
    page = decode_page(resource, data[1:])
    assert isinstance(page.version, str)
    for found in page.objects:
        assert found.metadata.name


def watches(data: bytes) -> None:
    """A watch, in two pieces; the first bytes select the resource and two places to cut.

    Both cuts must give the same result.
    """
    if len(data) < 2:
        return
    resource, cut, rest = RESOURCES[data[0] & 3], data[1], data[2:]
    whole, pieces = WatchDecoder(resource), WatchDecoder(resource)
    at_once = whole.feed(rest)
    first = pieces.feed(rest[:cut])
    second = pieces.feed(rest[cut:]) if first.error is None else first
    if at_once.error is None:
        assert second.error is None
        assert at_once.events == [*first.events, *second.events]
        whole.finish()


def statuses(data: bytes) -> None:
    """A Status of failure, and the output of an exec plugin."""
    error = StatusError(decode_status(data, 500))
    assert len(str(error)) < 1100
    config = ExecConfig(api_version="client.authentication.k8s.io/v1", command="/x")
    ExecPlugin(config, "user")._decode(data)


def cluster(data: bytes) -> None:
    """Lines of Services, EndpointSlices and Nodes, compiled to the kernel's rules in two modes.

    A line is an object; its first letter S, E, N or C is the kind, in lower case for a deletion.
    """
    planner = Planner(_WORLD)
    planner.apply([Replaced(resource, ()) for resource in RESOURCES])
    for line in data.split(b"\n")[:40]:
        letter = line[:1].upper()
        if letter not in b"SENC" or not letter:
            continue
        resource = RESOURCES[b"SENC".index(letter)]
        found, rejected = decode_object(resource, line[1:])
        if found is None:
            planner.apply(rejected)
        elif line[:1].islower():
            planner.apply([Deleted(resource, found.metadata.namespace or "", found.metadata.name)])
        else:
            planner.apply([Upserted(resource, found), *rejected])
    changes = planner.take()
    for family in Family:
        plans = {
            change.name: tuple(plan for plan in change.after.plans if plan.key.family is family) for change in changes
        }
        _render(family, plans)


def _render(family: Family, plans: dict[ServiceName, tuple[ServicePlan, ...]]) -> None:
    numbers = Numbers()
    for found in plans.values():
        render([place(plan, None, numbers) for plan in found])
    contents = Contents(RuleSettings(family, StartOptions(False, False, False), 0, None, ""), plans)
    text = "".join(rules for chains in contents.own_chains() for rules in chains.values())
    text += "".join(contents.shared(place).text for place in SHARED)
    for line in text.splitlines():
        assert line.startswith("-A KUBE-"), line
        assert line.count('"') % 2 == 0, line
    text.encode("ascii")


def manifests(data: bytes) -> None:
    """A file of the manifest folder; it is JSON if the first byte is odd."""
    read_documents("a.json" if data[:1] and data[0] & 1 else "a.yaml", data[1:])


def certificates(data: bytes) -> None:
    """PEM, of which the proxy reads only the dates."""
    validities(data)


_runner = asyncio.Runner()


def answers(data: bytes) -> None:
    """An HTTP answer; the first byte selects the cuts, and whether a watch reads it."""
    if data:
        _runner.run(_answer(data[0], data[1:]))


async def _answer(how: int, data: bytes) -> None:
    transport = Deaf()
    connection = ApiConnection("server", lambda _: None)
    connection.connection_made(transport)
    decoder = WatchDecoder("services")

    def sink(piece: bytes) -> None:
        decoder.feed(piece)

    exchange = Exchange(idle_timeout=30, on_headers=lambda _: None, sink=sink if how & 1 else None)
    connection.start(exchange, b"GET / HTTP/1.1\r\n\r\n")
    deliver(connection, transport, data, 1 + (how >> 1 & 63))
    connection.connection_lost(None)
    assert exchange.done.done()
    try:
        exchange.done.result()
    except KubeProxyError:
        return
    assert exchange.status >= 200
    if not exchange.streaming:
        decode_status(exchange.body, exchange.status)


def encoded(letter: bytes, thing: object) -> bytes:
    """Return a line as `cluster` parses it."""
    return letter + msgspec.json.encode(thing)
