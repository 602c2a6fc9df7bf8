"""Building, aggregating, limiting and sending Events, with a fake server and a fake clock."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from kubeproxy.errors import SourceError
from kubeproxy.report import events
from kubeproxy.report.events import EventRecorder, ObjectReference

NODE = ObjectReference("Node", "node-a", uid="node-a")
SERVICE = ObjectReference("Service", "web", "shop", "0d0e")
EPOCH = 1795238047.5


class Server:
    """A server that answers requests from a script of statuses and errors, then with 201 and 200."""

    def __init__(self, *script: int | Exception) -> None:
        self.script = list(script)
        self.now = 0.0
        self.got: list[tuple[str, str, Any]] = []
        self.recorder = EventRecorder("node-a", self.post, lambda: self.now, lambda: EPOCH + self.now)

    async def post(self, method: str, path: str, body: bytes) -> int:
        self.got.append((method, path, json.loads(body)))
        answer = self.script.pop(0) if self.script else {"POST": 201, "PATCH": 200}[method]
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def methods(self) -> list[str]:
        return [method for method, _, _ in self.got]


def play(server: Server, *scenes: Callable[[], None]) -> None:
    """Run the recorder; after each part of the test, wait until all Events are sent."""

    async def main() -> None:
        task = asyncio.create_task(server.recorder.run(retry=0.001))
        for scene in scenes:
            scene()
            seen = -1
            while len(server.recorder._queue) or len(server.got) != seen:
                seen = len(server.got)
                await asyncio.sleep(0.03)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


def warn(server: Server, note: str = "port 80 is taken", about: ObjectReference = SERVICE) -> Callable[[], None]:
    return lambda: server.recorder.record(about, "Warning", "PortTaken", "Bind", note)


def test_an_event_has_the_fields_that_the_api_server_wants() -> None:
    server = Server()
    play(server, lambda: server.recorder.record(NODE, "Normal", "Starting", "StartKubeProxy", ""), warn(server))
    (method, path, node_event), (_, service_path, service_event) = server.got
    assert (method, path) == ("POST", "/apis/events.k8s.io/v1/namespaces/default/events")
    name = node_event["metadata"].pop("name")
    assert name.startswith("node-a.")
    assert node_event == {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"namespace": "default"},
        "eventTime": "2026-11-21T05:14:07.500000Z",
        "reportingController": "kube-proxy",
        "reportingInstance": "kube-proxy-node-a",
        "action": "StartKubeProxy",
        "reason": "Starting",
        "regarding": {"apiVersion": "v1", "kind": "Node", "name": "node-a", "uid": "node-a"},
        "note": "",
        "type": "Normal",
    }
    assert service_path == "/apis/events.k8s.io/v1/namespaces/shop/events"
    assert service_event["regarding"] == {
        "apiVersion": "v1", "kind": "Service", "namespace": "shop", "name": "web", "uid": "0d0e",
    }  # fmt: skip


def test_names_never_repeat() -> None:
    server = Server()
    play(server, *[warn(server, f"port {n}") for n in range(5)])
    assert len({body["metadata"]["name"] for _, _, body in server.got}) == 5


@pytest.mark.parametrize(
    ("note", "kept"),
    [("x" * 1024, "x" * 1024), ("x" * 1025, "x" * 1021 + "..."), ("é" * 600, "é" * 510 + "..."), ("\ud800", "?")],
)
def test_notes_are_cut_to_a_kilobyte(note: str, kept: str) -> None:
    server = Server()
    play(server, warn(server, note))
    assert server.got[0][2]["note"] == kept


def test_repetitions_become_a_series_that_is_written_at_once_and_then_each_minute() -> None:
    server = Server()

    def at(now: float, action: Callable[[], None]) -> Callable[[], None]:
        def scene() -> None:
            server.now = now
            action()

        return scene

    play(
        server,
        warn(server),
        at(10, warn(server)),
        at(20, warn(server)),
        at(69, server.recorder.flush),
        at(70, server.recorder.flush),
        at(200, server.recorder.flush),
        at(700, warn(server)),
    )
    assert server.methods == ["POST", "PATCH", "PATCH", "POST"]
    path = f"{server.got[0][1]}/{server.got[0][2]['metadata']['name']}"
    assert server.got[1] == ("PATCH", path, {"series": {"count": 2, "lastObservedTime": "2026-11-21T05:14:17.500000Z"}})
    assert server.got[2][1:] == (path, {"series": {"count": 3, "lastObservedTime": "2026-11-21T05:15:17.500000Z"}})


def test_a_series_that_the_server_deleted_starts_again() -> None:
    server = Server(201, 404)
    play(server, warn(server), warn(server), warn(server))
    assert server.methods == ["POST", "PATCH", "POST"]


def test_an_object_has_25_events_at_once_and_then_one_in_five_minutes() -> None:
    server = Server()

    def storm() -> None:
        for n in range(40):
            warn(server, f"note {server.now} {n}")()

    def later() -> None:
        server.now += 601
        storm()

    play(server, storm, warn(server, about=NODE), later)
    assert [path.split("/")[-2] for _, path, _ in server.got] == ["shop"] * 25 + ["default"] + ["shop"] * 2


def test_a_server_that_is_away_gets_the_event_later_and_one_complaint_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server(SourceError("no route"), ConnectionResetError("gone"), 500, 429, 201)
    with caplog.at_level(logging.WARNING, "kubeproxy.report"):
        play(server, warn(server))
    assert server.methods == ["POST"] * 5
    assert [m for m in caplog.messages if "Events may get lost" in m] == ["Events may get lost: no route"]


@pytest.mark.parametrize("answer", [403, 422, RuntimeError("bug")])
def test_a_refused_event_is_not_sent_again(answer: int | Exception, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(answer, 201)
    with caplog.at_level(logging.WARNING, "kubeproxy.report"):
        play(server, warn(server), warn(server, "another"))
    assert server.methods == ["POST", "POST"]
    assert caplog.text.count("Events may get lost") == 1


def test_a_server_that_stays_away_costs_a_bounded_number_of_attempts_and_of_memory() -> None:
    server = Server(*[SourceError("away")] * 12)
    play(server, warn(server))
    assert server.methods == ["POST"] * 12

    full = Server()
    for n in range(events.QUEUED + 50):
        warn(full, about=ObjectReference("Service", f"s{n}", "shop"))()
    assert len(full.recorder._queue) == events.QUEUED
    for n in range(events.REMEMBERED + 50):
        warn(full, about=ObjectReference("Service", f"t{n}", "shop"))()
    assert len(full.recorder._series) == len(full.recorder._buckets) == events.REMEMBERED


def test_without_a_server_events_are_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    recorder = EventRecorder("node-a", None)
    with caplog.at_level(logging.INFO, "kubeproxy.report"):
        recorder.record(SERVICE, "Warning", "PortTaken", "Bind", "port 80 is taken")
        recorder.record(NODE, "Normal", "Starting", "StartKubeProxy", "")
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "Event object=shop/web kind=Service reason=PortTaken note='port 80 is taken'"),
        ("INFO", "Event object=node-a kind=Node reason=Starting note=''"),
    ]
    assert len(recorder._queue) == 0


def test_recording_needs_no_running_loop_and_sending_waits_for_one() -> None:
    server = Server()
    warn(server)()
    assert len(server.recorder._queue) == 1
    play(server, lambda: None)
    assert server.methods == ["POST"]
