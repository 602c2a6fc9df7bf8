"""The table of nftables mode under test: how plans get into it, what it holds, and what others do to it.

`nft` is asked for the contents, so that the reader under test is not its own witness.
"""

import json
import re
import subprocess
import time

from kubeproxy.backends.mode import Depth
from kubeproxy.backends.nftables.layout import VERDICT_MAPS, Layout
from kubeproxy.kernel import nfnetlink, nft
from kubeproxy.model.addresses import Family
from kubeproxy.model.compile import compile_service
from kubeproxy.model.objects import ClientIPConfig, EndpointPort, ServicePort, SessionAffinityConfig
from support.cluster_objects import HERE, endpoint, parsed, service, world

V4, V6 = Family.IPV4, Family.IPV6
WORLD = world(families=[V4])


# -- the table as nft sees it --------------------------------------------------------------------------------------


def listing(family=V4, *options):
    ip = "ip" if family is V4 else "ip6"
    command = ["nft", *options, "list", "table", ip, "kube-proxy"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def contents(family=V4):
    """Set name to its elements, as JSON texts.

    Read again while an element is repeated: then the kernel is resizing a hash table, and misses as many others.
    """
    deadline = time.monotonic() + 20
    while True:
        found = {}
        for entry in json.loads(listing(family, "-j"))["nftables"]:
            for kind in ("set", "map"):
                if kind in entry:
                    found[entry[kind]["name"]] = [json.dumps(element) for element in entry[kind].get("elem", ())]
        distinct = {name: set(elements) for name, elements in found.items()}
        if all(len(distinct[name]) == len(elements) for name, elements in found.items()):
            return distinct
        assert time.monotonic() < deadline, "nft repeats elements"
        time.sleep(0.01)


def readable(name, family=V4):
    """The elements of a set or map of ours as nft writes them: 'a . b', or 'a . b : c'."""

    def words(value):
        if isinstance(value, dict) and "goto" in value:
            return f"goto {value['goto']['target']}"
        return " . ".join(map(str, value["concat"])) if isinstance(value, dict) else str(value)

    found = map(json.loads, elements(name, family))
    return {" : ".join(map(words, e)) if isinstance(e, list) else words(e) for e in found}


def client_sets(family=V4):
    return {name for name in contents(family) if re.search(r"affinity-\d+$", name)}


def verdicts(family=V4):
    return sum(count(name, family) for name in VERDICT_MAPS)


def without_slots(found):
    """The same with endpoints in no order: their slots depend on history, which slots there are does not."""
    result = {}
    for name, elements in found.items():
        if not name.endswith("endpoints") or name == "hairpin-endpoints":
            result[name] = elements
            continue
        pools = {}
        for key, value in map(json.loads, elements):
            *frontend, slot = key["concat"]
            slots, destinations = pools.setdefault(json.dumps(frontend), (set(), []))
            slots.add(slot)
            destinations.append(json.dumps(value))
        result[name] = {frontend: (slots, sorted(found)) for frontend, (slots, found) in pools.items()}
    return {name: elements for name, elements in result.items() if not re.search(r"affinity-\d+$", name)}


def chains(family=V4):
    """Chain name to its rules, as text."""
    found = {}
    for name, body in re.findall(r"^\tchain (\S+) \{\n(.*?)^\t\}", listing(family), re.MULTILINE | re.DOTALL):
        found[name] = [line.strip() for line in body.splitlines()]
    return found


def elements(name, family=V4):
    return contents(family).get(name, set())


def count(name, family=V4):
    return len(elements(name, family))


# -- plans and backends --------------------------------------------------------------------------------------------

EVERYTHING = {
    "ports": [ServicePort(port=80, node_port=30080), ServicePort(port=53, name="dns", protocol="UDP")],
    "external_ips": ["203.0.113.1"],
    "ingress": ["198.51.100.1"],
    "load_balancer_source_ranges": ["172.16.0.0/24", "192.0.2.0/24"],
    "external_traffic_policy": "Local",
    "session_affinity": "ClientIP",
}


def plans_of(name, number, endpoints=3, globals_=WORLD, ports=None, local=HERE, **spec):
    (family,) = globals_.families
    cluster, pod = ("10.96.{}.{}", "10.244.{}.{}") if family is V4 else ("fd00:96::{:x}{:02x}", "fd00:244::{:x}{:02x}")
    ports = ports or [ServicePort(port=80)]
    found = [endpoint(pod.format(number >> 8, n), local) for n in range(1, endpoints + 1)]
    slice_ports = [EndpointPort(port=8000 + p.port, name=p.name, protocol=p.protocol) for p in ports]
    subject = service(name, cluster.format(number >> 8, number & 255), ports=ports, **spec)
    return compile_service(subject, [parsed(*found, family=family.label, ports=slice_ports)], globals_).plans


def cluster(*names, **more):
    return {("default", name): plans_of(name, number, **more) for number, name in enumerate(names, 1)}


def sticky(name, number, endpoints, seconds=30, **more):
    config = SessionAffinityConfig(ClientIPConfig(seconds))
    return plans_of(name, number, endpoints, session_affinity="ClientIP", session_affinity_config=config, **more)


def resync(backend, plans):
    return sum(backend.resync(plans))


def sync(backend, *changes):
    return sum(backend.sync(changes))


def is_clean(backend, plans):
    """Nothing was changed by others, and another look changes nothing."""
    assert not is_touched(backend)
    assert difference(backend) is None
    table = nfnetlink.table(backend.family, "kube-proxy")
    assert resync(backend, plans) == 0
    assert nfnetlink.table(backend.family, "kube-proxy") == table
    assert difference(backend) is None


def is_touched(backend):
    """Whether the backend has anything to look for: another program's commit."""
    return generation() != backend._generation


def difference(backend):
    """What an inspection says that has to read everything, as another program committed something."""
    disturb("add table inet elsewhere", "delete table inet elsewhere")
    return backend.inspect(Depth.THOROUGH)


def generation():
    link = nfnetlink.Transactions.open()
    try:
        return link.generation()
    finally:
        link.close()


# -- what others do ------------------------------------------------------------------------------------------------


def disturb(*lines):
    nft.run("\n".join(lines) + "\n")


DISTURBANCES = {
    "missing endpoint": ["delete element ip kube-proxy endpoints { 10.96.0.1 . tcp . 80 . 1 }"],
    "missing service": ["delete element ip kube-proxy cluster-services { 10.96.0.1 . tcp . 80 }"],
    "missing class": ["delete element ip kube-proxy endpoints-4 { 10.96.0.1 . tcp . 80 }"],
    "missing verdict": ["delete element ip kube-proxy affinity-services { 10.96.0.4 . tcp . 80 }"],
    "missing cluster IP": ["delete element ip kube-proxy cluster-ips { 10.96.0.1 }"],
    "missing hairpin": ["delete element ip kube-proxy hairpin-endpoints { 10.244.0.1 . 10.244.0.1 }"],
    "missing node address": ["delete element ip kube-proxy nodeport-ips { 192.0.2.1 }"],
    "missing range": [
        "delete element ip kube-proxy firewall-allow { 198.51.100.1 . tcp . 80 . 172.16.0.0-172.16.0.255 }"
    ],
    "stray endpoint": ["add element ip kube-proxy endpoints { 10.96.0.1 . tcp . 80 . 3 : 10.9.9.9 . 99 }"],
    "stray service": ["add element ip kube-proxy cluster-services { 10.96.9.9 . tcp . 80 }"],
    "stray class": ["add element ip kube-proxy endpoints-1 { 10.96.0.1 . tcp . 80 }"],
    "stray treatment": ["add element ip kube-proxy external-services { 10.96.0.1 . tcp . 80 }"],
    "stray verdict": ["add element ip kube-proxy affinity-services { 10.96.9.9 . tcp . 80 : goto cluster-2-30s }"],
    "stray cluster IP": ["add element ip kube-proxy cluster-ips { 10.96.9.9 }"],
    "stray refusal": ["add element ip kube-proxy unserved-services { 10.96.0.1 . tcp . 80 }"],
    "stray node address": ["add element ip kube-proxy nodeport-ips { 192.0.2.99 }"],
    "stray range": ["add element ip kube-proxy firewall-allow { 198.51.100.1 . tcp . 80 . 10.0.0.0-10.255.255.255 }"],
    "stray service CIDR": ["add element ip kube-proxy service-cidrs { 10.1.0.0/16 }"],
    "changed endpoint": [
        "delete element ip kube-proxy endpoints { 10.96.0.1 . tcp . 80 . 1 }",
        "add element ip kube-proxy endpoints { 10.96.0.1 . tcp . 80 . 1 : 10.9.9.9 . 99 }",
    ],
    "changed verdict": [
        "delete element ip kube-proxy affinity-services { 10.96.0.4 . tcp . 80 }",
        "add element ip kube-proxy affinity-services { 10.96.0.4 . tcp . 80 : goto pick-2-30s }",
    ],
    "another class": [
        "delete element ip kube-proxy endpoints-4 { 10.96.0.1 . tcp . 80 }",
        "add element ip kube-proxy endpoints-16 { 10.96.0.1 . tcp . 80 }",
    ],
    "another treatment": [
        "delete element ip kube-proxy external-services { 198.51.100.1 . tcp . 80 }",
        "add element ip kube-proxy policy-local-services { 198.51.100.1 . tcp . 80 }",
    ],
    "wider range": [
        "delete element ip kube-proxy firewall-allow { 198.51.100.1 . tcp . 80 . 172.16.0.0-172.16.0.255 }",
        "add element ip kube-proxy firewall-allow { 198.51.100.1 . tcp . 80 . 172.16.0.0-172.16.255.255 }",
    ],
    "narrower range": [
        "delete element ip kube-proxy firewall-allow { 198.51.100.1 . tcp . 80 . 172.16.0.0-172.16.0.255 }",
        "add element ip kube-proxy firewall-allow { 198.51.100.1 . tcp . 80 . 172.16.0.1-172.16.0.2 }",
    ],
    "everything emptied": [f"flush {shape.keyword} ip kube-proxy {name}" for name, shape in Layout(V4).shapes.items()],
}


def disturbed(start):
    """A table with some of everything in it, and the plans that it was made of."""
    more = {"ingress": ["198.51.100.1"], "load_balancer_source_ranges": ["172.16.0.0/24"]}
    plans = {**cluster("a", **more), ("default", "b"): plans_of("b", 2), ("default", "c"): plans_of("c", 3, 0)}
    plans["default", "d"] = sticky("d", 4, 2)
    backend = start()
    resync(backend, plans)
    return backend, plans
