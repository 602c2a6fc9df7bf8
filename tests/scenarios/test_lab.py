"""A lab with whoami pods on both nodes, requests from everywhere, and nothing left behind."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import ssl
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
import yaml

from kubeproxy.errors import ConfigError
from lab.apiserver.server import ServerConfig
from lab.cluster import ClusterConfig, LabCluster, NotInTimeError
from lab.netns import names, run_in_async
from lab.objects import service, whoami_rc
from lab.probes import Answer, http_get
from lab.proxyprocess import ProxyError
from lab.runfolder import RUN
from lab.topology import NODE_B


def run_cluster(test: Callable[[LabCluster], Awaitable[None]], config: ClusterConfig | None = None) -> LabCluster:
    async def main() -> LabCluster:
        async with LabCluster(config) as cluster:
            await test(cluster)
        return cluster

    return asyncio.run(main())


def test_pods_answer_from_everywhere_and_nothing_is_left() -> None:
    pids: list[int] = []

    async def test(cluster: LabCluster) -> None:
        pids.append(cluster._answers.pid)
        cluster.create(whoami_rc("web", 3))
        pods = await cluster.pods_ready("app=web", 3)
        assert sorted(p["spec"]["nodeName"] for p in pods) == ["node-a", "node-a", "node-b"]
        for pod in pods:
            for place in ("pod", "node", "outside", "neighbour"):
                for address in (p["ip"] for p in pod["status"]["podIPs"]):
                    for proto in ("tcp", "udp"):
                        answer = await cluster.probe(place, proto, address, 3000)
                        assert isinstance(answer, Answer), (place, proto, address, answer)
                        assert (answer.pod, answer.ip) == (pod["metadata"]["name"], address)
            assert await cluster.probe("node", "tcp", pod["status"]["podIP"], 3001) == "refused"
            assert await cluster.probe("node", "udp", pod["status"]["podIP"], 3001) == "refused"
        assert await cluster.probe("node", "tcp", "192.0.2.1", 3000, 0.05) in {"timeout", "unreachable"}

    start = time.monotonic()
    cluster = run_cluster(test)
    assert time.monotonic() - start < 10
    assert names(cluster.topology.prefix) == []
    assert not cluster.folder.exists()
    assert not Path(f"/proc/{pids[0]}").exists()


def test_start_with_three_pods_is_quick() -> None:
    async def main() -> float:
        start = time.monotonic()
        async with LabCluster() as cluster:
            cluster.create(whoami_rc("web", 3))
            await cluster.pods_ready("app=web", 3)
            return time.monotonic() - start

    assert asyncio.run(main()) < 2.0


def test_service_gets_slices_that_follow_the_pods() -> None:
    async def test(cluster: LabCluster) -> None:
        cluster.create(whoami_rc("web", 2))
        ports = [{"name": "http", "port": 80, "targetPort": "tcp"}]
        cluster.create(service("web", {"app": "web"}, ports, ipFamilyPolicy="PreferDualStack", type="LoadBalancer"))

        def endpoints(ready: bool = True) -> set[str]:
            slices = cluster.select("endpointslices", "kubernetes.io/service-name=web")
            found = [e for s in slices for e in s["endpoints"] or ()]
            return {e["addresses"][0] for e in found if e["conditions"]["ready"] is ready}

        pods = await cluster.pods_ready("app=web", 2)
        await cluster.until(lambda: len(endpoints()) == 4, "two endpoints of each family")
        assert endpoints() == {p["ip"] for pod in pods for p in pod["status"]["podIPs"]}
        slices = cluster.select("endpointslices", "kubernetes.io/service-name=web")
        assert {s["ports"][0]["port"] for s in slices} == {3000}
        ingress = cluster.get("services", "web")["status"]["loadBalancer"]["ingress"]
        assert [i["ip"] for i in ingress] == ["203.0.113.1", "2001:db8:2::1"]

        name = pods[0]["metadata"]["name"]
        cluster.patch("pods", name, {"metadata": {"annotations": {"lab.kubeproxy/ready": "false"}}})
        await cluster.until(lambda: len(endpoints()) == 2, "one pod not ready")
        assert len(endpoints(ready=False)) == 2
        cluster.scale("web", 4)
        await cluster.until(lambda: len(endpoints()) == 6, "three of four pods ready")
        cluster.scale("web", 0)
        await cluster.until(lambda: not cluster.select("pods", "app=web"), "no pods")
        await cluster.until(lambda: not endpoints() | endpoints(ready=False), "no endpoints")

    run_cluster(test)


def test_deleted_pod_terminates_while_it_drains() -> None:
    async def test(cluster: LabCluster) -> None:
        cluster.create(whoami_rc("web", 1))
        cluster.create(service("web", {"app": "web"}, [{"port": 80, "targetPort": 3000}]))
        (pod,) = await cluster.pods_ready("app=web", 1)
        address, name = pod["status"]["podIP"], pod["metadata"]["name"]
        cluster.delete("pods", name)

        def conditions() -> dict[str, dict[str, bool]]:
            slices = cluster.select("endpointslices", "kubernetes.io/service-name=web")
            return {e["targetRef"]["name"]: e["conditions"] for s in slices for e in s["endpoints"] or ()}

        await cluster.until(lambda: conditions().get(name, {}).get("terminating") is True, "a terminating endpoint")
        assert conditions()[name] == {"ready": False, "serving": True, "terminating": True}
        assert isinstance(await cluster.probe("outside", "tcp", address, 3000), Answer)
        await cluster.until(lambda: name not in conditions(), "the endpoint is gone")
        (other,) = await cluster.pods_ready("app=web", 1)
        assert other["metadata"]["name"] != name
        assert not isinstance(await cluster.probe("outside", "tcp", address, 3000, 0.1), Answer)

    run_cluster(test, ClusterConfig(drain=0.3))


def test_pods_in_their_nodes_network_answer_on_its_addresses_and_go_one_by_one() -> None:
    async def test(cluster: LabCluster) -> None:
        for number in (1, 2):
            ports = [{"containerPort": 3000 + number, "protocol": proto} for proto in ("TCP", "UDP")]
            spec = {"hostNetwork": True, "nodeName": "node-b", "containers": [{"name": "c", "ports": ports}]}
            cluster.create(
                {"kind": "Pod", "metadata": {"name": f"host-{number}", "labels": {"on": "host"}}, "spec": spec}
            )
        for pod in await cluster.pods_ready("on=host", 2):
            assert pod["status"]["podIPs"] == [{"ip": ip} for ip in NODE_B.addresses]
        cluster.delete("pods", "host-1", grace=0)
        await cluster.pods_ready("on=host", 1)
        for proto, address in itertools.product(("tcp", "udp"), NODE_B.addresses):
            answer = await cluster.probe("outside", proto, address, 3002)
            assert isinstance(answer, Answer)
            assert (answer.pod, answer.node) == ("host-2", "node-b")
            assert await cluster.probe("outside", proto, address, 3001) == "refused"

    run_cluster(test)


def test_a_pod_with_readiness_gates_is_ready_when_their_conditions_hold() -> None:
    async def test(cluster: LabCluster) -> None:
        spec = {"readinessGates": [{"conditionType": "lab/green"}], "containers": [{"name": "c"}]}
        cluster.create({"kind": "Pod", "metadata": {"name": "p", "labels": {"app": "p"}}, "spec": spec})

        def conditions() -> dict[str, str]:
            stated = cluster.get("pods", "p")["status"].get("conditions") or ()
            return {c["type"]: c["status"] for c in stated}

        await cluster.until(lambda: conditions().get("ContainersReady") == "True", "a running pod")
        assert conditions()["Ready"] == "False"
        for status in ("True", "False", "True"):
            now = [c for c in cluster.get("pods", "p")["status"]["conditions"] if c["type"] != "lab/green"]
            gate = {"type": "lab/green", "status": status}
            cluster.patch("pods", "p", {"status": {"conditions": [*now, gate]}}, subresource="status")
            await cluster.until(lambda status=status: conditions()["Ready"] == status, f"Ready is {status}")
            assert conditions()["ContainersReady"] == "True"
            assert conditions()["lab/green"] == status

    run_cluster(test)


def test_ports_of_sidecars_are_answered_on_and_found_by_name() -> None:
    async def test(cluster: LabCluster) -> None:
        port = {"name": "side", "containerPort": 3300}
        once = {"name": "once", "ports": [{"name": "once", "containerPort": 3400}]}
        sidecar = {"name": "sidecar", "restartPolicy": "Always", "ports": [port]}
        spec = {"initContainers": [once, sidecar], "containers": [{"name": "c"}]}
        cluster.create({"kind": "Pod", "metadata": {"name": "p", "labels": {"app": "p"}}, "spec": spec})
        ports = [{"name": name, "port": n, "targetPort": name} for n, name in ((80, "side"), (81, "once"))]
        cluster.create(service("p", {"app": "p"}, ports))
        (pod,) = await cluster.pods_ready("app=p", 1)

        def found() -> list[int]:
            slices = cluster.select("endpointslices", "kubernetes.io/service-name=p")
            return [p["port"] for s in slices for p in s["ports"] if s["endpoints"]]

        await cluster.until(lambda: found() == [3300], "a slice with the sidecar's port alone")
        assert isinstance(await cluster.probe("outside", "tcp", pod["status"]["podIP"], 3300), Answer)
        assert await cluster.probe("outside", "tcp", pod["status"]["podIP"], 3400) == "refused"

    run_cluster(test)


def test_two_clusters_live_side_by_side() -> None:
    async def main() -> None:
        async with LabCluster() as one, LabCluster() as two:
            for cluster in (one, two):
                cluster.create(whoami_rc("web", 1))
                (pod,) = await cluster.pods_ready("app=web", 1)
                answer = await cluster.probe("outside", "tcp", pod["status"]["podIP"], 3000)
                assert isinstance(answer, Answer)
                assert answer.pod == pod["metadata"]["name"]

    asyncio.run(main())


def test_leftovers_of_a_killed_cluster_are_replaced() -> None:
    async def abandon() -> LabCluster:
        cluster = LabCluster(ClusterConfig(cluster_id=f"left{os.getpid()}"))
        await asyncio.to_thread(cluster.topology.up)
        cluster.folder.mkdir(mode=0o700, parents=True)
        (cluster.folder / "pid").write_text("999999999 1")
        return cluster

    async def nothing(cluster: LabCluster) -> None:
        assert len(names(cluster.topology.prefix)) == 4

    left = asyncio.run(abandon())
    assert len(names(left.topology.prefix)) == 4
    cluster = run_cluster(nothing, left.config)
    assert names(cluster.topology.prefix) == []
    assert not (RUN / left.config.cluster_id).exists()


def test_pod_deleted_while_it_starts_leaves_nothing() -> None:
    async def test(cluster: LabCluster) -> None:
        pod = {"kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [{"name": "c"}]}}
        for pause in (0.0, 0.001, 0.003, 0.006, 0.01, 0.02):
            cluster.create(pod | {"metadata": {"name": "p"}})
            await asyncio.sleep(pause)
            cluster.delete("pods", "p", grace=0)
        await cluster.until(lambda: names(f"{cluster.topology.prefix}pod") == [], "no pod namespaces")

    run_cluster(test)


def test_running_id_is_refused() -> None:
    async def main() -> None:
        async with LabCluster() as cluster:
            with pytest.raises(ConfigError, match="is running already"):
                async with LabCluster(cluster.config):
                    pass

    asyncio.run(main())


def test_nothing_is_left_after_an_error() -> None:
    class BoomError(Exception):
        pass

    seen: list[LabCluster] = []

    async def test(cluster: LabCluster) -> None:
        seen.append(cluster)
        cluster.create(whoami_rc("web", 2))
        raise BoomError

    with pytest.raises(BoomError):
        run_cluster(test)
    assert names(seen[0].topology.prefix) == []
    assert not seen[0].folder.exists()


def test_tls_with_tokens_and_client_certificates() -> None:
    async def test(cluster: LabCluster) -> None:
        config = yaml.safe_load(cluster.kubeconfig.read_text())
        url = config["clusters"][0]["cluster"]["server"] + "/api/v1/nodes"
        assert url.startswith("https://127.0.0.1:")
        assert config["users"][0]["user"] == {"token": "secret"}
        assert cluster.kubeconfig.stat().st_mode & 0o077 == 0
        assert cluster.certificates is not None
        plain = ssl.create_default_context(cafile=config["clusters"][0]["cluster"]["certificate-authority"])
        known = ssl.create_default_context(cafile=str(cluster.certificates.ca))
        known.load_cert_chain(cluster.certificates.client, cluster.certificates.client_key)
        async with aiohttp.ClientSession() as session:
            for context, headers, status in (
                (plain, {"Authorization": "Bearer secret"}, 200),
                (plain, {"Authorization": "Bearer wrong"}, 401),
                (plain, {}, 401),
                (known, {}, 200),
            ):
                async with session.get(url, ssl=context, headers=headers) as answer:
                    assert answer.status == status
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await session.get(url)
        # TLS connections close a moment after their session.
        await asyncio.sleep(0.05)

    run_cluster(test, ClusterConfig(tls=True, server=ServerConfig(tokens={"secret": "admin"})))


def test_api_is_reached_from_the_node_and_from_outside() -> None:
    async def test(cluster: LabCluster) -> None:
        for place, address in (("node", "127.0.0.1"), ("outside", "192.168.100.1"), ("pod", "192.168.100.1")):
            ask = functools.partial(http_get, address, 6443, "/healthz")
            assert await run_in_async(cluster.namespace_of(place), ask) == (200, b"ok")

    run_cluster(test)


def test_proxy_runs_in_the_node() -> None:
    async def test(cluster: LabCluster) -> None:
        cluster.create(whoami_rc("web", 2))
        cluster.create(service("web", {"app": "web"}, [{"port": 80, "targetPort": 3000}]))
        await cluster.pods_ready("app=web", 2)
        proxy = await cluster.start_proxy()
        ip = cluster.get("services", "web")["spec"]["clusterIP"]
        answers = await cluster.probes("outside", "tcp", ip, 80, 20)
        assert all(isinstance(a, Answer) for a in answers)
        assert "kubeproxy_sync_proxy_rules" in await proxy.metrics()
        assert await proxy.kill() == -9
        assert isinstance(await cluster.probe("pod", "tcp", ip, 80), Answer)
        again = await cluster.start_proxy()
        assert await again.stop() == 0
        with pytest.raises(ProxyError, match="status 1"):
            await cluster.start_proxy({"mode": "nothing"})
        with pytest.raises(ProxyError, match="not ready"):
            await cluster.start_proxy(command=["sh", "-c", "sleep 60"], ready_within=0.1)

    run_cluster(test)


def test_exec_and_unknown_places() -> None:
    async def test(cluster: LabCluster) -> None:
        status, out, _ = await cluster.exec("node", ["ip", "-o", "addr", "show", "cbr0"])
        assert status == 0
        assert "10.244.0.1/24" in out
        assert (await cluster.exec("outside", ["false"]))[0] == 1
        with pytest.raises(TimeoutError):
            await cluster.exec("node", ["sleep", "60"], timeout=0.05)
        with pytest.raises(ConfigError, match="place"):
            cluster.namespace_of("nowhere")
        cluster.create(whoami_rc("web", 1))
        (pod,) = await cluster.pods_ready("app=web", 1)
        answer = await cluster.probe(f"default/{pod['metadata']['name']}", "tcp", pod["status"]["podIP"], 3000)
        assert isinstance(answer, Answer)
        assert answer.client == pod["status"]["podIP"]
        with pytest.raises(NotInTimeError, match="never"):
            await cluster.until(lambda: False, "never", 0.01)

    run_cluster(test)


def command(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "lab", *args], capture_output=True, text=True, timeout=60, check=False)


def test_command_line_up_status_down() -> None:
    cluster_id = f"cli{os.getpid()}"
    up = command("up", "--id", cluster_id, "--pods", "1", "--detach")
    try:
        assert up.returncode == 0, up.stderr
        assert f"/run/kubeproxy-lab/{cluster_id}/kubeconfig" in up.stdout
        assert f"{cluster_id}: running" in command("status").stdout
        again = command("up", "--id", cluster_id)
        assert again.returncode == 1
        assert "running already" in again.stderr
    finally:
        down = command("down", "--id", cluster_id)
    assert down.returncode == 0
    assert names(f"kd-{cluster_id}-") == []
    assert cluster_id not in command("status").stdout
    assert "nothing to do" in command("down", "--id", cluster_id).stdout
    assert command("down", "--id", "Not/An/Id").returncode == 1
