"""Checks of the proxy's Node and configuration file."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final

from kubeproxy.ask.finding import Diagnosis, Severity
from kubeproxy.ask.why import WIDEN_CLUSTER_CIDR, unmasqueraded
from kubeproxy.model.addresses import Family, network_text, parse_networks, unpack, within
from kubeproxy.model.objects import Node
from kubeproxy.model.world import listed_addresses, pod_cidrs, used_pod_networks

_HOSTS_COUNT: Final = (
    "other hosts of that network count as pods: their connections to cluster IPs are not masqueraded, and "
    "connections to endpoints on other nodes time out"
)
_WHY_NAME: Final = (
    "the proxy does not recognise the endpoints of this node: local traffic policies find no endpoint, and zones "
    "and pod networks are another node's or missing"
)


def registered(node: Node | None, name: str, host: str, *, waits: bool = False) -> Iterator[Diagnosis]:
    """Check whether a Node of this name exists. `host` is this machine's hostname. `waits` means that the proxy has not
    written rules yet."""
    if node is None:
        called = f"; this host is called {host}" if host != name else ""
        yield Diagnosis(
            severity=Severity.BROKEN,
            about="node",
            what=f"there is no Node {name}",
            why="the proxy waits for the Node and has written nothing; any rules from before the proxy's start remain"
            if waits
            else f"{_WHY_NAME}; NodePorts answer on all addresses if `primary` is configured",
            fix=f"set hostnameOverride to the name of this node as `kubectl get nodes -o wide` has it{called}",
        )


def deleted(name: str) -> Diagnosis:
    """Return the finding for a Node that was deleted while its proxy runs."""
    return Diagnosis(
        severity=Severity.DEGRADED,
        about="node",
        what=f"Node {name} was deleted",
        why="the proxy uses the last state of the Node (addresses, zone, podCIDRs); the cluster deletes this node's "
        "pods, and load balancers stop using it",
        fix="if this machine is to stay a node, restart its kubelet, which registers the Node again; else stop "
        "kube-proxy, and remove its rules with `kube-proxy --cleanup`",
    )


def elsewhere(node: Node | None, local: Collection[bytes]) -> str:
    """Return the reason why this machine, which has the packed addresses `local`, is not the given Node; '' if it may
    be the Node."""
    listed = listed_addresses(node) if node is not None else ()
    internal = [address for entry, address in listed if entry.type == "InternalIP"]
    if node is None or not internal or any(address in local for address in internal):
        return ""
    shown = ", ".join(map(unpack, internal))
    return f"this machine is not Node {node.metadata.name}: it has none of the Node's addresses {shown}"


def addressed(node: Node, local: Collection[bytes]) -> Iterator[Diagnosis]:
    """Check whether the Node's addresses are among `local`, the packed addresses of this machine."""
    name = node.metadata.name
    listed = listed_addresses(node)
    internal, external = ([one for entry, one in listed if entry.type == kind] for kind in ("InternalIP", "ExternalIP"))
    if not internal and not external:
        what = f"Node {name} has no InternalIP and no ExternalIP"
        why = "NodePorts cannot be limited to the Node's addresses, and answer on all addresses"
        fix = "status.addresses comes from the kubelet (--node-ip) or the cloud controller: look at their logs"
        yield Diagnosis(Severity.DEGRADED, "node", what, why, fix)
    elif internal and not any(address in local for address in internal):
        shown = ", ".join(map(unpack, internal))
        yield Diagnosis(
            severity=Severity.BROKEN,
            about="node",
            what=f"Node {name} has the addresses {shown}, and this machine has none of these addresses",
            why=f"hostnameOverride names another node, or the Node's addresses are old. {_WHY_NAME}",
            fix="set hostnameOverride to the name of this node as `kubectl get nodes -o wide` has it; if it is right, "
            "let the kubelet register its address again (--node-ip)",
        )


def networked(
    node: Node, local_mode: str, cluster_cidrs: Sequence[str] = (), own: Collection[bytes] = ()
) -> Iterator[Diagnosis]:
    """If pods are recognised by networks, check whether the Node has podCIDRs, and whether clusterCIDR contains the
    podCIDRs in which the node has an address (`own`)."""
    if local_mode == "NodeCIDR" and not pod_cidrs(node):
        what = f"Node {node.metadata.name} has no podCIDRs, and detectLocalMode is NodeCIDR"
        why = "connections of pods cannot be distinguished from others, so no connection to a cluster IP is masqueraded"
        fix = "let the controller manager allocate podCIDRs (--allocate-node-cidrs), or use another detectLocalMode"
        yield Diagnosis(Severity.DEGRADED, "node", what, why, fix)
    for family in Family if local_mode == "ClusterCIDR" else ():
        known = parse_networks(cluster_cidrs, family)
        used = used_pod_networks(node, family, own)
        missing = [network_text(one) for one in used if known and not all(within(each, known) for each in one)]
        if missing:
            what = f"clusterCIDR {','.join(cluster_cidrs)} does not contain podCIDRs of this Node: {', '.join(missing)}"
            why = "pods there count as outside clients: their connections to cluster IPs are masqueraded, and "
            why += "externalTrafficPolicy Local applies to them"
            yield Diagnosis(Severity.BROKEN, "node", what, why, WIDEN_CLUSTER_CIDR)
        hosts = [one for _, one in listed_addresses(node) if len(one) == family.address_size and within(one, known)]
        if hosts:
            what = f"clusterCIDR {','.join(cluster_cidrs)} contains the Node's own address {unpack(hosts[0])}"
            fix = "if such hosts use cluster IPs: " + unmasqueraded(local_mode, family, unpack(hosts[0]))[1]
            yield Diagnosis(Severity.NOTE, "node", what, _HOSTS_COUNT, fix)


def configured(path: str, mistakes: str, difference: Sequence[str]) -> Iterator[Diagnosis]:
    """Check the configuration file; `mistakes` is its error ('' for none), and `difference` its differences from the
    running configuration."""
    if mistakes:
        what = f"the configuration file cannot be used: {mistakes}"
        why = "the proxy keeps its present configuration; after its end it cannot start with this file"
        fix = (
            f"correct {path}; `kube-proxy plan --config FILE` checks a file, and prints the changes that the file "
            "causes"
        )
        yield Diagnosis(Severity.DEGRADED, "configuration", what, why, fix)
    elif difference:
        what = f"{path} differs from what runs: {'; '.join(difference)}"
        why = "the proxy restarts when it notices a change of the file; it has not noticed this change so far"
        fix = "restart the proxy; `kube-proxy plan --config FILE` prints the changes that the file causes"
        yield Diagnosis(Severity.DEGRADED, "configuration", what, why, fix)
