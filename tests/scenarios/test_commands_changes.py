"""`kube-proxy changes`: changes and problems before the question; doctor and the page show them too."""

from __future__ import annotations

import asyncio
import json
import re
from functools import partial

from support.answers import valid
from support.live import METRICS_PORT, Live
from support.modes import MODES, modes

CLOCK = r"\d\d:\d\d:\d\d"
AWAY = "the API server cannot be reached at "


async def stored(live: Live, *words: str) -> list[tuple[str, str, str]]:
    """Return the kind, the Service and the text of each entry."""
    _, text = await live.ask("changes", *words, "-o", "json")
    return [(one["kind"], one["service"], one["what"]) for one in valid("changes", text)["changes"]]


@modes(*MODES)
async def test_changes_are_stored_with_their_delay(live: Live) -> None:
    live.service("kept", "a1")
    live.service("other", "a1")
    await live.expect(live.front("kept"), {"pod": live.mode.seen("a1")})
    live.endpoints("kept", "a1 b1")
    added = ("change", "default/kept", "endpoints +1, 2 now")

    async def has_change() -> str:
        found = await stored(live, "kept", "--since", "5m")
        return "" if added in found and {name for _, name, _ in found} <= {"default/kept", ""} else str(found)

    await live.eventually(has_change)
    status, text = await live.ask("changes")
    assert status == 0
    assert re.search(rf"{CLOCK}\.\d{{3}}    default/kept: endpoints \+1, 2 now \(\d+\.\d ms\)\n", text), text
    assert re.match(rf"  -  nothing is stored from the time before {CLOCK} UTC\n", text), text
    assert "default/other: " in text

    async def has_figures() -> str:
        _, page = await live.page("/ui/api/journal", METRICS_PORT)
        answer = json.loads(page)
        assert added[2] in {one["what"] for one in answer["changes"]}
        keys = {key for one in answer["seconds"] for key in one}
        return "" if keys == {"t", "changes", "p50", "p99", "max", "conntrack"} else page

    await live.eventually(has_figures)


@modes(*MODES)
async def test_changes_are_followed(live: Live) -> None:
    status, text = await live.ask("changes", "nosuch", "--since", "1h")
    assert (status, "no Service default/nosuch that is watched: there is none" in text) == (2, True), text
    status, text = await live.ask("changes", "nosuch", "-f", "--seconds", "0.1")
    assert (status, "  -  no Service default/nosuch" in text) == (0, True), text
    live.service("followed", "a1")
    await live.expect(live.front("followed"), {"pod": live.mode.seen("a1")})

    async def follows() -> str:
        live.endpoints("followed", "a1")
        following = asyncio.ensure_future(live.ask("changes", "followed", "-f", "--since", "1s", "--seconds", "3"))
        await asyncio.sleep(1.5)
        live.endpoints("followed", "a1 a2 a3")
        status, text = await following
        lines = [line for line in text.splitlines() if "default/followed: endpoints +2, 3 now (" in line]
        return "" if (status, len(lines)) == (0, 1) else text

    async def has_ended() -> str:
        status, text = await live.ask("services", "followed")
        return "" if status == 2 else text

    await live.eventually(follows)
    live.delete("followed")
    await live.eventually(has_ended)
    assert (await live.ask("changes", "followed"))[0] == 0


@modes("nftables")
async def test_a_problem_has_its_beginning_in_doctor_and_its_end_in_changes(bare: Live) -> None:
    await bare.start()
    await bare.nft("flush", "map", "ip", "kube-proxy", "endpoints")
    other = "another program changed rules of IPv4: "

    async def repaired() -> str:
        texts = [(kind, text) for kind, _, text in await stored(bare)]
        ends = [text for kind, text in texts if kind == "end" and text.startswith("after ") and f" s: {other}" in text]
        begins = [text for kind, text in texts if kind == "problem" and text.startswith(other)]
        return "" if begins and ends else str(texts)

    await bare.eventually(repaired)
    refused = "the lists or watches of endpointslices fail: "

    async def has(kind: str, begin: str) -> str:
        found = await stored(bare)
        return "" if any(one == kind and re.match(begin + refused, text) for one, _, text in found) else str(found)

    bare.cluster.faults.update({"fail": 10**6, "fail_code": 403, "resources": ["endpointslices"]})
    bare.cluster.server.end_watches()
    await bare.eventually(partial(has, "problem", ""))
    bare.cluster.faults.update({"fail": 0, "resources": []})
    await bare.eventually(partial(has, "end", r"after [\d.]+ s: "))
    await bare.cluster.server.refuse()

    async def known() -> str:
        _, text = await bare.ask("doctor")
        _, answer = await bare.ask("doctor", "-o", "json")
        since = [one["since"] for one in valid("doctor", answer)["findings"] if "since" in one]
        line = re.search(rf"  x  {AWAY}.*, since ({CLOCK}) UTC\n", text)
        return "" if line and [line[1]] == [one[11:19] for one in since] else text

    await bare.eventually(known)
    assert ("problem", True) in {(kind, what.startswith(AWAY)) for kind, _, what in await stored(bare)}
