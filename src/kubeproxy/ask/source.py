"""The source of a command's answers: the running proxy, or a Desk with objects read for one question."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from kubeproxy.ask.checks import contact
from kubeproxy.ask.facts import Facts, NodeListener, Objects, ProgrammedService
from kubeproxy.ask.why import Explained
from kubeproxy.control.client import Client
from kubeproxy.errors import ConfigError, NoAnswerError
from kubeproxy.features import FEATURES
from kubeproxy.model.plan import ServiceName

if TYPE_CHECKING:
    from kubeproxy.ask.desk import Desk
    from kubeproxy.report.journal import Past


AT_ONCE = 100  # Services in one request
MANY = 1000
"""A command requests all Services instead of single Services if it needs more Services than this."""


class Running:
    """The Desk of the proxy behind a socket. Every call may raise KubeProxyError."""

    running: Final = True
    flags: Final = ""  # see Desk; by default a command queries the running proxy

    def __init__(self, client: Client) -> None:
        self.client = client
        self.control = client.path

    def facts(self) -> Facts:
        """See Desk."""
        return self.client.ask("/facts", Facts)

    def why(self, source: str, target: str, interface: str = "") -> Explained:
        """See Desk."""
        return self.client.ask("/why", Explained, source=source, target=target, interface=interface)

    def services(self, names: Sequence[ServiceName] = ()) -> Iterator[ProgrammedService]:
        """See Desk."""
        if len(names) > MANY:
            wanted = frozenset(names)
            yield from (held for held in self.services() if held.name in wanted)
            return
        # The request line is limited to 16 KiB. If it has no names, one request returns all Services.
        for start in range(0, len(names) or 1, AT_ONCE):
            asked = names[start : start + AT_ONCE]
            yield from self.client.stream("/services", ProgrammedService, [("name", "/".join(name)) for name in asked])

    def service(self, name: ServiceName) -> dict[str, Any]:
        """See Desk."""
        return self.client.ask("/service", dict[str, Any], name="/".join(name))

    def changes(self, after: int, since: float) -> Past:
        """See Desk."""
        from kubeproxy.report.journal import Past  # noqa: PLC0415 - most commands do not need it

        return self.client.ask("/changes", Past, after=str(after), since=str(since))

    def has_node_ports(self) -> bool:
        """See Desk."""
        return self.client.ask("/node-ports", bool)

    def listeners(self) -> list[NodeListener]:
        """See Desk."""
        return self.client.ask("/listeners", list[NodeListener])

    def objects(self) -> Iterator[Objects]:
        """See Desk."""
        return self.client.stream("/objects", Objects, [])


Source: TypeAlias = "Running | Desk"
"""The source of answers: the running proxy, or the objects that were read for this one question."""


def knowing(asked: Source) -> Facts:
    """Return the proxy's facts. Raises NoAnswerError until the proxy has all lists and its Node."""
    facts = asked.facts()
    if facts.awaits:
        raise NoAnswerError(
            f"the proxy is not ready: it waits for {facts.awaits}, and has written nothing; any rules from before the "
            f"proxy's start remain. Fix: see `kube-proxy doctor`"
        )
    if facts.listed:
        return facts
    finding = next(contact.reached(facts.reach), None) if facts.reach is not None else None
    unlisted = (
        "the proxy never had a list of all Services and EndpointSlices, and cannot answer questions about them; "
        "any rules from before the proxy's start remain"
    )
    if finding is None:
        raise NoAnswerError(f"{unlisted}: it has just started, ask again")
    if asked.running:
        from kubeproxy.ask.checks import node  # noqa: PLC0415 - most answers do not need these modules

        for full in node.conntrack_without_room():
            raise NoAnswerError(f"{full.text}. Therefore {unlisted}: {finding.what}. Fix: {full.fix}")
    raise NoAnswerError(f"{unlisted}: {finding.what}. Fix: {finding.fix}")


def source(arguments: argparse.Namespace) -> Source:
    """Return the source that the arguments select. Raises KubeProxyError."""
    if arguments.manifests or arguments.kubeconfig:
        if getattr(arguments, "watch", False):
            raise ConfigError(
                "--watch: the flag needs a running proxy, because --manifests and --kubeconfig are read only once"
            )
        from kubeproxy.ask.offline import desk  # noqa: PLC0415 - a query of a running proxy does not need these modules

        return desk(arguments)
    for name in FEATURES:
        if getattr(arguments, name.replace("-", "_"), None):
            raise ConfigError(f"--{name}: only with --manifests or --kubeconfig; a running proxy has flags of its own")
    return Running(Client(arguments.control_socket))
