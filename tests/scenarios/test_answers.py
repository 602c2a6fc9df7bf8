"""JSON answers of a running proxy conform to docs/answers.schema.json."""

from __future__ import annotations

import json

import pytest

from support.answers import valid
from support.live import METRICS_PORT, Live
from support.modes import MODES, modes


@pytest.mark.slow("each command")
@modes(*MODES)
async def test_answers_match_the_schema(live: Live) -> None:
    live.service("said", "a1 b1/unready", type="NodePort")
    front = live.front("said")
    await live.expect(front, {"pod": live.mode.seen("a1")})
    target = f"{front.address}:{front.port}"
    for name, words in (
        ("why", ("why", "node", target, "--trace")),
        ("why", ("why", "node", f"{front.address}:1")),
        ("trace", ("trace", "node", target)),
        ("flows", ("flows",)),
        ("flows", ("flows", "said")),
        ("conntrack", ("conntrack",)),
        ("changes", ("changes",)),
        ("services", ("services",)),
        ("service", ("services", "said")),
        ("service", ("services", "none")),
        ("verify", ("verify", "--api")),
        ("doctor", ("doctor",)),
        ("plan", ("plan", "--cluster-cidr", "10.99.0.0/16")),
    ):
        _, text = await live.ask(*words, "-o", "json")
        valid(name, text)
    for line in (await live.ask("flows", "-f", "--seconds", "1", "-o", "json"))[1].splitlines():
        valid("followed", line)
    for line in (await live.ask("changes", "-f", "--seconds", "1", "-o", "json"))[1].splitlines():
        valid("Happened", line)
    _, page = await live.page("/debug/state", METRICS_PORT)
    assert valid("state", page) == json.loads(page)
