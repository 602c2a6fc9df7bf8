"""kubectl kubeproxy: questions to all kube-proxies of a cluster, from a machine with kubectl and a kubeconfig.

CLIENT is pod/NAME, NAMESPACE/NAME, node/NAME or an address; TARGET is svc/NAME:PORT, NAMESPACE/NAME:PORT,
pod/NAME:PORT, node/NAME:PORT or ADDRESS:PORT, followed by /udp or /sctp if the protocol is not TCP; NAME is svc/NAME or
NAMESPACE/NAME. `why` runs on the client's node; for a client outside of the cluster, it runs on the node with the
address TARGET, or else on all nodes. `trace` follows packets on the client's node, and on the endpoint's node if they
leave the first node and get no answer. Exit code 1: a node's command has the exit code 1 (wrong), or nodes differ in a
Service; 2: otherwise, if a node's command has the exit code 2 (unknown), or a node gives no answer; 0: otherwise.

  kubectl kubeproxy why pod/client svc/web:80 -n shop
  kubectl kubeproxy trace pod/client svc/web:80 -n shop
  kubectl kubeproxy services shop/web
  kubectl kubeproxy doctor --node node-a --node node-b
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial

from kubeproxy.ask.finding import Severity, end_of
from kubeproxy.ask.question import NODE
from kubeproxy.ask.why import THIS_NODE, Why
from kubeproxy.cluster import ends, show
from kubeproxy.cluster.answers import WhyAnswer
from kubeproxy.cluster.ends import Delivery
from kubeproxy.cluster.fleet import Fleet
from kubeproxy.cluster.following import Flow, follow, unsent
from kubeproxy.cluster.kubectl import Kubectl
from kubeproxy.cluster.names import Names, in_other_family, question
from kubeproxy.cluster.proxies import KUBE_PROXY, LABEL, NAMESPACE, ProxyPlace, survey
from kubeproxy.commands import NO, completed, exit_code, output, watching
from kubeproxy.errors import QuestionError
from kubeproxy.model.answer import AnswerStep
from kubeproxy.release import build

_COMMANDS = {
    "why": "the outcome of a connection, on the client's node",
    "trace": "the rules that packets of a connection pass, on the client's and the endpoint's node",
    "doctor": "problems of the nodes with Services, each with its fix",
    "verify": "differences between the proxies' plans, their kernels and the API server",
    "services": "the Services on the nodes, and the differences between nodes",
    "flows": "present connections of Services, over all nodes",
}
_CONNECTION = ("context", "kubeconfig", "cluster", "user", "as", "as-group", "as-uid")
"""Options that are kubectl's own."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    about, _, rest = (__doc__ or "").partition("\n\n")
    made = argparse.ArgumentParser(
        "kubectl kubeproxy",
        description=about,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--version", action="version", version=build().name)
    commands = made.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in _COMMANDS.items():
        _add(commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False))
    why, trace, verify, flows = (commands.choices[name] for name in ("why", "trace", "verify", "flows"))
    for one in (why, trace):
        one.add_argument("client", metavar="CLIENT", help="pod/NAME, NAMESPACE/NAME, node/NAME, or an address")
        target = "svc/NAME:PORT, NAMESPACE/NAME:PORT, node/NAME:PORT, pod/NAME:PORT, or ADDRESS:PORT[/PROTOCOL]"
        one.add_argument("target", metavar="TARGET", help=target)
    listening = "how long each trace waits for packets (default 10)"
    trace.add_argument("--seconds", type=float, metavar="N", default=10.0, help=listening)
    why.add_argument("--interface", default="", help="the interface on which the client's packets reach the node")
    why.add_argument("--no-probe", action="store_true", help="do not try to reach the endpoints")
    for name in ("verify", "services", "flows"):
        commands.choices[name].add_argument("name", nargs="?", metavar="NAME", help="svc/NAME, or NAMESPACE/NAME")
    verify.add_argument("--api", action="store_true", help="compare all Services with the API server, too")
    for command in (verify, commands.choices["services"]):
        watching.argument(command)
    flows.add_argument("--seconds", type=float, metavar="N", help="how long to listen (default 1)")
    return made


def _add(command: argparse.ArgumentParser) -> None:
    ours = command.add_argument_group("the nodes")
    ours.add_argument("--node", action="append", default=[], metavar="NAME", help="ask this node only; repeatable")
    ours.add_argument(
        "--proxy-namespace", metavar="NAME", default=NAMESPACE, help=f"kube-proxy's namespace ({NAMESPACE})"
    )
    selecting = f"label selector of its pods (default: label {LABEL} with {KUBE_PROXY} in its value)"
    ours.add_argument("--proxy-selector", metavar="SELECTOR", default="", help=selecting)
    ours.add_argument("--at-once", type=int, metavar="N", default=16, help="nodes to ask at the same time (16)")
    ours.add_argument("--timeout", type=float, metavar="SECONDS", default=30.0, help="for each node (30)")
    ours.add_argument("-o", "--output", choices=("text", "json"), default="text", help="for people, or for programs")
    theirs = command.add_argument_group("given to kubectl")
    theirs.add_argument("-n", "--namespace", default="", help="namespace of names that have none")
    for name in _CONNECTION:
        theirs.add_argument(f"--{name}", action="append", default=[], metavar="VALUE", help=argparse.SUPPRESS)
    theirs.description = "Also " + ", ".join(f"--{name}" for name in _CONNECTION) + "."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the plugin; return the exit code."""
    made, words = parser(), sys.argv[1:] if argv is None else argv
    if words and words[0].startswith("-") and words[0] not in {"-h", "--help", "--version"}:
        made.error(f"put {words[0]} after the command, as in `kubectl kubeproxy why pod/client svc/web:80 -n shop`")
    given = made.parse_args(words)
    return completed(lambda: _run(given), given.output)


def _run(given: argparse.Namespace) -> int:
    values, asker = vars(given), _Asker(given)
    names = asker.names
    if given.command == "why":
        _, fleet = asker.nearest(_options(given))
        return asker.answer(fleet, asker.deliveries(fleet))
    if given.command == "trace":
        return asker.trace()
    arguments = [names.service(given.name)] if values.get("name") else []
    asked = partial(asker.ask, asker.found.of(given.node), given.command, arguments, _options(given))
    if not values.get("watch"):
        return asker.answer(asked())

    def look() -> watching.WatchedAnswer:
        fleet = asked()
        rows = show.rows(fleet, names.known)
        return watching.WatchedAnswer(show.fields(fleet), lambda: show.many(fleet, names.known), rows, fleet.status())

    return watching.answered(given, look, time.monotonic)


class _Asker:
    """Asks the nodes about the connection or the Services on the command line (`given`), and prints the answers."""

    def __init__(self, given: argparse.Namespace) -> None:
        values = vars(given)
        connection = [f"--{name}={value}" for name in _CONNECTION for value in values[name.replace("-", "_")]]
        self._given = given
        self._kubectl = Kubectl(connection, given.timeout + (values.get("seconds") or 0))
        self.found = survey(self._kubectl, given.proxy_namespace, given.proxy_selector)
        self.names = Names(self._kubectl, self.found.nodes, given.namespace)
        if self.found.problem:
            _warn(self.found.problem)

    def ask(
        self, places: Sequence[ProxyPlace], command: str, arguments: Sequence[str], options: Sequence[str]
    ) -> Fleet:
        """Run a command on these nodes."""
        fleet = Fleet(command, arguments, whole=self._given.output == "json")
        # The traces of one connection run at the same time.
        fleet.ask(self._kubectl, places, options, max(self._given.at_once, 1 if command != "trace" else len(places)))
        return fleet

    def nearest(self, options: Sequence[str]) -> tuple[Fleet, Fleet]:
        """Run `why` on the client's node; for a client outside of the cluster, run `why` on the Node with the target's
        address, or on all nodes. Then run `why` on the node to which the answer refers, if any. Return the answers of
        the client's node and of the node that handles the connection; usually these nodes are the same."""
        given, found, names = self._given, self.found, self.names
        source, target = names.client(given.client), names.target(given.target)
        entry = source.node or ("" if source.addresses == (NODE,) else target.node)
        chosen = given.node or ([entry] if entry else [])
        if not chosen and source.addresses == (NODE,):
            raise QuestionError("the client is a node without a name: give node/NAME, or node with --node NAME")
        if given.command == "trace" and len(chosen) != 1:
            raise QuestionError(f"trace follows the packets of {given.client} from one node: give its name by --node")
        if not chosen:
            _warn(
                f"{given.client} is on no known node, so all nodes are asked; --node selects the node to which the "
                f"client connects"
            )
        arguments = question(source, target)
        fleet = self.ask(found.of(chosen), "why", arguments, options)
        if len(chosen) == 1 and fleet.replies[0].hangs and target.service and target.addresses:
            # A proxy that hangs cannot resolve the name of a Service. For an address, the node's command reads the
            # rules without the proxy.
            fleet.arguments = arguments = question(source, target._replace(service=""))
            if given.command == "why":
                fleet = self.ask(found.of(chosen), "why", arguments, options)
        answers = [one for one in fleet.answers.values() if isinstance(one, WhyAnswer)]
        is_stopped = any(one.answer == "no" for one in answers)
        elsewhere = answers[0].why.elsewhere if len(answers) == 1 and not given.node and not is_stopped else None
        first = fleet
        if elsewhere is not None and elsewhere.node in found.places:
            if arguments[0] == NODE and (own := names.address_of(source.node, answers[0].why.destination)):
                arguments = own, arguments[1]  # on the next node, the word node means that node itself
            fleet = self.ask(found.of([elsewhere.node]), "why", arguments, options)
            first = first if elsewhere.end == "destination" else fleet
        if (answer := fleet.decision) is not None:
            answer.why = names.placed(answer.why, ends.MOST)
            other = in_other_family(source, target, answer.why.destination)
            service = answer.why.service
            is_shared = target.service or not service or (other and names.has_family(service, other))
            names.other_family = other if is_shared else ""
        return first, fleet

    def trace(self) -> int:
        """Trace packets on the client's node and on the node that gets them next, which `why` names."""
        given, names = self._given, self.names
        first, near = self.nearest(["--no-probe"])
        node, decider = first.replies[0].node, near.replies[0].node
        client, destination = first.arguments
        # If the proxy hangs, the node's command follows packets to an address without the proxy.
        answer = _undecided(decider, client, destination) if near.replies[0].hangs else near.decision
        if answer is None:
            return self.answer(near)
        sending = [] if client == NODE else ["--send"]

        def traced(flows: Mapping[str, Flow], packets: int) -> Fleet:
            nonlocal sending
            if sending == ["--no-send"]:
                nodes, again = " and ".join(sorted(flows)), "again " * (len(flows) > 1)
                _warn(f"{nodes}: tracing for {given.seconds:g} s; let {given.client} connect {again}now")
            places = [
                one._replace(arguments=flows[one.node], options=sending if one.node == node else ["--no-send"])
                for one in self.found.any_of(flows)
            ]
            limits = [f"--seconds={given.seconds}", f"--packets={packets}"]
            fleet = self.ask(places, "trace", near.arguments, limits)
            if sending == ["--send"] and (reason := unsent(fleet, node)):
                _warn(f"{node} {reason}")
                sending = ["--no-send"]
                return traced(flows, packets)
            return fleet

        followed = follow(traced, node, client, answer.why, decider)
        why = answer.why
        causes = [answer.named(step.text) for step in why.steps if not step.passes] if why.elsewhere is None else []
        fixes = list(map(answer.named, answer.fixes)) if causes else []
        gone = ends.outdated(answer, names.listed(why))
        if gone is not None:
            causes.append(gone.what)
            fixes.append(gone.fix)
        heading = ": ".join((answer.connection, *causes, followed.text))
        if given.output == "json":
            output.json(show.fields(followed.fleet) | {"heading": heading})
        else:
            show.traces(followed, heading, fixes, names.known)
            self._show_other_family()
        return NO if gone is not None else followed.status

    def deliveries(self, fleet: Fleet) -> list[Delivery]:
        """If one node gave the answer, ask the endpoints' nodes, one question per endpoint, and compare the answer's
        endpoints with the API server's. These questions omit --interface, which applies only to the client's node."""
        near, found = fleet.decision, self.found
        if near is None:
            return []
        reply, destination = fleet.replies[0], near.why.destination
        chosen = ends.asked(near)
        listed = self.names.listed(near.why)
        places = [
            place._replace(arguments=ends.question(end, destination))
            for end, place in zip(chosen, found.any_of(end.node for end in chosen), strict=True)
        ]
        there = self.ask(places, "why", (), ["--no-probe"] * self._given.no_probe)
        made = [
            Delivery(end, *asked, listed=end_of(end.address) in listed if listed is not None else None)
            for end, asked in zip(chosen, there.decisions, strict=True)
        ]
        if finding := ends.outdated(near, listed):
            near.add(finding)
            reply.status = NO
        for one in made:
            ends.contrast(near, one)
            ends.confirm(near, one)
        ends.settle(near, made)
        if own := self.names.address_of(reply.node, destination):
            silent = ends.unanswered(near, made)
            places = [
                place._replace(arguments=(own, ends.question(one.end, destination)[1]))
                for one, place in zip(silent, found.any_of(one.end.node for one in silent), strict=True)
            ]
            again = self.ask(places, "why", (), ["--no-probe"])
            for one, (_, probe) in zip(silent, again.decisions, strict=True):
                if probe is not None:
                    ends.excuse(near, reply, one, probe)
        return made

    def answer(self, fleet: Fleet, deliveries: Sequence[Delivery] = ()) -> int:
        """Print the answers; return the exit code."""
        given, answer = self._given, fleet.decision
        if given.output == "json":
            output.json(show.fields(fleet, deliveries))
        elif answer is not None:
            trace = _command(given, "trace", given.target)
            show.one(fleet.replies[0], answer, self.names.known, deliveries, trace)
            self._show_other_family()
        else:
            show.many(fleet, self.names.known)
        code, severities = fleet.status(), {one.severity for one in deliveries}
        is_partial = answer is not None and ends.unchecked(answer, deliveries)
        unknown = code or is_partial or Severity.UNKNOWN in severities
        return exit_code(wrong=code == NO or Severity.BROKEN in severities, unknown=unknown)

    def _show_other_family(self) -> None:
        """Print the command with the same question in the address family that the answer omits."""
        if other := self.names.other_family:
            family, given = "IPv6" if other.startswith("[") else "IPv4", self._given
            output.say(f"Next: the same over {family}: {shlex.join(_command(given, given.command, other))}")


def _undecided(node: str, client: str, destination: str) -> WhyAnswer:
    """Return the answer for a connection on a node with a proxy that hangs."""
    steps = (AnswerStep(False, f"the proxy of {node} hangs"),)
    source = THIS_NODE if client == NODE else client
    why = Why(source=source, destination=destination, outcome="unknown", client_sees="unknown", steps=steps)
    return WhyAnswer(schema_version=1, version="", node=node, decision=why.decision(), answer="unknown", why=why)


def _options(given: argparse.Namespace) -> list[str]:
    values = vars(given)
    options = [f"--{name}" for name in ("no-probe", "api") if values.get(name.replace("-", "_"))]
    return options + [f"--{name}={values[name]}" for name in ("interface", "seconds") if values.get(name)]


def _command(given: argparse.Namespace, command: str, target: str) -> list[str]:
    """Return a command of the plugin with the client and the options of this question."""
    kept = ("namespace", *_CONNECTION, "node", "proxy-namespace", "proxy-selector")
    default = vars(parser().parse_args([command, given.client, target]))
    options = [(name, vars(given)[key]) for name in kept if vars(given)[key := name.replace("-", "_")] != default[key]]
    values = [(name, one) for name, found in options for one in ([found] if isinstance(found, str) else found)]
    return ["kubectl", "kubeproxy", command, given.client, target, *(f"--{name}={one}" for name, one in values)]


def _warn(text: str) -> None:
    print(output.shown(text), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
