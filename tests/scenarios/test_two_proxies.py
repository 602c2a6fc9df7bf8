"""Two kube-proxies on one node, ours or the Go kube-proxy: both report it with process and mode, also as an event."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import yaml

from kubeproxy.kernel.nftables.nfnetlink import Transactions
from lab.netns import run_in_async
from lab.probes import http_get
from lab.proxyprocess import METRICS_PORT, Proxy, proxy_command
from support.live import Live
from support.traffic import DUAL, Traffic, streams

# The properties by which the Go kube-proxy is recognised: the name of its command, two ports, its mode.
GO = """\
import http.server, threading
open("/proc/self/comm", "w").write("kube-proxy")
class Page(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "8")
        self.end_headers()
        self.wfile.write(b"iptables")
health = http.server.ThreadingHTTPServer(("0.0.0.0", 10256), Page)
threading.Thread(target=health.serve_forever, daemon=True).start()
http.server.ThreadingHTTPServer(("127.0.0.1", 10249), Page).serve_forever()
"""
SECOND = {"mode": "userspace"}


def said(proxy: Proxy, pattern: str) -> list[str]:
    return [line for line in proxy.log.read_text(errors="replace").splitlines() if re.search(pattern, line)]


async def wrong(bare: Live, proxy: Proxy, *words: str) -> list[str]:
    """Return the errors in a proxy's answer."""
    _, out, _ = await bare.cluster.exec("node", [proxy_command(), *words, "--control-socket", str(proxy.control)])
    return [line for line in out.splitlines() if line.startswith("  x  ")]


async def other_than(bare: Live, proxy: Proxy, line: str) -> str:
    """Return the errors of doctor if they differ from this one line, else ''."""
    lines = await wrong(bare, proxy, "doctor")
    return "" if lines == [line] else f"doctor: {lines}"


async def test_both_of_two_modes_say_that_there_is_another(bare: Live) -> None:
    bare.service("web", "a1 b1")
    program = ["env", proxy_command()]  # a fork has its parent's name, by which no command recognises a kube-proxy
    first = await bare.start(command=program)
    second = await bare.start(SECOND, ready_within=None, command=program)
    holder = rf"process kube-proxy \(pid {first.pid}\) has it, a kube-proxy in mode nftables: both write rules"
    for port in ("healthz on 0.0.0.0:10256", "metrics on 127.0.0.1:10249"):
        await bare.until(
            lambda port=port: said(second, rf"E.*{port}: Address already in use; {holder}"), "the second's word"
        )
    other = rf"another kube-proxy \(pid {second.pid} as it reports, in mode userspace\) runs on this node"
    await bare.until(lambda: said(first, other), "the first's word")
    for reason in ("AnotherKubeProxy", "FailedToStartProxierHealthcheck", "FailedToStartMetricServer"):
        await bare.until(lambda reason=reason: any(e.startswith(reason) for e in bare.events("node-a")), reason)
    what = f"another kube-proxy of this program runs here too (pid {second.pid}) in userspace mode"
    # The start of the second proxy removes the first one's tables; the first restores them, and until then doctor
    # reports the missing tables.
    await bare.eventually(partial(other_than, bare, first, f"  x  {what}"))
    asked = ("why", bare.ips["pod"]["IPv4"], f"{bare.front('web').address}:80")
    assert (await wrong(bare, first, *asked))[0].startswith(f"  x  {what}, with rules for ")
    what = f"another kube-proxy of this program runs here too (pid {first.pid}) in nftables mode"
    assert await wrong(bare, second, "doctor") == [f"  x  {what}"]
    await first.stop()
    await bare.until(lambda: said(second, "Serving healthz on .* after failed"), "the port when the first one is gone")


@pytest.mark.slow("two proxies that repair each other's rules")
async def test_two_of_one_mode_serve_and_come_to_rest(bare: Live) -> None:
    """Each proxy takes the other's changes for another program's, and writes nothing if they agree."""
    bare.service("web", "a1 b1", type="NodePort", **DUAL)
    first = await bare.start()
    front = bare.front("web")
    await bare.programmed(front, "a1 b1")
    began = time.monotonic()
    async with Traffic(bare, *streams(bare)) as traffic:
        second = await bare.start(ready_within=None)
        await bare.until(lambda: said(second, "Committed everything family=IPv6"), "the second's first sync")
        for endpoints in ("a1", "b1 b2", "a1 b1"):
            bare.endpoints("web", endpoints)
            await bare.programmed(front, endpoints)
            await traffic.flow()
        await bare.eventually(lambda: at_rest(bare))
    assert traffic.failures == []
    minutes = 1 + int((time.monotonic() - began) / 60)
    for proxy in (first, second):
        assert len(said(proxy, "Comparing everything, as another program")) <= minutes
        refused = said(proxy, "Sync failed")
        assert not any("an nf_tables transaction: No such file" in line for line in refused), refused


async def at_rest(live: Live) -> str:
    """Return the reason why the tables still change: a write within three seconds; repairs come within one."""
    namespace = live.cluster.namespace_of("node")
    before = await run_in_async(namespace, generation)
    await asyncio.sleep(3.0)
    return "" if (after := await run_in_async(namespace, generation)) == before else f"{after - before} transactions"


def generation() -> int:
    with closing(Transactions.open()) as link:
        return link.generation()


async def test_the_go_kube_proxy_is_named_though_it_has_more_rights(bare: Live, tmp_path: Path) -> None:
    program = tmp_path / "go.py"
    program.write_text(GO)
    namespace = bare.cluster.namespace_of("node")
    go = await asyncio.create_subprocess_exec("ip", "netns", "exec", namespace, "python3", program)
    try:
        await bare.until(lambda: Path(f"/proc/{go.pid}/comm").read_text() == "kube-proxy\n", "the other's name")
        await bare.eventually(lambda: listening(namespace))
        proxy = await bare.start(ready_within=None)
        line = rf"process kube-proxy \(pid {go.pid}\) has it, a kube-proxy in mode iptables: both write rules"
        await bare.until(lambda: said(proxy, f"10256: Address already in use; {line}"), "its name")
    finally:
        go.kill()
        await go.wait()


async def listening(namespace: str) -> str:
    try:
        await run_in_async(namespace, lambda: http_get("127.0.0.1", METRICS_PORT, "/proxyMode"))
    except OSError as error:
        return str(error)
    return ""


async def test_two_proxies_of_two_modes_share_the_services_by_their_label(bare: Live) -> None:
    mine, label = "kube-proxy-py", "service.kubernetes.io/service-proxy-name"
    for name in ("mine", "other"):
        bare.service(name, "a1 b1")
    bare.cluster.patch("services", "mine", {"metadata": {"labels": {label: mine}}})
    ports = {"healthzBindAddress": "127.0.0.1:10356", "metricsBindAddress": ""}
    first = await bare.start({"mode": "userspace", **ports}, ready_within=None)
    await bare.expect(bare.front("other"), {"pod": "a1 b1"})
    await bare.start(args=[f"--service-proxy-name={mine}"])
    await bare.expect(bare.front("mine"), {"pod": "a1 b1", "outside": "a1 b1"})
    await bare.expect(bare.front("other"), {"pod": "a1 b1", "outside": "a1 b1"})
    status, text = await bare.ask("services")
    assert status == 0, text
    assert "default/mine" in text
    assert "default/other" not in text
    config = yaml.safe_load(first.config.read_text())["clientConnection"]["kubeconfig"]
    alone = ("--kubeconfig", config, "--hostname-override", "node-a")
    status, text = await bare.ask("services", *alone, f"--service-proxy-name={mine}")
    assert "default/mine" in text
    assert "default/other" not in text
    status, text = await bare.ask("services", f"--service-proxy-name={mine}")
    assert status == 2
    assert "--service-proxy-name: only with --manifests or --kubeconfig" in text
    bare.cluster.patch("services", "other", {"metadata": {"labels": {label: mine}}})
    await bare.expect(bare.front("other"), {"pod": "a1 b1"})
    status, text = await bare.ask("verify")
    assert status == 0, text
