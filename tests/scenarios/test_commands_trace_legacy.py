"""`kube-proxy trace` with rules of iptables-legacy, which the kernel's tracing does not support: it reports this."""

from __future__ import annotations

from lab.proxyprocess import proxy_command
from support.live import Live
from support.modes import modes

pytestmark = modes("iptables-legacy")


async def test_legacy_rules_are_counted_since_they_are_not_seen(live: Live) -> None:
    live.service("old", "a1")
    front = live.front("old")
    await live.expect(front, {"node": "a1"})
    status, text = await live.ask("trace", "node", f"{front.address}:80")
    assert status == 0, text
    assert f"{live.ips['a1']['IPv4']}:3000 answered" in text
    assert "rules of iptables-legacy that the kernel's tracing does not show: " in text


async def test_without_a_proxy_an_address_can_be_traced_and_a_name_cannot(live: Live) -> None:
    live.service("alone", "a1")
    front = live.front("alone")
    await live.expect(front, {"node": "a1"})
    nobody = ["--control-socket", "/nonexistent/control.sock"]
    command = ["trace", "node", f"{front.address}:80", *nobody]
    status, text = await ask_alone(live, command)
    assert (status, "answered" in text) == (0, True), text
    status, text = await ask_alone(live, ["trace", "node", "default/alone:80", *nobody])
    assert (status, "no kube-proxy answers at" in text) == (2, True), text


async def ask_alone(live: Live, words: list[str]) -> tuple[int, str]:
    """Run a subcommand that does not query the cluster's proxy."""
    status, out, err = await live.cluster.exec("node", [proxy_command(), *words])
    return status, out + err
