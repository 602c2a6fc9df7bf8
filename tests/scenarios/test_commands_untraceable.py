"""`kube-proxy trace` on a kernel without nf_tables, such as the guest's: it reports the missing requirement."""

from __future__ import annotations

from support.live import Live
from support.modes import modes

pytestmark = modes("ipvs")


async def test_a_kernel_that_cannot_trace_is_a_clear_error(live: Live) -> None:
    live.service("seen", "a1")
    front = live.front("seen")
    await live.expect(front, {"pod": "a1"}, "tcp")
    status, text = await live.ask("trace", "node", f"{front.address}:80")
    assert (status, "this kernel cannot trace packets" in text, "needs Linux 5.12" in text) == (2, True, True), text
