"""Acts 1 to 5: the whoami Service with a cluster IP, as NodePort and LoadBalancer, with affinity, with Local policy."""

from __future__ import annotations

import asyncio
import functools
import json
from time import monotonic

from lab.controllers.loadbalancer import ingress_of
from lab.demo.asking import Tally
from lab.demo.report import Cells
from lab.demo.stage import IN_TIME, LABELS, NAME, ORIGINS, PORT, Front, Stage, names_of, seen_as
from lab.netns import run_in_async
from lab.objects import service
from lab.probes import NoAnswer, http_get
from lab.topology import NODE_A, OUTSIDE_IP, SECOND_OUTSIDE_IP

CLUSTER_IPS = ("10.96.0.28", "fd00:10:96::28")
NODE_PORT = 31647
LOAD_BALANCER_IP = "203.0.113.10"
PORTS = [
    {"name": proto.lower(), "protocol": proto, "port": PORT, "targetPort": PORT, "nodePort": NODE_PORT}
    for proto in ("TCP", "UDP")
]

CLUSTER_FRONTS = [Front(ip, PORT) for ip in CLUSTER_IPS]
NODE_FRONTS = [Front(ip, NODE_PORT) for ip in NODE_A.addresses]
BY_NODE = dict.fromkeys(ORIGINS, "the node")


def balancer_fronts(stage: Stage) -> list[Front]:
    """The load balancer's addresses."""
    return [Front(ip, PORT) for ip in ingress_of(stage.cluster.get("services", NAME))]


async def cluster_ip(stage: Stage) -> None:
    """Create a Service."""
    stage.report.act(
        "ClusterIP: one address for three pods",
        "Pods are created and deleted; the Service's address stays. kube-proxy makes the kernel send every new "
        "connection to one of the pods at random. Pods connect with their own address; for all other clients the "
        "node's address replaces the client's, so that answers return through the node. 60 connections each:",
    )
    ports = [{k: v for k, v in p.items() if k != "nodePort"} for p in PORTS]
    wanted = service(
        NAME, LABELS, ports, clusterIP=CLUSTER_IPS[0], clusterIPs=list(CLUSTER_IPS), ipFamilyPolicy="RequireDualStack"
    )
    took = await stage.timed("a Service is created", lambda: stage.cluster.create(wanted), CLUSTER_FRONTS[0])
    await stage.spread("ClusterIP", CLUSTER_FRONTS, BY_NODE | {"pod": "the client"})
    stage.report.fact(f"From the creation of the Service to the first answer: {took}")


async def node_port(stage: Stage) -> None:
    """Change the Service's type to NodePort."""
    stage.report.act(
        "NodePort: the same pods at a port of every node",
        f"type: NodePort, nodePort: {NODE_PORT}. Clients outside need only a node's address.",
    )
    change = functools.partial(stage.service, {"type": "NodePort", "ports": PORTS})
    took = await stage.timed("a Service becomes a NodePort", change, NODE_FRONTS[0])
    await stage.spread("NodePort", NODE_FRONTS, BY_NODE)
    stage.report.fact(f"From the change of the Service to the first answer: {took}")


async def load_balancer(stage: Stage) -> None:
    """Change the Service's type to LoadBalancer, then restrict it to a single client."""
    stage.report.act(
        "LoadBalancer: an address for external clients",
        "type: LoadBalancer. The cloud (here the lab) gives the Service addresses and sends their traffic to "
        "a node. kube-proxy takes it from there.",
    )
    change = functools.partial(stage.service, {"type": "LoadBalancer", "loadBalancerIP": LOAD_BALANCER_IP})
    took = await stage.timed("a Service becomes a LoadBalancer", change, Front(LOAD_BALANCER_IP, PORT))
    fronts = balancer_fronts(stage)
    await stage.spread("LoadBalancer", fronts, BY_NODE)
    stage.report.fact(f"From the change of the Service to the first answer: {took}")
    await _source_ranges(stage, fronts[0])


async def _source_ranges(stage: Stage, front: Front) -> None:
    ranges = [f"{OUTSIDE_IP}/32"]
    stage.service({"loadBalancerSourceRanges": ranges})
    other = functools.partial(stage.ask, "outside", "tcp", front, 1, source=SECOND_OUTSIDE_IP)
    await stage.until_answers(_unanswered, "outside", front, 1, patience=0.1, source=SECOND_OUTSIDE_IP)
    kept_out = await other(patience=0.2)
    let_in = await stage.ask("outside", "tcp", front)
    name = f"loadBalancerSourceRanges {ranges[0]}"
    said = kept_out.failure.value if kept_out.failure else "an answer"
    out_ok = stage.hold(f"{name}, client {SECOND_OUTSIDE_IP}", kept_out.failure is NoAnswer.TIMEOUT, "no answer", said)
    said = let_in.failure.value if let_in.failure else names_of(let_in.pods)
    in_ok = stage.hold(f"{name}, client {OUTSIDE_IP}", let_in.failure is None, "answers", said)
    stage.service({"loadBalancerSourceRanges": None})
    if out_ok and in_ok:
        stage.report.fact(
            f"With loadBalancerSourceRanges: [{ranges[0]}] the client {OUTSIDE_IP} is served as before, "
            f"{SECOND_OUTSIDE_IP} gets no answer any more."
        )


def _unanswered(heard: Tally) -> bool:
    return heard.failure is not None


async def affinity(stage: Stage) -> None:
    """Check that each client reaches the same pod again."""
    stage.report.act(
        "sessionAffinity: ClientIP: a client reaches the same pod again",
        "Without affinity every connection could reach another pod. With it the kernel stores the pod of each client "
        "address for three hours, for programs that keep state about their clients. 60 connections each:",
    )
    stage.service({"sessionAffinity": "ClientIP"})
    v4, v6 = CLUSTER_FRONTS
    for front in (v4, v6):
        await stage.until_answers(lambda heard: len(heard.pods) == 1, "pod", front)
    asked: list[tuple[str, Front, str | None]] = [
        ("pod", v4, None),
        ("pod", v6, None),
        ("outside", v4, OUTSIDE_IP),
        ("outside", v4, SECOND_OUTSIDE_IP),
        ("outside", v6, None),
    ]
    rows: list[Cells] = []
    for origin, front, source in asked:
        heard = await stage.ask(origin, "tcp", front, source=source)
        said = heard.failure.value if heard.failure else names_of(heard.pods)
        who = f"{ORIGINS[origin]}, {source}" if source else ORIGINS[origin]
        ok = stage.hold(
            f"ClientIP affinity from {who} to {front}", said in {names_of({p}) for p in stage.pods}, "one pod", said
        )
        counts = [stage.report.count(p, heard.counts[p]) for p in stage.pods]
        rows.append([who, str(front), *counts, stage.report.verdict(ok)])
    stage.report.table(["from", "to", *(stage.report.pod(p) for p in stage.pods), ""], rows, "  rrr")
    stage.service({"sessionAffinity": "None"})
    every = set(stage.pods)
    free = await stage.until_answers(lambda heard: heard.pods == every, "pod", v4, 60)
    if stage.hold("sessionAffinity: None, from a pod", free, f"answers from {names_of(every)}", "the affinity stays"):
        stage.report.fact("With sessionAffinity: None all three pods answer each client.")


async def local_policy(stage: Stage) -> None:
    """Check that traffic from outside stays on the node and keeps its source address."""
    stage.report.act(
        "externalTrafficPolicy: Local: the pods see the client's address",
        "Until now the pods saw the node's address instead of that of a client outside. With the policy Local the node "
        "keeps the client's address, and therefore sends traffic only to its own pods; a health check port shows load "
        "balancers which nodes have pods.",
    )
    front = balancer_fronts(stage)[0]
    on_node = {p["metadata"]["name"] for p in await stage.refresh_pods() if p["spec"]["nodeName"] == NODE_A.name}
    rows = [await _policy_row(stage, "Cluster", front, set(stage.pods), "the node")]
    changed = stage.service({"externalTrafficPolicy": "Local"})
    await stage.until_answers(lambda heard: seen_as("outside", heard.clients) == "the client", "outside", front)
    rows.append(await _policy_row(stage, "Local", front, on_node, "the client"))
    columns: Cells = ["policy", "from", "to", *(stage.report.pod(p) for p in stage.pods), "pods see", ""]
    stage.report.table(columns, rows, "   rrr")
    port = changed["spec"]["healthCheckNodePort"]
    right = f"200 with {len(on_node)} local endpoints"
    said = await _health(stage, port, right)
    if stage.hold("health check port of a Local Service", said == right, right, said):
        stage.report.fact(f"http://{NODE_A.ip}:{port}/ answers {right}, as the health check of the load balancer.")
    stage.service({"externalTrafficPolicy": "Cluster"})
    await stage.until_answers(lambda heard: heard.pods == set(stage.pods), "outside", front, 60)


async def _policy_row(stage: Stage, policy: str, front: Front, pods: set[str], seen: str) -> Cells:
    heard = await stage.ask("outside", "tcp", front)
    saw = seen_as("outside", heard.clients)
    ok = stage.hold(
        f"externalTrafficPolicy {policy}, from outside to {front}",
        heard.failure is None and heard.pods == pods and saw == seen,
        f"answers from {names_of(pods)}, seeing {seen}",
        heard.failure.value if heard.failure else f"{names_of(heard.pods)}, seeing {saw}",
    )
    counts = [stage.report.count(p, heard.counts[p]) for p in stage.pods]
    address = ", ".join(sorted(heard.clients)) if policy == "Local" else "the node"
    return [policy, OUTSIDE_IP, str(front), *counts, address, stage.report.verdict(ok)]


async def _health(stage: Stage, port: int, right: str) -> str:
    """Return the answer of the health check port to a client outside, once it is as expected, or at the timeout."""
    deadline, said = monotonic() + IN_TIME, ""
    while said != right and monotonic() < deadline:
        try:
            status, body = await run_in_async(
                stage.cluster.namespace_of("outside"), lambda: http_get(NODE_A.ip, port, "/")
            )
            said = f"{status} with {json.loads(body).get('localEndpoints')} local endpoints"
        except (OSError, ValueError) as e:
            said = f"no answer ({e})"
            await asyncio.sleep(0.005)
    return said
