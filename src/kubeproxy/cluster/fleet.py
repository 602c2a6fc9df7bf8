"""Sends one question to many nodes at the same time, and finds the facts that the answers share."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Final

import msgspec
from msgspec import Struct

from kubeproxy.ask.finding import Severity
from kubeproxy.cluster.answers import DoctorAnswer, Fact, NodeAnswer, WhyAnswer, decoded
from kubeproxy.cluster.kubectl import Container, Kubectl
from kubeproxy.cluster.proxies import ProxyPlace
from kubeproxy.commands import NO, UNKNOWN, YES, exit_code
from kubeproxy.errors import HANGS, NO_PROXY, SILENT, NoAnswerError

_NO_COMMAND: Final = re.compile(rb"unknown (shorthand )?flag")
"""The error with which the Go kube-proxy, which has no commands, refuses the option `-o`."""
_NOT_RUNNING: Final = re.compile(r"container not found|container (is|that is) not (created or )?running|stopped state")
"""Errors of container runtimes about a container that has ended, for example in CrashLoopBackOff."""
_GO: Final = re.compile(r"Kubernetes (v[^\s+]\S*)\s*")


class Reply(Struct, kw_only=True):
    """The result of one node: the answer as JSON values, or a problem. `go` is the version of a Go kube-proxy. `dead`
    means that the command examined the node without an answer from a proxy."""

    node: str
    pod: str = ""
    status: int = UNKNOWN
    problem: str = ""
    kind: str = ""
    go: str = ""
    dead: bool = False
    version: str = ""
    mode: str = ""
    answer: dict[str, Any] | None = None

    @property
    def reason(self) -> str:
        """The reason why there is no answer; '' with an answer."""
        return f"it has the Go kube-proxy {self.go}" if self.go else self.problem

    @property
    def hangs(self) -> bool:
        """Whether the proxy did not answer the node's command."""
        return self.kind in HANGS


class Shared(Struct):
    """A fact, and the nodes that state it; if `lacking`, the nodes that do not state it."""

    fact: Fact
    nodes: list[str]
    lacking: bool = False


class Fleet:
    """The replies to one question, and the facts in their answers. `whole` means that the replies also contain the
    answers as JSON values."""

    def __init__(self, command: str, arguments: Sequence[str], *, whole: bool) -> None:
        self.command = command
        self.arguments = arguments
        self.replies: list[Reply] = []
        self.answers: dict[str, NodeAnswer] = {}
        self.decisions: list[tuple[Reply, WhyAnswer | None]] = []
        """The replies and their answers of `why` (None without an answer), in the order of the questions."""
        self._whole = whole
        self.examined: list[str] = []  # the nodes on which the command answered, with or without a proxy
        self._held: dict[object, tuple[Fact, list[str]]] = {}

    @property
    def decision(self) -> WhyAnswer | None:
        """The answer of `why`, if only one node was asked."""
        return self.decisions[0][1] if len(self.decisions) == 1 else None

    def ask(self, kubectl: Kubectl, places: Sequence[ProxyPlace], options: Sequence[str], at_once: int) -> None:
        """Send the question to `at_once` nodes at the same time; on a terminal, print the progress. `options` are
        further options of the command. Raises QuestionError."""
        pool = ThreadPoolExecutor(at_once)
        try:
            asked = [pool.submit(self._reply, kubectl, place, options) for place in places]
            for count, future in enumerate(as_completed(asked), 1):
                self.add(*future.result())
                if sys.stderr.isatty():
                    sys.stderr.write(f"\r{count} of {len(places)} nodes\x1b[K" if count < len(places) else "\r\x1b[K")
                    sys.stderr.flush()
        except BaseException:
            kubectl.stop()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        self.replies.sort(key=lambda reply: reply.node)
        for reply, answer, _ in (future.result() for future in asked):
            self.decisions.append((reply, answer if isinstance(answer, WhyAnswer) else None))

    def add(self, reply: Reply, answer: NodeAnswer | None, facts: Iterable[Fact]) -> None:
        """Add a node's reply. Each fact is stored once for all nodes; an answer is stored only if it is printed."""
        self.replies.append(reply)
        if answer is None:
            return
        self.examined.append(reply.node)
        for key, fact in {fact.key: fact for fact in facts}.items():
            shown, nodes = self._held.setdefault(key, (fact, []))
            nodes.append(reply.node)
            if fact.text < shown.text:
                self._held[key] = fact, nodes
        if self.command in {"why", "flows", "trace"}:
            self.answers[reply.node] = answer

    def _reply(
        self, kubectl: Kubectl, place: ProxyPlace, options: Sequence[str]
    ) -> tuple[Reply, NodeAnswer | None, Sequence[Fact]]:
        where, arguments = place.container, place.arguments or self.arguments
        if where is None:
            return Reply(node=place.node, problem=place.problem), None, ()
        reply = Reply(node=place.node, pod=f"{where.namespace}/{where.pod}")
        # The `--` prevents that an argument is read as an option. argparse refuses a `--` without arguments.
        words = [*options, *place.options, *(["--", *arguments] if arguments else [])]
        try:
            printed = kubectl.execute(where, [self.command, "-o", "json", *words])
            if not printed.text.lstrip().startswith(b"{"):
                reply.go = _go_version(kubectl, where) if _NO_COMMAND.search(printed.errors) else ""
                reply.problem = "" if reply.go else _with_fix(printed.reason, where)
                return reply, None, ()
            answer, facts = decoded(printed.text, self.command, self.arguments)
        except NoAnswerError as error:
            reply.problem, reply.kind = _problem(error, where), error.kind
            return reply, None, ()
        reply.status = printed.status if printed.status in {YES, NO, UNKNOWN} else UNKNOWN
        if isinstance(answer, WhyAnswer):
            answer.node = place.node
        reply.dead = isinstance(answer, DoctorAnswer) and not answer.pid
        if not reply.dead:  # if no proxy ran, the version and the mode would be the command's own
            reply.version, reply.mode = answer.version, answer.mode
        reply.answer = msgspec.json.decode(printed.text) if self._whole else None
        return reply, answer, facts

    def common(self) -> list[Fact]:
        """Return the facts that all nodes state; the worst fact is first."""
        found = (fact for fact, nodes in self._held.values() if len(nodes) == len(self.examined))
        return sorted(found, key=lambda fact: fact.severity)

    def differences(self) -> list[Shared]:
        """Return the facts that some nodes state and some do not; the worst fact is first."""
        return sorted(self._differences(), key=lambda one: (one.fact.severity, one.fact.text))

    def _differences(self) -> Iterator[Shared]:
        for fact, nodes in self._held.values():
            if len(nodes) == len(self.examined):
                continue
            wrong = fact._replace(severity=Severity.BROKEN) if fact.expected else fact
            if fact.expected and 2 * len(nodes) > len(self.examined):
                yield Shared(wrong, sorted({*self.examined} - {*nodes}), lacking=True)
            else:
                yield Shared(wrong, sorted(nodes))

    def silent(self) -> dict[str, list[str]]:
        """Return the nodes without an answer, grouped by reason."""
        found: dict[str, list[str]] = {}
        for reply in self.replies:
            if reply.problem:
                found.setdefault(reply.problem, []).append(reply.node)
        return found

    def counts(self) -> dict[str, Counter[str]]:
        """Return the numbers of proxies by version and by mode; a Go kube-proxy is counted by version only."""
        mine = [reply for reply in self.replies if not (reply.problem or reply.go or reply.dead)]
        return {
            "versions": Counter(reply.version or "unknown" for reply in mine),
            "modes": Counter(reply.mode for reply in mine if reply.mode),
            "go": Counter(reply.go for reply in self.replies if reply.go),
        }

    def status(self) -> int:
        """Return NO if a node's exit code is NO or the nodes differ; else UNKNOWN if a node's exit code is UNKNOWN or a
        node gave no answer; else YES."""
        differ = any(one.fact.expected for one in self._differences())
        answers = {node: one for node, one in self.answers.items() if isinstance(one, WhyAnswer)}
        served = len(self.replies) > 1 and any(one.answer == "yes" for one in answers.values())
        avoided = {node for node, one in answers.items() if one.avoided and served}
        codes = {reply.status for reply in self.replies if not reply.go and reply.node not in avoided}
        return exit_code(wrong=NO in codes or differ, unknown=codes - {YES} or not self.examined)


def _with_fix(reason: str, where: Container) -> str:
    rest = reason.partition(": ")[2]
    if "pods/exec" in rest and "forbidden" in rest:
        user = rest.partition("forbidden: ")[2]
        can = f"`kubectl auth can-i create pods/exec -n {where.namespace}`"
        return f"{user}: give your user the right to create pods/exec in namespace {where.namespace} ({can})"
    if _NOT_RUNNING.search(reason):
        log = f"`kubectl -n {where.namespace} logs {where.pod} -c {where.name} --previous`"
        return f"its kube-proxy does not run ({reason}), and the kube-proxy's rules are still in effect: see {log}"
    return reason


def _problem(error: NoAnswerError, where: Container) -> str:
    if error.kind == NO_PROXY:
        return f"{error.fact}: `kubectl kubeproxy doctor` has the reason; the rules of a stopped proxy remain in effect"
    if error.kind == SILENT:
        end = f"or end it: `kubectl -n {where.namespace} delete pod {where.pod}`"
        fix = f"see its log (`kubectl -n {where.namespace} logs {where.pod} -c {where.name}`), {end}"
        return str(NoAnswerError(error.fact, fix, more=error.more))
    return str(error)


def _go_version(kubectl: Kubectl, where: Container) -> str:
    printed = kubectl.execute(where, ["--version"])
    match = _GO.fullmatch(printed.text.decode(errors="replace"))
    return match[1] if match is not None and "+python" not in match[1] else ""
