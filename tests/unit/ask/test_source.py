"""The requests of a command: for a few named Services, of limited length, or one request for all."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kubeproxy.ask.checks.doubts import doubted
from kubeproxy.ask.facts import ProgrammedService
from kubeproxy.ask.finding import Diagnosis, Severity
from kubeproxy.ask.source import Running
from kubeproxy.control.client import Client
from kubeproxy.errors import QuestionError
from kubeproxy.server.connection import REQUEST_BYTES

LONG = "n" * 63
EVERY = [(LONG, f"{number:063d}") for number in range(3000)]


class Server:
    """The answer of a proxy that has all objects in EVERY."""

    path = ""

    def __init__(self) -> None:
        self.requests: list[int] = []

    def stream(self, page: str, kind: Any, parameters: list[tuple[str, str]]) -> list[ProgrammedService]:
        self.requests.append(sum(len(f"&{key}={value}") + 2 for key, value in parameters))
        names = [tuple(value.split("/")) for _, value in parameters] or EVERY
        return [ProgrammedService(name=name, state="programmed", version="1", slices={}, plans=()) for name in names]


@pytest.mark.parametrize(("count", "requests"), [(0, 1), (1, 1), (100, 1), (101, 2), (1000, 10), (1001, 1), (3000, 1)])
def test_services_are_requested(count: int, requests: int) -> None:
    server = Server()
    asked = Running(cast("Client", server))
    wanted = EVERY[:count]
    assert [held.name for held in asked.services(wanted)] == (wanted or EVERY)
    assert (len(server.requests), max(server.requests) < REQUEST_BYTES - 1000) == (requests, True)


def test_an_unknown_service_has_the_cause_for_which_it_may_be_unknown() -> None:
    full = Diagnosis(Severity.BROKEN, "conntrack", "connection tracking is 100% full", fix="free some")
    away = Diagnosis(Severity.BROKEN, "api", "the API server cannot be reached at h", fix="see it")
    other = Diagnosis(Severity.NOTE, "proxy", "no kube-proxy runs here")
    error = QuestionError("no Service default/new")
    assert doubted(error, [other]) is error
    assert str(doubted(error, [other, full, away])) == (
        "connection tracking is 100% full, so the proxy may lack new Services: no Service default/new; the API server "
        "cannot be reached at h. Fix: free some"
    )
