"""`kube-proxy plan --from-kernel --shadow` reports a lasting difference, and not a change of a Service."""

from __future__ import annotations

import asyncio
import fcntl
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from lab.cluster import NotInTimeError
from lab.proxyprocess import configuration
from support import forking
from support.answers import valid
from support.live import TIMEOUT, Live
from support.modes import modes

WORDS = ("plan", "--from-kernel", "--grace", "3s", "--shadow")
REMOVED = {
    "nftables": ("nft", "flush", "chain", "ip", "kube-proxy", "nat-prerouting"),
    "iptables-nft": ("iptables-nft", "-t", "nat", "-F", "KUBE-SERVICES"),
}


class Running(NamedTuple):
    """A running shadow, and the file that it writes."""

    process: forking.Forked
    file: Path

    async def says(self, live: Live, text: str) -> None:
        try:
            await live.cluster.until(lambda: text in self.file.read_text(), text, 4 * TIMEOUT)
        except NotInTimeError as error:
            raise AssertionError(f"{error}\nthe shadow said:\n{self.file.read_text()}") from error

    async def ends(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self.process.wait(), TIMEOUT), self.file.read_text()


@asynccontextmanager
async def shadow(live: Live, folder: Path, *words: str) -> AsyncIterator[Running]:
    path = folder / "said"
    with path.open("wb") as file:
        command = [*WORDS, "1h", *words]
        process = await forking.fork(live.cluster.namespace_of("node"), command, file.fileno(), file.fileno())
    try:
        yield Running(process, path)
    finally:
        process.send_signal(signal.SIGKILL)


@modes("nftables", "iptables-nft")
async def test_a_shadow_compares_the_running_rules(bare: Live, tmp_path: Path) -> None:
    bare.service("web", "a1 b1")
    await bare.start()
    await bare.programmed(bare.front("web"), "a1 b1")

    ended = asyncio.create_task(bare.ask(*WORDS, "8s", "-o", "json"))
    for endpoints in ("a1", "a1 a2", "b1"):
        await asyncio.sleep(1.0)
        bare.endpoints("web", endpoints)
        await bare.programmed(bare.front("web"), endpoints)
    status, text = await ended
    made = valid("shadow", text)
    assert (status, made["lasted"], made["unknown"], made["notCompared"]) == (0, [], [], 0), text
    assert made["comparisons"] >= 1
    assert set(made["classes"]) == {"IPv4", "IPv6"}

    async with shadow(bare, tmp_path, "--control-socket", str(bare.proxy.control)) as running:
        await running.says(bare, "Compared")
        await bare.proxy.stop()
        await bare.run(*REMOVED[bare.mode.name])
        bare.endpoints("web", "b1")
        await running.says(bare, "; here: ")
        status, text = await running.ends()
    assert status == 1, text
    assert re.search("x  IPv4: .*100.0% (passed|refused); here: 100.0% translated to ", text), text
    assert "still different" in text
    assert "on purpose" not in text
    assert "x  IPv6" not in text


@pytest.mark.slow("an outage of the API server")
@modes("nftables")
async def test_declared_differences_and_an_api_server_that_is_away_are_not_wrong(bare: Live, tmp_path: Path) -> None:
    bare.service("weighted", "a1 b1")
    bare.cluster.patch("services", "weighted", {"metadata": {"annotations": {"kube-proxy-py/weights": "node-b=50"}}})
    await bare.start(args=["--strict"])
    await bare.programmed(bare.front("weighted"), "a1 b1")
    file = tmp_path / "config.yaml"
    kubeconfig = bare.cluster.node_kubeconfig
    file.write_text(yaml.safe_dump(configuration(kubeconfig, {"mode": "nftables"})))

    async with shadow(bare, tmp_path, "--kubeconfig", str(kubeconfig), "--config", str(file)) as running:
        await running.says(bare, "(on purpose: the outcome is the same with --strict)")
        await bare.cluster.server.refuse()
        await running.says(bare, "s old: cannot reach the API server at ")
        await bare.cluster.server.listen()
        status, text = await running.ends()
    assert status == 0, text
    assert re.search(r"-  IPv4: .*: 50.0% .*; here: .*66.7% ", text), text
    assert "the comparison was impossible 1 time" in text


@pytest.mark.slow("a third mode")
@modes("iptables-legacy")
async def test_a_comparison_does_not_need_the_iptables_lock(
    bare: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bare.start()
    path = tmp_path / "lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        monkeypatch.setenv("XTABLES_LOCKFILE", str(path))
        status, text = await bare.ask("plan", "--from-kernel")
    assert (status, text.count("proved for all packets")) == (0, 2), text
