"""Run conformance cases against a proxy: real packets through a real kernel.

    python3 run.py --mode nftables --proxy 'kube-proxy --config {config}' cases/*.json      check
    python3 run.py --mode nftables --proxy '...' --record cases/*.json                      record the results

`{config}` is the KubeProxyConfiguration file that the runner writes; it names a kubeconfig whose server is the runner's
own small API. The proxy must serve /metrics at 127.0.0.1:10249 under kube-proxy's names: the runner waits on
kubeproxy_sync_proxy_rules_last_timestamp_seconds. Exit status 1 if a probe has another result.
"""

import argparse
import asyncio
import concurrent.futures
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import topology as t
from miniapi import MiniAPI
from pretty import pretty

HERE = Path(__file__).parent
WORK = Path(tempfile.gettempdir(), "kubeproxy-conformance")
API_PORT = 18001
STICKY_TRIES = 12
SETTLE = 0.5  # seconds in which nothing may be queued
IDLE = 3.0  # seconds after which a family without a sync counts as unaffected
METRIC = "kubeproxy_sync_proxy_rules_{}_timestamp_seconds"
LEFTOVERS = ("nft flush ruleset", "iptables-legacy -t nat -F", "iptables-legacy -t filter -F", "ipvsadm -C")


class Agents:
    """One helper process in each namespace, by the name that probes use for their origin."""

    def __init__(self) -> None:
        self._processes = {}
        places = (("ext", t.EXT, ()), ("pod", t.CLIENT, ()), ("self", t.PODS, t.PORTS))
        for who, namespace, ports in (*places, ("remote", t.REMOTE, t.PORTS), ("host", t.NODE, t.PORTS)):
            command = ["ip", "netns", "exec", namespace, sys.executable, HERE / "agent.py", *map(str, ports)]
            self._processes[who] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._processes["ext2"] = self._processes["ext"]
        self._locks = {id(process): threading.Lock() for process in self._processes.values()}
        time.sleep(0.5)

    def probe(self, request: dict) -> dict:
        """Send a probe through the agent and return the agent's reply."""
        process = self._processes[request["from"]]
        with self._locks[id(process)]:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

    def stop(self) -> None:
        """End all agents."""
        for process in self._processes.values():
            process.kill()


def summary(probe: dict, reply: dict) -> object:
    """Summarise a reply: the endpoints and the sources that they saw, or how the client was refused."""
    if reply["endpoints"]:
        if probe.get("affinity"):
            return {"sticky": len(reply["endpoints"]) == 1}
        return {"endpoints": {name: sorted(clients) for name, clients in sorted(reply["endpoints"].items())}}
    return "refused" if reply["refused"] else "dropped" if reply["timeout"] else reply


def ask(agents: Agents, probe: dict, expected: object) -> object:
    """Send a probe; return its result."""
    if probe["what"] == "health":
        return health(probe)
    distinct = len(expected["endpoints"]) if isinstance(expected, dict) and "endpoints" in expected else None
    tries = STICKY_TRIES if probe.get("affinity") else None
    return summary(probe, agents.probe({**probe, "tries": tries, "distinct": distinct}))


def health(probe: dict) -> object:
    """Query a health check port; return the status and the count of local endpoints."""
    curl = f"ip netns exec {t.EXT} curl -s -m 2 -o - -w '|%{{http_code}}' http://{probe['dst']}:{probe['port']}/"
    try:
        body, code = t.run(curl, must=False).rsplit("|", 1)
        return {"code": int(code), "localEndpoints": json.loads(body)["localEndpoints"] if body else None}
    except (ValueError, KeyError) as error:
        return f"no health answer: {error}"


def metric(name: str) -> dict[str, float]:
    """Return the values of a metric by their labels."""
    try:
        with urllib.request.urlopen("http://127.0.0.1:10249/metrics", timeout=2) as page:
            text = page.read().decode()
    except OSError:
        return {}
    series = re.finditer(rf"^{name}(?:{{([^}}]*)}})? (\S+)$", text, re.MULTILINE)
    return {each[1] or "": float(each[2]) for each in series}


async def synced(since: float, limit: float, proxy: subprocess.Popen) -> bool:
    """Wait until every address family was programmed after `since` and nothing is queued for SETTLE seconds.

    A family that the change does not affect may remain unchanged: after IDLE seconds without work this is accepted.
    """
    calm = None
    while time.time() - since < limit:
        if proxy.poll() is not None:
            raise RuntimeError("the proxy exited")
        last = await asyncio.to_thread(metric, METRIC.format("last"))
        queued = await asyncio.to_thread(metric, METRIC.format("last_queued"))
        fresh = all(value >= since for value in last.values()) or time.time() - since > IDLE
        if last and fresh and all(last.get(labels, 0) >= value for labels, value in queued.items()):
            if calm is None or calm[1] != (last, queued):
                calm = time.time(), (last, queued)
            elif time.time() - calm[0] >= SETTLE:
                return True
        else:
            calm = None
        await asyncio.sleep(0.05)
    return False


def write_config(mode: str, overrides: dict) -> Path:
    """Write the proxy's configuration and its kubeconfig; return the path of the configuration."""
    rest = dict(overrides)
    masquerade = {"minSyncPeriod": "1ms", "masqueradeAll": rest.pop("masqueradeAll", False)}
    config = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": mode,
        "hostnameOverride": t.NODE_NAME,
        "clusterCIDR": f"{t.CLUSTER_CIDR},{t.CLUSTER_CIDR6}",
        "clientConnection": {"kubeconfig": str(WORK / "kubeconfig"), "contentType": "application/json", "qps": 0},
        "conntrack": {"maxPerCore": 0},
        "iptables": masquerade,
        "nftables": masquerade,
        "ipvs": {"minSyncPeriod": "1ms"},
        **rest,
    }
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "x",
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{API_PORT}"}}],
    }
    (WORK / "kubeconfig").write_text(json.dumps(kubeconfig))
    (WORK / "config.yaml").write_text(json.dumps(config))
    return WORK / "config.yaml"


def start(args: argparse.Namespace, case: dict) -> subprocess.Popen:
    """Start the proxy in a new session, with its output in a file."""
    for command in LEFTOVERS:
        if shutil.which(command.split()[0]):
            t.run(command, must=False)
    command = shlex.split(args.proxy.format(config=write_config(args.mode, case["config"])))
    with (WORK / f"proxy-{case['seed']}.log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def stop(proxy: subprocess.Popen) -> None:
    """End the proxy and its session."""
    os.killpg(proxy.pid, signal.SIGTERM)
    try:
        proxy.wait(5)
    except subprocess.TimeoutExpired:
        os.killpg(proxy.pid, signal.SIGKILL)
        proxy.wait()


async def run_case(case: dict, args: argparse.Namespace, agents: Agents) -> int:
    """Play a case; return the number of probes with unexpected results. Raises RuntimeError."""
    api = MiniAPI()
    await api.replace(case["steps"][0]["objects"])
    await api.start("127.0.0.1", API_PORT)
    since = time.time()
    proxy = await asyncio.to_thread(start, args, case)
    wrong = 0
    try:
        for number, step in enumerate(case["steps"]):
            if number:
                since = time.time()
                await api.replace(step["objects"])
            if not await synced(since, 40, proxy) and number == 0:
                raise RuntimeError("no sync within 40 s")
            wrong += await run_step(step, f"seed {case['seed']} step {number}", args, agents)
    finally:
        await asyncio.to_thread(stop, proxy)
        await api.stop()
    return wrong


async def run_step(step: dict, where: str, args: argparse.Namespace, agents: Agents) -> int:
    """Send a step's probes, and record or compare their results; return the number of unexpected ones."""
    answers = step.setdefault("expected", {})
    expected = answers.get(args.mode) or answers.get(args.like or args.mode) or [None] * len(step["probes"])
    pairs = list(zip(step["probes"], expected, strict=True))
    seen = await asyncio.gather(*(asyncio.to_thread(ask, agents, probe, answer) for probe, answer in pairs))
    if args.record:
        answers[args.mode] = seen
        return 0
    wrong = 0
    for (probe, answer), got in zip(pairs, seen, strict=True):
        if got != answer:
            wrong += 1
            target = f"{probe.get('proto', 'tcp')} {probe['dst']}:{probe['port']}"
            print(f"  {where}: {probe['what']} {probe['service']} from {probe['from']} to {target}")
            print(f"      expected {json.dumps(answer)}\n      saw      {json.dumps(got)}")
    if args.meaning:
        from meant import contradictions  # noqa: PLC0415 - needs the package kubeproxy

        for text in await asyncio.to_thread(lambda: [*contradictions(step["probes"], seen)]):
            wrong += 1
            print(f"  {where}: {text}")
    return wrong


async def main(args: argparse.Namespace) -> int:
    """Play all cases; return the exit status."""
    asyncio.get_running_loop().set_default_executor(concurrent.futures.ThreadPoolExecutor(8))
    agents = Agents()
    failed = total = probes = 0
    try:
        for path in args.cases:
            case = json.loads(path.read_text())
            try:
                wrong = await run_case(case, args, agents)
            except RuntimeError as error:
                wrong = 1
                print(f"  seed {case['seed']}: {error} (log: {WORK}/proxy-{case['seed']}.log)")
            count = sum(len(step["probes"]) for step in case["steps"])
            total, probes, failed = total + 1, probes + count, failed + bool(wrong)
            print(
                f"{'FAIL' if wrong else 'ok  '} {path.name} {count} probes{f', {wrong} wrong' if wrong else ''}",
                flush=True,
            )
            if args.record:
                path.write_text(pretty(case) + "\n")
    finally:
        agents.stop()
    print(f"{args.mode}: {total - failed}/{total} cases hold, {probes} probes")
    return 1 if failed else 0


def parsed() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", type=Path)
    parser.add_argument("--mode", default="nftables")
    parser.add_argument("--proxy", default="kube-proxy --config {config}")
    parser.add_argument("--like", help="use this mode's recorded expectations where --mode has none of its own")
    parser.add_argument("--record", action="store_true")
    parser.add_argument(
        "--meaning", action="store_true", help="also compare with the meaning of the rules in the kernel"
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    given = parsed()
    if given.inside:
        WORK.mkdir(exist_ok=True)
        sys.exit(asyncio.run(main(given)))
    t.up()
    try:
        again = ["ip", "netns", "exec", t.NODE, sys.executable, __file__, "--inside", *sys.argv[1:]]
        status = subprocess.run(again, check=False).returncode
    finally:
        t.down()
    sys.exit(status)
