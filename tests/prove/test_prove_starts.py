"""Worlds that fail to start report it at once, and leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from lab.cluster import LabCluster
from lab.netns import names
from prove import running
from prove.__main__ import main
from prove.forking import Forking, ForkingError


async def test_a_caller_of_an_ended_forking_process_does_not_wait_forever(tmp_path, capfd) -> None:
    async with Forking("", "no such mutation") as forking:
        for _ in range(2):
            with pytest.raises(ForkingError):
                await asyncio.wait_for(forking.start("os:getpid", [], str(tmp_path / "log")), 60)
    assert "no such mutation" in capfd.readouterr().err


def test_a_mutation_that_is_not_there_starts_nothing(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--mutation", "no such mutation"])
    assert ended.value.code == 2
    assert "no such mutation" in capsys.readouterr().err


class Ended:
    """A world that ended with a status."""

    def __init__(self, status: int) -> None:
        self.returncode = None
        self.told: list[int] = []
        self._status = status

    async def wait(self) -> int:
        return self._status

    def send_signal(self, number: int) -> None:
        self.told.append(number)


@pytest.mark.parametrize("status", [1, -9])
async def test_a_world_that_ends_without_a_history_ends_the_others_and_is_a_finding(status: int) -> None:
    lines, other, said = asyncio.StreamReader(), Ended(0), []
    lines.feed_eof()
    tally = running.Tally()
    assert await running._follow(lines, (one := Ended(status)), [one, other], tally, said.append) == 1
    assert said == [f"FAILED: a world ended with status {status}\n"]
    assert (len(other.told), one.told, tally["failed"]) == (1, [], 1)


async def test_a_cluster_that_is_cancelled_while_it_comes_up_leaves_nothing(monkeypatch) -> None:
    cluster = LabCluster()
    under_way, make = threading.Event(), cluster.topology.up

    def slow() -> None:
        under_way.set()
        asyncio.run(asyncio.sleep(0.2))
        make()

    monkeypatch.setattr(cluster.topology, "up", slow)
    entering = asyncio.create_task(cluster.__aenter__())
    await asyncio.to_thread(under_way.wait)
    entering.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await entering
    await asyncio.sleep(0.5)
    found = names(cluster.topology.prefix)
    cluster.topology.down()
    assert found == []
