"""The messages to systemd, over real datagram sockets."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from contextlib import suppress

import pytest

from kubeproxy.report import health
from kubeproxy.report.health import Notifier


@pytest.fixture(params=["path", "abstract"])
def notified(request, tmp_path):
    name = str(tmp_path / "s") if request.param == "path" else f"@kubeproxy-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(name.replace("@", "\0", 1))
        sock.setblocking(False)
        yield name, sock


def heard(sock):
    found = []
    with suppress(BlockingIOError):
        while True:
            found.append(sock.recv(4096).decode())
    return found


def test_ready_status_life_and_end(notified, monkeypatch):
    monkeypatch.setattr(health, "STATUS_SECONDS", 0.01)
    name, sock = notified
    environment = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(os.getpid()), "PATH": "/bin"}
    notifier = Notifier.of_environment(environment)
    assert environment == {"PATH": "/bin"}
    turns = iter([(True, "one\ntwo"), (True, "one two"), (False, "one two"), (False, "three")])
    healthy, status = [], []

    async def play():
        def next_turn():
            turn = next(turns, None)
            if turn is None:
                raise asyncio.CancelledError
            healthy.append(turn[0])
            status.append(turn[1])
            return turn[0]

        notifier.ready()
        with suppress(asyncio.CancelledError):
            await notifier.run(next_turn, lambda: status[-1])
        notifier.stopping()

    asyncio.run(play())
    assert heard(sock) == [
        "READY=1",
        "WATCHDOG=1\nSTATUS=one two",
        "WATCHDOG=1",
        "STATUS=three",
        "STOPPING=1\nSTATUS=Stopping; the rules stay in the kernel",
    ]


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({"WATCHDOG_USEC": "500000"}, 0.5),
        ({"WATCHDOG_USEC": "500000", "WATCHDOG_PID": "1"}, 0.0),
        ({"WATCHDOG_USEC": "soon"}, 0.0),
        ({}, 0.0),
    ],
)
def test_the_process_of_the_watchdog(environment, seconds):
    assert Notifier.of_environment(environment)._watchdog == seconds


def test_without_systemd_nothing_happens():
    notifier = Notifier.of_environment({"WATCHDOG_USEC": "1"})
    notifier.ready()
    asyncio.run(asyncio.wait_for(notifier.run(lambda: True, lambda: "x"), 15))
    notifier.stopping()


def test_a_missing_socket_is_reported_once(tmp_path, caplog):
    notifier = Notifier(str(tmp_path / "none"))
    notifier.ready()
    notifier.stopping()
    assert [record.getMessage() for record in caplog.records] == [
        "Cannot notify systemd error='[Errno 2] No such file or directory'"
    ]
