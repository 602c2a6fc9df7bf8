"""Modes that write rules over netlink: where no program can be started, they serve, repair and verify."""

from __future__ import annotations

from kubeproxy.release import build
from lab.proxyprocess import proxy_command
from support.live import Live
from support.modes import modes

# An installed proxy does not ask git for its version, which the command verify compares with its own.
BARE = ["env", "PATH=/nonexistent", f"KUBE_PROXY_BUILD={' '.join(build())}", proxy_command()]


@modes("nftables", "userspace")
async def test_a_node_without_nft_is_served(bare: Live) -> None:
    bare.service("web", "a1 b1", type="NodePort")
    await bare.start(command=BARE)
    bare.service("sticky", "a1", sessionAffinity="ClientIP")
    await bare.expect(bare.front("web"), {"pod": bare.mode.seen("a1 b1")})
    await bare.expect(bare.front("sticky"), {"pod": bare.mode.seen("a1")})
    status, text = await bare.ask("verify")
    assert status == 0, text
    await bare.proxy.stop()
    await bare.start(command=BARE)
    await bare.expect(bare.front("web"), {"pod": bare.mode.seen("a1 b1")})
