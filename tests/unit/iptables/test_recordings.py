"""What the Go kube-proxy v1.36 wrote for the same objects: the same chains, and the same rules in each.

The recordings are iptables-save's output for the states of some conformance cases. Not compared are counters, the
order of chains, and the order of Services in the chains that they share.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from fake_tables import backend, normalised, parsed

from kubeproxy import host
from kubeproxy.api.decode import decode_object
from kubeproxy.backends.iptables.backend import SHARED
from kubeproxy.config.load import load_text
from kubeproxy.model.addresses import FAMILIES, Family, pack
from kubeproxy.model.events import Replaced
from kubeproxy.model.planner import Planner
from kubeproxy.model.world import Surroundings, build

RECORDING = Path(__file__).parents[2] / "recordings" / "iptables-mode.json.gz"
CASES = json.loads(gzip.decompress(RECORDING.read_bytes()))
LOCAL = ("127.0.0.1", "192.168.100.2", "172.31.0.2", "192.168.102.1", "::1", "fd00:100::2", "fd00:102::1")
SHARED_CHAINS = frozenset(chain for _, chain in SHARED)
HIDDEN = {"services": "service.kubernetes.io/service-proxy-name", "endpointslices": "service.kubernetes.io/headless"}


def planner_of(config: dict, objects: dict) -> Planner:
    """The plans of a case's objects, as a proxy with its configuration has them."""
    node = "node-a"
    config = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "hostnameOverride": node,
        "clusterCIDR": "10.244.0.0/16,fd00:244::/32",
        **config,
    }
    settings = host.settings(load_text(json.dumps(config)))
    local = {family: [pack(a) for a in LOCAL if (":" in a) == (family is Family.IPV6)] for family in Family}
    found = {kind: [_object(kind, body) for body in bodies if _seen(kind, body)] for kind, bodies in objects.items()}
    cidrs = [cidr for each in found["servicecidrs"] for cidr in each.spec.cidrs]
    planner = Planner(build(settings, Surroundings(found["nodes"][0], cidrs, local)))
    planner.apply([Replaced(kind, bodies) for kind, bodies in found.items()])
    planner.take()
    return planner


def _seen(kind: str, body: dict) -> bool:
    return HIDDEN.get(kind) not in (body["metadata"].get("labels") or {})


def _object(kind: str, body: dict):
    decoded, rejected = decode_object(kind, json.dumps(body).encode())
    assert decoded is not None, rejected
    return decoded


@pytest.mark.parametrize("uses_nft", [True, False], ids=["nft", "legacy"])
@pytest.mark.parametrize("label", ["IPv4", "IPv6"])
@pytest.mark.parametrize("number", sorted(CASES))
def test_the_rules_are_those_of_the_go_proxy(number: str, label: str, uses_nft: bool):
    case, family = CASES[number], FAMILIES[label]
    made = None
    for step in case["steps"]:
        planner = planner_of(case["config"], step["objects"])
        plans = {n: tuple(p for p in c.plans if p.key.family is family) for n, c in planner.compiled.items()}
        if made is None:
            made = backend(planner.world, family, uses_nft=uses_nft)
            list(made.resync(plans))
        else:
            made.set_world(planner.world)
            gone = {name: () for name in made._contents.entries if name not in plans}
            list(made.sync(list((plans | gone).items())))
        expected = normalised(parsed(step["saved"][label]), family, SHARED_CHAINS)
        seen = normalised(made.tables.chains, family, SHARED_CHAINS)
        assert seen.keys() == expected.keys() | {
            p for p in seen if p[1] in ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING")
        }
        for place, rules in expected.items():
            assert seen[place] == rules, place
