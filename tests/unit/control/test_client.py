"""A command beside a proxy of another version says so, and blames nobody else."""

from __future__ import annotations

import argparse

import msgspec
import pytest

from kubeproxy.ask.facts import Facts, ProgrammedService
from kubeproxy.commands import verify
from kubeproxy.control import client
from kubeproxy.control.listener import framed
from kubeproxy.errors import KubeProxyError


class Answer:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, size: int = -1) -> bytes:
        size = len(self._data) if size < 0 else size
        now, self._data = self._data[:size], self._data[size:]
        return now


@pytest.mark.parametrize("streamed", ["streamed", "whole"])
def test_an_answer_without_what_this_version_needs(monkeypatch: pytest.MonkeyPatch, streamed: str) -> None:
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
    with pytest.raises(KubeProxyError, match=r"the proxy runs version 0\.0\.9, this command is 0\.1\.0.*nothing was"):
        verify.run(argparse.Namespace(name="web", api=False, output="text"))
