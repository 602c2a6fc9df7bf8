"""The source of a command's answers: the proxy that runs, or a Desk of objects that are read for this one question."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, TypeAlias

from kubeproxy.ask.checks import contact
from kubeproxy.ask.facts import Facts
from kubeproxy.ask.finding import Diagnosis
from kubeproxy.ask.remote import Running
from kubeproxy.control.client import Client
from kubeproxy.errors import NoAnswerError

if TYPE_CHECKING:
    from kubeproxy.ask.desk import Desk


class UnreadError(NoAnswerError):
    """The objects cannot be read; `finding` says why, and what mends it."""

    def __init__(self, finding: Diagnosis) -> None:
        super().__init__(f"{finding.what}. Fix: {finding.fix}")
        self.finding = finding


Source: TypeAlias = "Running | Desk"
"""The source of answers: the proxy that runs here, or the objects that were read for this one question."""


def knowing(asked: Source) -> Facts:
    """Return the proxy's facts. Raises NoAnswerError until it has a list of all Services and EndpointSlices."""
    facts = asked.facts()
    if facts.listed:
        return facts
    finding = next(contact.reached(facts.reach), None) if facts.reach is not None else None
    raise NoAnswerError(
        "the proxy never had a list of all Services and EndpointSlices, so it can say nothing of them; rules that were "
        "there when it started stay as they are"
        + (f": {finding.what}. Fix: {finding.fix}" if finding is not None else ": it has just started, ask again")
    )


def source(arguments: argparse.Namespace) -> Source:
    """Return the source that the arguments name. Raises KubeProxyError."""
    if arguments.manifests or arguments.kubeconfig:
        from kubeproxy.ask.offline import desk  # noqa: PLC0415 - it loads modules that a question to a proxy does without

        return desk(arguments)
    return Running(Client(arguments.control_socket))
