"""kube-proxy flows: the present connections of Services, from connection tracking.

Without a name, the command prints the Services that have connections; with NAMESPACE/NAME, or NAME in the namespace
default, the endpoints and clients of that Service. Unanswered connections are older than a second and never had a
reply; `trace` finds an endpoint that has replied before but no longer replies. Exit code 1: the Service has unanswered
connections; 2: the Service is unknown. With -f, the command prints each connection when it begins and when it ends,
until Ctrl-C or for --seconds.

The kernel reports only connections of Services to the command. If following all new connections would take more than
0.4 of a CPU, the command follows one in two, four, ..., and prints the number of omitted connections.

  kube-proxy flows
  kube-proxy flows default/web
  kube-proxy flows default/web -f
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from itertools import chain

from kubeproxy.ask import cluster
from kubeproxy.ask.flows.follow import Cost, Follower, Ground, Known, ground, read
from kubeproxy.ask.flows.sampling import Sampled
from kubeproxy.ask.flows.users import OTHERS, PortUse, ServedPorts, numbers, uses
from kubeproxy.ask.snapshot import unwatched
from kubeproxy.ask.source import source
from kubeproxy.commands import YES, exit_code, output
from kubeproxy.commands.services import service_name
from kubeproxy.errors import QuestionError, Unsupported
from kubeproxy.kernel.conntrack.tracked import NOT_ANNOUNCED, Events, announced
from kubeproxy.model.plan import ServiceName
from kubeproxy.wording import counted

_SHOWN = 20  # rows of a table in the text
_CLIENTS = 10


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="NAMESPACE/NAME, or a NAME in default")
    parser.add_argument("-f", "--follow", action="store_true", help="print connections as they begin and end")
    parser.add_argument(
        "--seconds", type=seconds, metavar="N", help="seconds to listen (default 1, with -f until Ctrl-C)"
    )


def seconds(text: str) -> float:
    """Return the seconds in an argument. Raises ValueError for an invalid duration."""
    value = float(text)
    if not 0 < value <= 86400:
        raise ValueError(text)
    return value


def run(given: argparse.Namespace) -> int:
    where = ground(source(given))
    names = [service_name(given.name)] if given.name else []
    served = where.served(names)
    if names and not served.all:
        raise QuestionError(unwatched(names[0]))
    if given.follow:
        return _follow(where, names, served, given)
    cost = read(where, served, given.seconds or 1.0)
    known = cluster.pods(where.facts, names[0])[0] if names else {}
    found = [uses(port, cost.seconds, known) for port in served.all]
    if given.output == "json":
        output.json({"mode": where.facts.mode, "ports": found, "look": cost})
    elif names:
        _print_service("/".join(names[0]), found)
    else:
        _print_all(found)
    if given.output != "json":
        _print_cost(cost)
    return exit_code(wrong=names and any(one.unanswered for one in found))


def _sums(ports: Sequence[PortUse]) -> tuple[int, float, int, int]:
    total, new, silent, closing = (sum(column) for column in zip(*map(numbers, ports), strict=True))
    return int(total), new, int(silent), int(closing)


def _print_service(name: str, ports: Sequence[PortUse]) -> None:
    total, new, silent, closing = _sums(ports)
    heading = f"{name}: {counted(total, 'connection')}, {new:.1f} new a second"
    output.say(f"{heading}, {silent} unanswered, {closing} closing")
    head = ("PORT", "ENDPOINT", "POD", "CONNECTIONS", "SHARE", "NEW/S", "UNANSWERED", "CLOSING", "")
    rows = [
        (
            port.port,
            one.address,
            one.pod,
            str(one.connections),
            f"{one.share:.0%}",
            f"{one.new_per_second:.1f}",
            str(one.unanswered),
            str(one.closing),
            "" if one.serving else "no endpoint any more",
        )
        for port in ports
        for one in port.endpoints
    ]
    output.table(head, rows, "  ", _SHOWN)
    clients = sorted(
        ((one, port) for port in ports for one in port.clients),
        key=lambda pair: (-pair[0].connections, -pair[0].closing),
    )
    if clients:
        output.say()
        shown = [
            (port.port, one.address, one.pod, str(one.connections), str(one.unanswered), str(one.closing))
            for one, port in clients
        ]
        output.table(("PORT", "CLIENT", "POD", "CONNECTIONS", "UNANSWERED", "CLOSING"), shown, "  ", _CLIENTS)


def _print_all(ports: Sequence[PortUse]) -> None:
    by_service: dict[str, list[PortUse]] = {}
    for port in ports:
        if port.connections or port.closing or port.new_per_second:
            by_service.setdefault(port.service, []).append(port)
    rows = [(service, *_sums(used), _busiest_client(used)) for service, used in by_service.items()]
    rows.sort(key=lambda row: (-row[1], -row[4], row[0]))
    if not rows:
        output.say("no Service has connections")
        return
    head = ("SERVICE", "CONNECTIONS", "NEW/S", "UNANSWERED", "CLOSING", "BUSIEST CLIENT")
    output.table(head, [(a, str(b), f"{c:.1f}", str(d), str(e), f) for a, b, c, d, e, f in rows], "  ", _SHOWN)


def _busiest_client(ports: Sequence[PortUse]) -> str:
    sums: dict[str, tuple[int, int]] = {}
    for one in chain.from_iterable(port.clients for port in ports):
        if one.address != OTHERS:
            open_, closing = sums.get(one.address, (0, 0))
            sums[one.address] = open_ + one.connections, closing + one.closing
    if not sums:
        return ""
    address, (open_, closing) = max(sums.items(), key=lambda item: item[1])
    return f"{address} ({open_ or f'{closing} closing'})"


def _print_cost(cost: Cost) -> None:
    text = f"listened for {cost.seconds:.1f} s and read {counted(cost.connections, 'connection')}"
    text += f", in {cost.processor_seconds:.2f} s of CPU time"
    if cost.left_out:
        text += f"; {cost.new} of the new connections were examined and stand for {cost.left_out} more"
    if cost.lost:
        text += f"; {cost.lost} times the kernel dropped events, so the number of new connections is too small"
    output.marked(output.NOTE, text)
    if not cost.announced:
        output.marked(output.NOTE, f"new connections are not counted: {NOT_ANNOUNCED}")


def _follow(where: Ground, names: Sequence[ServiceName], served: ServedPorts, given: argparse.Namespace) -> int:
    if not announced():
        raise Unsupported(f"nothing can be followed: {NOT_ANNOUNCED}")
    known = Known(where, names, served)
    known.look_up_pods()
    people = given.output != "json"
    if known.trouble and people:
        output.marked(output.NOTE, f"pods are shown by their addresses: {known.trouble}")
    end = time.monotonic() + given.seconds if given.seconds else float("inf")
    with Events.listen(where.wanted) as events:
        sampled = Sampled(events, _say_rate if people else lambda one_in: output.json_line({"one_in": one_in}))
        follower = Follower(known)
        try:
            while time.monotonic() < end:
                for event, _ in sampled.for_a_while(end):
                    line = follower.line(event)
                    if line is not None and people:
                        output.say(str(line))
                    elif line is not None:
                        output.json_line(line)
                sys.stdout.flush()
                known.renew()
        except KeyboardInterrupt:
            pass
        _print_end(sampled, people=people)
    return YES


def _say_rate(one_in: int) -> None:
    text = (
        f"from now on the command follows one connection in {one_in}"
        if one_in > 1
        else "all connections are followed again"
    )
    output.marked(output.NOTE, text)


def _print_end(sampled: Sampled, *, people: bool) -> None:
    received, left_out, lost = sampled.received, sampled.left_out, sampled.lost
    if not people:
        output.json_line({"heard": received, "left_out": left_out, "lost": lost})
        return
    text = f"received {received} beginnings and ends of connections"
    if left_out:
        text += f", left out about {left_out}"
    if lost:
        text += f", and the kernel dropped some {lost} times"
    output.marked(output.NOTE, text)
