"""Checks whether the objects behind an answer may be outdated, and finds the cause."""

from __future__ import annotations

from collections.abc import Sequence

from kubeproxy.ask.checks import contact
from kubeproxy.ask.facts import Facts
from kubeproxy.ask.finding import Diagnosis
from kubeproxy.ask.source import Source
from kubeproxy.errors import QuestionError


def outdated(asked: Source, facts: Facts) -> list[Diagnosis]:
    """Return the findings that the objects may be outdated. If all watches are silent, a request to the server tests
    the watches. A full connection table comes first, because it may be the cause of the other findings."""
    if facts.reach is None or not asked.running or facts.reach.silent <= contact.SILENT:
        return list(contact.outdated(facts.reach)) if facts.reach is not None else []
    from kubeproxy.ask.checks import checkup, greeting, node  # noqa: PLC0415 - most answers do not need these modules

    found = list(greeting.outdated(checkup.checked(asked, facts), facts.reach))
    return [*node.conntrack_without_room(), *found] if found else []


def doubted(error: QuestionError, found: Sequence[Diagnosis]) -> QuestionError:
    """Return the error of a question about an unknown Service, with the reason why the proxy may lack the Service."""
    causes = [one for one in found if one.about in {"api", "conntrack"}]
    if not causes:
        return error
    first, *others = [one.what for one in causes]
    text = "; ".join((f"{first}, so the proxy may lack new Services: {error}", *others))
    return QuestionError(f"{text}. Fix: {causes[0].fix}")
