"""Compares the outcomes of all packets under the Go kube-proxy's rules and ours: `python -m prove.switch --peer PATH`,
as root.

The Go kube-proxy programs a node of the lab for Services of every kind, in nftables and in iptables mode. Then
`kube-proxy plan --from-kernel` compares its rules with ours for the same objects. Exit code 1 if a packet has another
outcome.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from lab.cluster import LabCluster
from lab.proxyprocess import ProxyError, configuration, proxy_command
from lab.topology import NODE_A, NODE_B
from prove.wayback import GO_CONFIG, LOCAL, STICKY
from support.live import Live, slice_of
from support.traffic import DUAL

Json = dict[str, Any]

MODES: Final = ("nftables", "iptables")
_LB: Final = {"type": "LoadBalancer"}
_NODEPORT: Final = {"type": "NodePort"}
_NEAR: Final = {"internalTrafficPolicy": "Local"}
OFFERS: Final[dict[str, tuple[str, Json]]] = {
    "plain": ("a1 a2 b1", {}),
    "nodeport": ("a1 b1", _NODEPORT),
    "nodeport-local": ("a1 b1", _NODEPORT | {"externalTrafficPolicy": "Local"}),
    "balanced": ("a1 b1 b2", _LB),
    "local": ("a1 b2", LOCAL),
    "local-elsewhere": ("b2", LOCAL),
    "near": ("a1 a2 b1", _NEAR),
    "near-elsewhere": ("b1", _NEAR),
    "near-nodeport": ("a1 b1", _NODEPORT | _NEAR),
    "sticky": ("a2 a3 b2", STICKY | _NODEPORT),
    "sticky-local": ("a1 b1", STICKY | LOCAL),
    "ranged": ("a4 b2", _LB | {"loadBalancerSourceRanges": ["192.168.100.1/32", "fd00:100::1/128"]}),
    "ranged-node": ("a4 b2", _LB | {"loadBalancerSourceRanges": ["192.168.100.0/24", "10.0.0.0/8"]}),
    "external": ("a1 b1", {"externalIPs": ["203.0.113.9"]}),
    "none": ("", _NODEPORT),
    "none-balanced": ("", _LB),
    "none-local": ("", LOCAL),
    "none-external": ("", {"externalIPs": ["203.0.113.10"]}),
    "draining": ("a1/draining b1/draining", {}),
    "unready": ("a1/unready b1", _NODEPORT),
}
"""Endpoints and fields of the spec by the Service's name."""


def _balanced(live: Live, ip: str, **spec: Any) -> str:
    """Create a Service with a load balancer's address, and with fields that an API server may refuse; return the
    address.
    """
    made = live.service(f"balanced-{ip.replace('.', '-')}", "a1", **_LB, loadBalancerClass="example.com/declared")
    made["spec"] |= spec
    made["status"] = {"loadBalancer": {"ingress": [{"ip": ip, "ipMode": "VIP"}]}}
    live.cluster.store.put("services", made)
    return ip


def _claimed(live: Live) -> str:
    """Create two Services with the same external IP; return it."""
    for name, endpoints in (("claim-older", "a1"), ("claim-younger", "a1 b1")):
        live.service(name, endpoints, externalIPs=["203.0.113.60"])
    return "203.0.113.60"


def _of_two_nodes(live: Live) -> str:
    """Create a Service whose endpoints have one address, on this node with one port, and on another node with another
    port; return its cluster IP.
    """
    live.service("of-two-nodes", "a1")
    port = [{"name": "tcp", "port": 3001, "protocol": "TCP"}]
    endpoint = {"addresses": [live.ips["a1"]["IPv4"]], "conditions": {"ready": True}, "nodeName": NODE_B.name}
    other = slice_of("of-two-nodes", "IPv4", [endpoint], port)
    other["metadata"] |= {"name": "of-node-b"}
    live.cluster.store.put("endpointslices", other)
    return live.front("of-two-nodes").address


class Declared(NamedTuple):
    """A difference that remains with `--strict`. `create` creates a Service that has it, and returns its address.
    `certain` are the modes in which the comparison must find it; in other modes it may.
    """

    create: Callable[[Live], str]
    certain: tuple[str, ...] = MODES


DECLARED: Final = {
    "two Services that claim one address and port": Declared(_claimed, certain=()),  # its endpoint is random
    "external and load balancer IPs that are loopback, link-local, multicast or broadcast": Declared(
        partial(_balanced, ip="169.254.169.254")
    ),
    "a load balancer with invalid source ranges": Declared(
        partial(_balanced, ip="203.0.113.50", loadBalancerSourceRanges=["10.0.0.0/99"])
    ),
    "nftables mode: masquerading of a connection of an endpoint to itself": Declared(
        _of_two_nodes, certain=("nftables",)
    ),
}
"""The differences in the outcome of a connection's first packet that remain, as docs/migrate.md names them."""
_PORTS: Final = [{"name": "tcp", "port": 80, "protocol": "TCP", "targetPort": 3000}]
_TARGETS: Final = [{"name": "tcp", "port": 3000, "protocol": "TCP"}]
_STORED: Final = ("services", "endpointslices")
_ENDPOINTS: Final = 10
_PODS: Final = 25_000


async def compared(peer: str, more: int, *, strict: bool) -> int:
    """Print the answer for each mode; return the exit code."""
    worst = 0
    async with LabCluster() as cluster:
        live = Live(cluster)
        await live.add_pods()
        for name, (endpoints, spec) in OFFERS.items():
            live.service(name, endpoints, **spec, **DUAL)
        _add(live, more)
        await live.until(lambda: all(map(live.has_addresses, OFFERS)), "addresses of load balancers")
        print(f"{len(OFFERS) + more} Services")
        for mode in MODES:
            worst = max(worst, _printed(await _compared(live, peer, mode, {}, more=more, strict=strict)))
    return worst


async def remaining(peer: str) -> int:
    """Compare with `--strict` for the Services of DECLARED; return the exit code."""
    worst = 0
    async with LabCluster() as cluster:
        live = Live(cluster)
        await live.add_pods()
        addresses = {name: declared.create(live) for name, declared in DECLARED.items()}
        print("Services that have a declared difference")
        for mode in MODES:
            answer = await _compared(live, peer, mode, {}, more=0, strict=True)
            _printed(answer)
            for contradiction in undeclared(mode, answer, addresses):
                print(f"    {contradiction}")
                worst = 1
    return worst


async def recorded(peer: str, cases: Sequence[Path]) -> int:
    """Compare with `--strict` for the objects and settings of recorded cases; return the exit code."""
    worst = 0
    async with LabCluster() as cluster:
        live = Live(cluster)
        for case in map(json.loads, map(Path.read_text, cases)):
            settings = dict(case["config"])
            block = {"masqueradeAll": settings.pop("masqueradeAll", False)}
            settings |= {"iptables": block, "nftables": block}
            objects = case["steps"][0]["objects"]
            for service in objects["services"]:
                service["spec"].pop("selector", None)  # otherwise the lab's controller writes slices too
            kept = [(name, cluster.store.put(name, each).key) for name in _STORED for each in objects[name]]
            print(f"case {case['seed']}, {settings}")
            for mode in MODES:
                worst = max(worst, _printed(await _compared(live, peer, mode, settings, more=0, strict=True)))
            for name, key in kept:
                cluster.store.remove(name, key)
    return worst


def _add(live: Live, more: int) -> None:
    """Add Services of ten endpoints of both nodes; one Service in ten has a NodePort."""
    draw = random.Random(7)
    for number in range(more):
        kind = _NODEPORT if number % 10 == 0 and number < 10_000 else {}
        live.service(f"more-{number}", None, ports=_PORTS, **kind)
        endpoints = []
        for pod in draw.sample(range(_PODS), _ENDPOINTS):
            network, host = divmod(pod, 250)
            node = NODE_B if network else NODE_A
            address = f"10.244.{network}.{host + 2}"
            endpoints.append({"addresses": [address], "conditions": {"ready": True}, "nodeName": node.name})
        live.cluster.store.put("endpointslices", slice_of(f"more-{number}", "IPv4", endpoints, _TARGETS))


async def _compared(live: Live, peer: str, mode: str, fields: Json, *, more: int, strict: bool) -> tuple[int, str]:
    """Make the Go kube-proxy program the node in a mode, and compare; return the command's exit code and output.

    `fields` are further fields of the configuration. With `strict` both programs read the same file, in which the mode
    "" means iptables.
    """
    cluster = live.cluster
    go = fields | GO_CONFIG | {"mode": "" if strict and mode == "iptables" else mode}
    file = _configured(cluster, f"go-{mode}", go)
    proxy = await cluster.launch_proxy([peer, "--config", str(file)], file)
    await proxy.wait_ready(60.0 + more / 10)
    await asyncio.sleep(2.0 + more / 500)  # The Go kube-proxy is ready before its second family is synced.
    await proxy.stop()
    ours = [file, "--strict"] if strict else [_configured(cluster, f"ours-{mode}", fields | {"mode": mode})]
    begin = time.monotonic()
    answer = await _proxy_command(
        cluster, "plan", "--from-kernel", "--kubeconfig", cluster.node_kubeconfig, "-o", "json", "--config", *ours
    )
    print(f"{mode} mode ({time.monotonic() - begin:.0f} s):")
    await cluster.exec("node", [peer, "--cleanup"], 300.0)
    return answer


def _printed(answer: tuple[int, str]) -> int:
    """Print the answer; return the command's exit code."""
    code, text = answer
    if not text.startswith("{"):
        print(text)
        return code
    for each in json.loads(text)["families"]:
        print(f"  {each['family']}: {each['classes']:,} classes of packets, {len(each['differences'])} differences")
        for group in each["differences"]:
            print(f"    {group['packet']}: {', '.join(group['now'])}; ours: {', '.join(group['then'])}")
        for rule in each["unknown"]:
            print(f"    not understood: {rule}")
    return code


def undeclared(mode: str, answer: tuple[int, str], addresses: Mapping[str, str]) -> list[str]:
    """Return the contradictions to DECLARED in an answer: differences at addresses outside of `addresses` (by the names
    of DECLARED), and missing differences.
    """
    code, text = answer
    if code not in (0, 1):
        return [f"exit code {code}"]
    packets = [group["packet"] for family in json.loads(text)["families"] for group in family["differences"]]
    seen = {packet: name for packet in packets for name, ip in addresses.items() if f"-> {ip}:" in packet}
    missing = [name for name, each in DECLARED.items() if mode in each.certain and name not in seen.values()]
    return [
        *(f"not declared: {packet}" for packet in packets if packet not in seen),
        *(f"no difference: {name}" for name in missing),
    ]


def _configured(cluster: LabCluster, name: str, fields: Json) -> Path:
    file = cluster.folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(configuration(cluster.node_kubeconfig, fields)))
    return file


async def _proxy_command(cluster: LabCluster, *words: object) -> tuple[int, str]:
    code, out, error = await cluster.exec("node", [proxy_command(), *map(str, words)], 600.0)
    return code, out or error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return the exit code: 0 if every packet has the same outcome in both modes."""
    parser = argparse.ArgumentParser(prog="python -m prove.switch", description=__doc__)
    parser.add_argument("--peer", required=True, help="path of the Go kube-proxy")
    parser.add_argument("--more", type=int, default=10, help="number of further Services of ten endpoints")
    parser.add_argument(
        "--strict", action="store_true", help="compare with `kube-proxy --strict` and the same configuration file"
    )
    parser.add_argument(
        "--cases", type=Path, nargs="+", default=(), help="compare for these recorded cases, with --strict"
    )
    given = parser.parse_args(argv)
    try:
        if given.cases:
            return asyncio.run(recorded(given.peer, given.cases))
        worst = asyncio.run(compared(given.peer, given.more, strict=given.strict))
        return max(worst, asyncio.run(remaining(given.peer))) if given.strict else worst
    except ProxyError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
