"""--startup-taint against an API server with the RBAC rules of deploy/: refused, then granted; never added again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from lab.apiserver.authorization import Rbac
from lab.apiserver.server import ServerConfig
from lab.cluster import ClusterConfig, LabCluster
from support import kustomize
from support.documents import document
from support.installation import USER
from support.live import Live, leftovers
from support.places import ROOT

DEPLOY = ROOT / "deploy/kustomize"
(FLAG,) = (text.split()[-1] for _, text in document("docs/beyond.md").commands if "--startup-taint=" in text)
KEY = FLAG.partition("=")[2]
OTHERS = ["example.com/before", "example.com/after"]


def rules(*folders: str) -> Rbac:
    found = [obj for folder in folders for obj in kustomize.build(DEPLOY / folder)]
    return Rbac(found)


@pytest.fixture
def live(loop) -> Iterator[Live]:
    server = ServerConfig(rbac=rules("nftables"), tokens={"secret": USER})
    made = Live(LabCluster(ClusterConfig(tls=True, server=server)))
    loop.run(made.cluster.__aenter__())
    try:
        yield made
    finally:
        loop.run(made.cluster.__aexit__(None, None, None))
    assert leftovers(made) == []


def taints(live: Live) -> list[str]:
    return [taint["key"] for taint in live.cluster.get("nodes", "node-a", "")["spec"].get("taints") or ()]


def taint(live: Live, *keys: str) -> None:
    value = [{"key": key, "effect": "NoSchedule"} for key in keys]
    live.cluster.patch("nodes", "node-a", {"spec": {"taints": value}}, "")


async def test_the_taint_goes_when_everything_is_programmed(live: Live) -> None:
    taint(live, OTHERS[0], KEY, OTHERS[1])
    await live.start(args=[FLAG])
    await live.until(lambda: any("StartupTaintStays" in said for said in live.events("node-a")), "a refusal is told")
    assert taints(live) == [OTHERS[0], KEY, OTHERS[1]]
    rbac = live.cluster.config.server.rbac
    assert rbac is not None
    assert {denied.verb for denied in rbac.denied} == {"patch"}
    vars(rbac).update(vars(Rbac([*kustomize.build(DEPLOY / "nftables"), *with_component()])))
    await live.until(lambda: taints(live) == OTHERS, "the taint is removed")
    await live.until(lambda: any("StartupTaintRemoved" in said for said in live.events("node-a")), "that is told")
    taint(live, KEY)
    await asyncio.sleep(1.0)
    assert taints(live) == [KEY], "it is removed once"


def with_component() -> list[dict[str, object]]:
    """The objects of the kustomize component, in the account's namespace."""
    return kustomize.build(DEPLOY / "startup-taint")
