"""The process as an operator handles it: unit files, flags, systemd, signals, /debug pages, --cleanup, --init-only."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.netns import run_in_async
from lab.probes import http_get
from lab.proxyprocess import METRICS_PORT, Proxy, proxy_command
from support.live import Live
from support.places import ROOT
from support.programs import program

PROXY = {"enableProfiling": True}
UNIT = ROOT / "deploy/systemd/kube-proxy.service"

# A unit file as in guides of the first years: no readiness, only flags, an API server without TLS.
OLD_GUIDE = """\
[Unit]
Description=Kubernetes Proxy Service
Documentation=http://kubernetes.com
After=network.target
Wants=network.target

[Service]
Type=simple
EnvironmentFile=-/etc/sysconfig/kube-proxy
ExecStart=/usr/bin/kube-proxy \\
    --master=http://172.17.8.100:8080 \\
    --v=4 \\
    --proxy-mode=iptables
TimeoutStartSec=0
Restart=on-abnormal

[Install]
WantedBy=multi-user.target
"""


# The size of the conntrack table is shared by the whole machine: the proxy writes two files instead.
OWN_MACHINE = """\
hostname node-a
mount --bind "$1" /proc/sys/net/netfilter/nf_conntrack_max
mount --bind "$2" /sys/module/nf_conntrack/parameters/hashsize
shift 2
exec "$@"
"""


async def run(live: Live, *argv: str) -> Proxy:
    """Start a proxy on node-a with exactly these arguments, on a machine with this host name."""
    folder, namespace = live.cluster.folder, live.cluster.namespace_of("node")
    limits = [folder / name for name in ("nf_conntrack_max", "hashsize")]
    for limit in limits:
        limit.write_text("1024\n", encoding="ascii")
    log = folder / f"daemon-{len(live.proxies)}.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *("ip", "netns", "exec", namespace, "unshare", "--uts", "--mount", "sh", "-ec", OWN_MACHINE, "sh"),
            *map(str, limits),
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    proxy = Proxy(process, namespace, log, Path())
    live.proxies.append(proxy)
    live.cluster._proxies.append(proxy)
    return proxy


async def ended(live: Live, proxy: Proxy) -> int | None:
    await live.until(lambda: proxy.returncode is not None, "the end of the proxy")
    return proxy.returncode


async def test_the_unit_file_of_an_old_guide(bare: Live) -> None:
    bare.service("web", "a1 b1")
    node = bare.cluster.namespace_of("node")
    rule = "ip daddr 172.17.8.100 tcp dport 8080 redirect to :6443"
    await bare.nft(f"table ip master {{ chain out {{ type nat hook output priority -100; {rule}; }}; }}")
    status, _, err = await bare.cluster.exec("node", ["ip", "addr", "add", "172.17.8.100/32", "dev", "lo"])
    assert status == 0, err
    start = re.search(r"^ExecStart=/usr/bin/kube-proxy (.*?[^\\])$", OLD_GUIDE, re.M | re.S)
    assert start is not None
    flags = start[1].replace("\\\n", " ").split()
    assert flags == ["--master=http://172.17.8.100:8080", "--v=4", "--proxy-mode=iptables"]
    proxy = await run(bare, proxy_command(), *flags)
    await bare.eventually(bare.unready)
    await bare.expect(bare.front("web"), {"pod": "a1 b1", "node": "a1 b1"}, "tcp")
    assert (await run_in_async(node, lambda: http_get("127.0.0.1", 10256, "/healthz")))[0] == 200
    assert (await bare.page("/proxyMode", METRICS_PORT))[1] == "iptables"
    assert bare.logged(r'^I\d{4} [\d:.]+ +\d+ app\.py:\d+\] FLAG: --master="http://172.17.8.100:8080"')
    await bare.until(lambda: bare.logged(r"Settled service=default/web endpoints=\[2, 2\]"), "a line at -v=4")
    wanted = min(max(32768 * (os.cpu_count() or 1), 131072), 1048576)
    sizes = [(bare.cluster.folder / name).read_text("ascii").split()[0] for name in ("nf_conntrack_max", "hashsize")]
    assert sizes == [str(wanted), str(wanted // 4)]
    assert await proxy.stop(15.0) == 0
    assert not bare.logged("Traceback")


async def test_our_unit_file_gives_all_that_is_needed(bare: Live) -> None:
    text = UNIT.read_text(encoding="utf-8")
    capabilities = re.findall(r"^CapabilityBoundingSet=(.*)$", text, re.M)[0].lower().replace("cap_", "+").split()
    bare.service("web", "a1 b1", type="NodePort")
    limits = ["setpriv", "--no-new-privs", "--inh-caps=-all", f"--bounding-set=-all,{','.join(capabilities)}"]
    conntrack = {"tcpEstablishedTimeout": "1234s", "maxPerCore": 0}
    await bare.start({"conntrack": conntrack}, command=[*limits, proxy_command()])
    _, held, _ = await bare.cluster.exec("node", ["grep", "CapEff", f"/proc/{bare.proxy.pid}/status"])
    assert held.split() == ["CapEff:", "0000000000001000"]  # CAP_NET_ADMIN
    await bare.expect(bare.front("web", "nodeport"), {"outside": "a1 b1"})
    assert bare.logged("Set sysctls keys=.*tcp_timeout_established")
    assert not bare.logged("Cannot|Permission|not permitted|^E")


def test_our_unit_file_is_one() -> None:
    text = UNIT.read_text(encoding="utf-8")
    settings = [line.partition("=")[0] for line in text.splitlines() if line and line[0] not in "#["]
    assert {"Type", "WatchdogSec", "ExecStart", "CapabilityBoundingSet", "Restart"} <= set(settings)
    assert len(set(settings)) == len(settings)
    assert re.findall(r"^\[(.*)\]$", text, re.M) == ["Unit", "Service", "Install"]
    assert all(re.fullmatch(r"[A-Z][A-Za-z]+=\S.*|#.*|\[\w+\]|", line) for line in text.splitlines())


def test_systemd_has_no_complaint_about_our_unit_file(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    text = UNIT.read_text(encoding="utf-8")
    unit.write_text(text.replace("/usr/local/bin/kube-proxy", proxy_command()), encoding="utf-8")
    command = [program("systemd-analyze"), "verify", "--man=no", unit]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    # Complaints about other units of this machine do not matter.
    assert [line for line in done.stderr.splitlines() if UNIT.name in line] == []


async def state(live: Live, name: str) -> dict[str, object]:
    """Return the entry of a Service in /debug/state; nothing before the proxy has received the Service."""
    status, body = await live.page(f"/debug/state?namespace=default&name={name}", METRICS_PORT)
    if status == 404:
        return {}
    (found,) = json.loads(body)["services"]
    return found


async def test_state_names_the_versions_that_are_programmed(live: Live) -> None:
    live.service("seen", "a1 b1", ipFamilyPolicy="SingleStack", type="NodePort")
    front = live.front("seen")
    for endpoints, wanted in (("a1 b1", ("a1", "b1")), ("a2", ("a2",)), ("", ())):
        live.endpoints("seen", endpoints)
        piece = live.cluster.get("endpointslices", "seen-ipv4")["metadata"]["resourceVersion"]

        async def reflected(piece: str = piece) -> str:
            found = await state(live, "seen")
            right = found.get("slices") == {"seen-ipv4": piece} and found["state"] == "programmed"
            return "" if right else f"{piece} expected: {found}"

        await live.eventually(reflected)
        assert await live.destinations(front) == {f"{pod}:3000" for pod in wanted}
        found = await state(live, "seen")
        assert found["resourceVersion"] == live.cluster.get("services", "seen")["metadata"]["resourceVersion"]
        tcp = next(port for port in found["ports"] if port["protocol"] == "TCP")
        assert sorted(tcp["endpoints"]) == sorted(f"{live.ips[pod]['IPv4']}:3000" for pod in wanted)
        (cluster,) = [f for f in tcp["frontends"] if f["kind"] == "cluster"]
        assert cluster["address"] == f"{front.address}:80"
        assert cluster["fromNode"] == ("endpoints, masqueraded" if wanted else "reject")
    live.delete("seen")

    async def gone() -> str:
        status, body = await live.page("/debug/state?namespace=default&name=seen", METRICS_PORT)
        return "" if status == 404 else body

    await live.eventually(gone)
    status, text = await live.page("/debug/state?format=text", METRICS_PORT)
    assert status == 200
    assert text.startswith("kube-proxy ")
    assert "\ndefault/kubernetes: programmed, version " in text


async def test_profiling_pages(live: Live) -> None:
    status, text = await live.page("/debug/pprof/goroutine", METRICS_PORT)
    assert status == 200
    assert "thread MainThread\n" in text
    assert "task engine\n" in text
    status, text = await live.page("/debug/pprof/profile?seconds=0.2", METRICS_PORT)
    assert status == 200
    assert re.search(r"^MainThread;.*;app\.py:run;.* \d+$", text, re.M)
    url = f"http://127.0.0.1:{METRICS_PORT}/debug/flags/v"
    status, out, _ = await live.cluster.exec("node", ["curl", "-sS", "-X", "PUT", "-d", "4", url])
    assert (status, out) == (0, "successfully set klog.logging.verbosity to 4\n")
    live.service("loud", "a1")
    await live.until(lambda: live.logged("Settled service=default/loud"), "more in the log")


@pytest.fixture
def notified(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.setblocking(False)
        yield sock


async def test_systemd_and_signals(bare: Live, notified: socket.socket) -> None:
    said: list[str] = []

    def hears(line: str) -> bool:
        while True:
            try:
                said.extend(notified.recv(4096).decode().splitlines())
            except BlockingIOError:
                return any(re.fullmatch(line, one) for one in said)

    environment = [f"NOTIFY_SOCKET={notified.getsockname()}", "WATCHDOG_USEC=400000"]
    await bare.cluster.server.refuse()
    proxy = await bare.start(command=["env", *environment, proxy_command()], ready_within=None)
    await bare.until(lambda: hears("STATUS=Not ready: .*"), "a status while it starts")
    await bare.until(lambda: hears("WATCHDOG=1"), "a sign of life")
    assert not hears("READY=1")
    await bare.cluster.server.listen()
    await bare.until(lambda: hears("READY=1"), "ready")
    await bare.until(lambda: hears(r"STATUS=Ready: \d+ Services? in nftables mode"), "a status when it is ready")
    proxy._signal(signal.SIGHUP)
    await bare.until(lambda: bare.logged("Ignored SIGHUP"), "a line about the signal")
    proxy._signal(signal.SIGSTOP)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCONT):  # so that it finds both at once
        os.kill(proxy.pid, number)
    assert await ended(bare, proxy) == 1
    assert bare.logged("Ending at once signal=SIGINT") or bare.logged("Ending at once signal=SIGTERM")
    proxy = await bare.start(command=["env", *environment, proxy_command()])
    said.clear()
    proxy._signal(signal.SIGTERM)
    assert await ended(bare, proxy) == 0
    assert hears("STOPPING=1")
    assert "table ip kube-proxy" in await bare.nft("list", "tables")


async def test_cleanup_and_init_only(bare: Live) -> None:
    await bare.start()
    assert "table ip kube-proxy" in await bare.nft("list", "tables")
    await bare.proxy.stop()
    once = await bare.start({"conntrack": {"tcpCloseWaitTimeout": "123s"}}, ["--init-only"], ready_within=None)
    assert await ended(bare, once) == 0
    key = "net.netfilter.nf_conntrack_tcp_timeout_close_wait"
    assert (await bare.cluster.exec("node", ["sysctl", "-n", key]))[1].strip() == "123"
    assert "table ip kube-proxy" in await bare.nft("list", "tables")
    cleanup = await bare.start(None, ["--cleanup"], ready_within=None)
    assert await ended(bare, cleanup) == 0
    assert "kube-proxy" not in await bare.nft("list", "tables")
    assert not bare.logged("Traceback")


async def test_pod_networks_of_the_node_that_change_or_do_not_fit_end_it(bare: Live) -> None:
    record = bare.cluster.store.get("nodes", ("", "node-a"))
    assert record is not None

    def put(*cidrs: str) -> None:
        node = record.decode()
        node["spec"] |= {"podCIDR": cidrs[0], "podCIDRs": list(cidrs)}
        bare.cluster.store.put("nodes", node)

    config = {"detectLocalMode": "NodeCIDR"}
    proxy = await bare.start(config)
    put("10.99.0.0/24")
    assert await ended(bare, proxy) == 1
    assert bare.logged("podCIDRs changed .*10.99.0.0/24")
    put("fd00:99::/64")
    proxy = await bare.start(config, ready_within=None)
    assert await ended(bare, proxy) == 1
    assert bare.logged("Error: detectLocalMode: NodeCIDR, but podCIDRs fd00:99::/64 of Node node-a are not IPv4")
    assert not bare.logged("Traceback")


async def test_as_process_1_it_takes_the_ends_of_orphans(bare: Live) -> None:
    """As in a container, with a credential plugin that leaves processes behind."""
    first = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "setsid"]
    proxy = await bare.start(command=[*first, proxy_command()])
    (inner,) = children_of(proxy.pid)

    async def left() -> str:
        return " ".join(children_of(inner))

    try:
        forking = ["nsenter", "--target", inner, "--pid", "sh", "-c", "sleep 0.3 & sleep 0.3 &"]
        assert await (await asyncio.create_subprocess_exec(*forking)).wait() == 0
        assert len(children_of(inner)) == 2
        await bare.eventually(left)
    finally:
        os.kill(int(inner), signal.SIGTERM)
    assert await proxy.wait() == 0


def children_of(pid: int | str) -> list[str]:
    """Return the children of a process, if no other thread of it starts processes."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
