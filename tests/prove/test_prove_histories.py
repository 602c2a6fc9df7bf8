"""Histories of `make prove`: a seed always makes the same history, steps are independent, failures are reduced."""

from __future__ import annotations

import asyncio
import errno
import json
from collections import Counter
from itertools import pairwise

import pytest
import test_prove_found

from kubeproxy.kernel.netlink import protocol
from kubeproxy.kernel.nftables import nfnetlink
from prove import crashes, launcher, play, running
from prove.__main__ import MUTATED
from prove.dumps import differences
from prove.generate import Generator
from prove.objects import BORDERS, RANGES
from prove.shrink import smaller
from prove.steps import as_test
from prove.world import World

SEEDS = [str(number) for number in range(30)]


class Sound(Generator):
    """Return the steps without objects that no API server should have."""

    def __init__(self, seed: str, mode: str) -> None:
        super().__init__(seed, mode)
        self.ranges = RANGES

    def _spoil(self) -> None:
        pass

    def _junk(self) -> None:
        pass


def history(seed: str, length: int = 80) -> list:
    return Generator(seed, "nftables").history(length)


@pytest.mark.parametrize("seed", SEEDS[:5])
def test_a_seed_makes_the_same_history(seed: str) -> None:
    assert history(seed) == history(seed)
    assert history(seed) != history(seed + "x")


@pytest.mark.parametrize("seed", SEEDS)
def test_steps_are_data_with_known_names(seed: str) -> None:
    for step in history(seed):
        assert callable(getattr(World, f"_{step[0]}", None)) or step[0] in {
            "quiet",
            "settled",
            "look",
            *play.CLIENTS,
        }, step
        if step[0] == "put":
            json.dumps(step)


def test_the_first_histories_of_worlds_begin_with_all_aimed_sequences() -> None:
    def words(seed: str) -> set[str]:
        return {step[0] for step in history(seed, 1)}

    firsts = [words(f"3 a mutation.{world}.0") for world in range(MUTATED)]
    for aimed in ({"ask"}, {"late"}, {"node_address"}, {"health", "closed"}, {"settled", "away"}):
        assert [first for first in firsts if aimed <= first], aimed
    assert ["late" in words(f"3.0.{number}") for number in range(4)] == [False, False, True, False]


@pytest.mark.parametrize("seed", SEEDS)
def test_existing_services_never_share_allocated_addresses(seed: str) -> None:
    services: dict[tuple[str, str], dict] = {}
    steps = Sound(seed, "nftables").history(80)
    for at, step in enumerate(steps):
        if step[:2] == ("put", "services") and not step[2]["metadata"]["name"].startswith("junk"):
            services[step[2]["metadata"]["namespace"], step[2]["metadata"]["name"]] = step[2]
        elif step[:2] == ("remove", "services"):
            services.pop(tuple(step[2:]), None)
        if step[0] != "quiet":
            continue
        given = [address for service in services.values() for address in service["spec"]["clusterIPs"]]
        assert len(given) == len(set(given)), (at, given)
        ports = [p["nodePort"] for s in services.values() for p in s["spec"]["ports"] if "nodePort" in p]
        assert len(ports) == len(set(ports)), (at, ports)


def test_histories_contain_all_important_steps() -> None:
    steps = [step for seed in SEEDS for step in history(seed)]
    assert {"put", "remove", "api", "kill", "restore", "harm", "pause", "away", "compact"} <= {
        step[0] for step in steps
    }
    pieces = [step[2] for step in steps if step[:2] == ("put", "endpointslices")]
    sizes = {len(piece["endpoints"]) for piece in pieces if isinstance(piece.get("endpoints"), list)}
    assert len(sizes.intersection(BORDERS)) > 10
    services = [step[2]["spec"] for step in steps if step[:2] == ("put", "services")]
    types = {spec["type"] for spec in services if isinstance(spec, dict) and "type" in spec and spec["type"]}
    assert {"ClusterIP", "NodePort", "LoadBalancer"} <= types


def test_swaps_are_of_living_services() -> None:
    swapped = 0
    for seed in SEEDS:
        puts = [step[2] for step in Sound(seed, "nftables").history(80) if step[:2] == ("put", "services")]
        specs = [
            (p["metadata"]["name"], tuple(p["spec"]["clusterIPs"])) for p in puts if p["metadata"]["name"][0] == "s"
        ]
        owner: dict[tuple[str, ...], str] = {}
        for (name, addresses), _ in pairwise(specs):
            swapped += owner.get(addresses, name) != name
            owner[addresses] = name
    assert swapped


def shrunk(items: list[int], fails) -> list[int]:
    async def ask(part) -> bool:
        return fails(part)

    return asyncio.run(smaller(items, ask))


@pytest.mark.parametrize("needed", [{3}, {0, 99}, {10, 11, 12}, set(range(0, 100, 9))])
def test_the_smallest_history_that_fails_is_found(needed: set[int]) -> None:
    assert shrunk(list(range(100)), lambda part: needed <= set(part)) == sorted(needed)


def test_a_history_that_always_fails_becomes_empty() -> None:
    assert shrunk(list(range(10)), lambda part: True) == []


def test_a_failure_is_printed_as_a_test_that_runs_where_it_is_pasted(monkeypatch) -> None:
    steps = [("put", "services", {"metadata": {"name": "a"}}), ("quiet",)]
    text = as_test(steps, "iptables-nft", "first line\nsecond")
    assert "# first line\n" in text
    asked = []

    async def played(*given, **named) -> list[str]:
        asked.append((*given, named))
        return []

    names = dict(vars(test_prove_found)) | {"played": played}
    exec(compile(text, "pasted", "exec"), names)
    asyncio.run(names["test_a_history_that_failed"]())
    assert asked == [(steps, {"mode": "iptables-nft"})]
    assert test_prove_found.played is play.played


def test_differences_name_set_and_elements() -> None:
    assert differences({"a": {"1"}}, {"a": {"1"}}) == []
    assert differences({"a": set()}, {}) == []
    assert differences({"a": {"1", "2"}}, {"a": {"1", "3"}}) == ["a: too much ['2'], lacks ['3']"]
    assert differences({"a": {"k": 1}}, {"a": {"k": 2}}) == ["a, k: 1 instead of 2"]


COUNTS = {way: {"die-before": 5, "die-after": 5, "die-turn": 11} for way in crashes.WAYS}


@pytest.mark.parametrize("worlds", [1, 2, 3, 7])
def test_worlds_share_all_points_of_a_crash(worlds: int) -> None:
    parts = [crashes.Part("nftables", "deaths", 0, "1", number, worlds) for number in range(worlds)]
    found = [point for part in parts for point in crashes.points(COUNTS, part)]
    assert len(found) == len(set(found)) == 3 * (5 + 5 + 11)


@pytest.mark.parametrize(("share", "worlds"), [(4, 4), (7, 3), (1, 1)])
def test_a_share_of_the_points_has_the_requested_size(share: int, worlds: int) -> None:
    parts = [crashes.Part("nftables", "deaths", share, "1", number, worlds) for number in range(worlds)]
    assert sum(len(crashes.points(COUNTS, part)) for part in parts) == share


def test_every_mode_has_a_world_and_one_history_is_its_own_seed() -> None:
    whole = running.Share("", "7", 10, 60.0)
    assert [part.mode for part in running.shares(["a", "b", "c"], whole, 2)] == ["a", "b", "c"]
    assert [part.seed for part in running.shares(["a"], whole, 3)] == ["7.0", "7.1", "7.2"]
    (alone,) = running.shares(["a"], whole._replace(seed="7.1.4", histories=1), 4)
    assert (alone.mode, alone.seed, alone.histories) == ("a", "7.1.4", 1)


def test_the_played_histories_are_reported_with_their_cost() -> None:
    line = running.told("nftables", Counter(histories=50, steps=900, judged=150, cpu_ms=30000), 18.0)
    assert line == (
        "nftables: 50 histories, 900 steps, 150 moments judged, nothing found; 10000 an hour, 0.60 s of CPU each"
    )


def batch(*sequences: int) -> bytes:
    """Return a transaction of this number of messages in nf_tables' form: only the last one has a number."""
    edge, last = nfnetlink.GENERIC.pack(0, 0, 0), len(sequences) - 1
    inner = [
        protocol.message(nfnetlink.NEW_ELEMENT, protocol.NLM_F_ACK if n == last else 0, number, edge)
        for n, number in enumerate(sequences)
    ]
    return b"".join([protocol.message(16, 1, 7, edge), *inner, protocol.message(17, 1, 7, edge)])


@pytest.mark.parametrize(("sent", "codes"), [((0, 0, 8), [(0, 105), (8, 0)]), ((8,), [(8, 105)])])
def test_a_refusal_is_answered_as_the_kernel_does(sent: tuple[int, ...], codes: list[tuple[int, int]]) -> None:
    data = launcher.refusal(batch(*sent), errno.ENOBUFS)
    found = [(at.sequence, protocol.acknowledgement(data, at)[0]) for at in protocol.messages(data)]
    assert found == codes
    link = nfnetlink.Transactions(0, launcher.Answering(None, data))  # type: ignore[arg-type]
    with pytest.raises(protocol.NetlinkError):
        link._settle(7, 8)


def test_a_read_is_no_change() -> None:
    dump = protocol.message(nfnetlink.GET_ELEMENT, protocol.NLM_F_ACK | protocol.NLM_F_DUMP, 1, b"")
    assert not launcher.asks_for_change(dump)
    assert launcher.asks_for_change(batch(0, 8))
