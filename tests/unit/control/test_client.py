"""A command that reaches a proxy of another version reports the versions, and no other cause."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import msgspec
import pytest

from kubeproxy.ask.facts import Facts, ProgrammedService
from kubeproxy.commands import verify
from kubeproxy.control import client
from kubeproxy.control.listener import connect, framed, listen
from kubeproxy.errors import KubeProxyError
from kubeproxy.kernel.proc import processes
from kubeproxy.release import SAME_BUILD
from kubeproxy.server.http import Request, routes


class Answer:
    status = 200

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, size: int = -1) -> bytes:
        size = len(self._data) if size < 0 else size
        now, self._data = self._data[:size], self._data[size:]
        return now


class Refusal(Answer):
    status = 404


def test_a_page_that_an_older_proxy_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server determines the text of a missing page; the message contains both versions and the fix."""
    missing = routes({})(Request("GET", "/changes", "")).body
    answers = [Refusal(bytes(missing)), Answer(msgspec.msgpack.encode({"version": "0.0.9", "pid": 1}))]
    monkeypatch.setattr(client._Connection, "request", lambda *_, **__: None)
    monkeypatch.setattr(client._Connection, "getresponse", lambda _: answers.pop(0))
    with pytest.raises(client.NoAnswerError) as raised:
        client.Client("/run/control.sock").ask("/changes", dict)
    text = str(raised.value)
    assert text.startswith("the proxy has no page /changes: the proxy runs version 0.0.9, this command is 0.1.0")
    assert text.endswith(SAME_BUILD)


@pytest.mark.parametrize("streamed", ["streamed", "whole"])
def test_an_answer_without_required_fields_of_this_version(monkeypatch: pytest.MonkeyPatch, streamed: str) -> None:
    body = framed([msgspec.msgpack.encode({"name": ["default", "web"]})])
    asked = client.Client("/run/control.sock")
    monkeypatch.setattr(asked, "_request", lambda *_: Answer(body if streamed == "streamed" else body[4:]))
    with pytest.raises(client.NoAnswerError, match="restart the proxy, or run the command in the proxy's container"):
        list(asked.stream("/services", ProgrammedService, [])) if streamed == "streamed" else asked.ask("/facts", Facts)


def test_verify_compares_nothing_beside_a_proxy_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    class Older:
        running = True

        def facts(self) -> object:
            return argparse.Namespace(version="0.0.9", manifests="")

    monkeypatch.setattr(verify, "source", lambda _: Older())
    with pytest.raises(KubeProxyError, match=r"nothing was.*the proxy runs version 0\.0\.9, this command is 0\.1\.0"):
        verify.run(argparse.Namespace(name="web", api=False, output="text"))


def test_a_stopped_proxy_with_a_full_backlog_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The socket does not name the process that listens there."""
    path, halted = str(tmp_path / "control" / "x.sock"), processes.ProxyProcess(77, (), ours=True)
    monkeypatch.setattr(processes, "proxies", lambda: [halted])
    monkeypatch.setattr(processes, "is_halted", lambda pid: pid == halted.pid)
    monkeypatch.setattr(client, "FIRST_TIMEOUT", 0.1)
    with listen(path) as sock:
        sock.listen(0)
        with connect(path, 0.0), pytest.raises(client.NoAnswerError, match="has stopped the proxy: `kill -CONT 77`"):
            client.Client(path).ask("/facts", Facts)


@pytest.mark.parametrize(("halted", "seconds"), [(True, "0.1"), (False, "0.2")])
def test_a_command_waits_only_briefly_for_a_proxy_that_hangs(
    halted: bool, seconds: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A stopped process cannot answer; a busy proxy gets a little more time before its first answer."""
    path = str(tmp_path / "control" / "x.sock")
    monkeypatch.setattr(processes, "is_halted", lambda pid: halted and pid == os.getpid())
    monkeypatch.setattr(client, "HALTED_TIMEOUT", 0.1)
    monkeypatch.setattr(client, "FIRST_TIMEOUT", 0.2)
    with listen(path), pytest.raises(client.NoAnswerError, match=f"did not answer within {seconds} s: "):
        client.Client(path).ask("/facts", Facts)
