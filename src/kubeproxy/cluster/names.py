"""Resolves names in a question through the API server: pod/a, svc/b:80, node/c, NAMESPACE/NAME, or an address."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, TypeVar

from msgspec.structs import replace

from kubeproxy.ask.finding import end_of
from kubeproxy.ask.question import NODE, no_such_port, source_of
from kubeproxy.ask.why import Why
from kubeproxy.cluster.kubectl import Items, Kubectl, NamedResource
from kubeproxy.cluster.proxies import ListedPod
from kubeproxy.errors import NoAnswerError, QuestionError
from kubeproxy.model.addresses import family_of, pack, parse_networks, unpack, within
from kubeproxy.model.objects import ApiStruct, EndpointPort, Node, Service, SliceEndpoint
from kubeproxy.model.port_ranges import FIELD
from kubeproxy.model.world import pod_cidrs

T = TypeVar("T")

_KINDS: Final = {
    **dict.fromkeys(("pod", "pods", "po"), "pod"),
    **dict.fromkeys(("svc", "service", "services"), "service"),
    **dict.fromkeys(("node", "nodes", "no"), NODE),
}
_NAMED: Final = re.compile(
    rf"(?:(?P<kind>{'|'.join(_KINDS)})/)?(?:(?P<namespace>[a-z0-9][-a-z0-9]*)/)?(?P<name>[a-z0-9][-a-z0-9.]*)"
    r"(?::(?P<port>[a-zA-Z0-9][-a-zA-Z0-9]*(?:/(?:tcp|udp|sctp))?))?",
    re.IGNORECASE,
)
"""No part of a name starts with a hyphen, because a command must not read a name as an option."""
_ADDRESS: Final = re.compile(r"(?P<address>\[[0-9a-fA-F:.]+\]|[0-9a-fA-F:.]+?)(?P<end>:[0-9]+(?:/[a-zA-Z]+)?)?")


_SHOWN: Final = 3  # the maximum number of objects in other namespaces that an error lists


class _TargetRef(ApiStruct, frozen=True):
    name: str = ""
    namespace: str = ""


class _Endpoint(SliceEndpoint, frozen=True):
    target_ref: _TargetRef = _TargetRef()


class _Slice(ApiStruct, frozen=True):
    endpoints: list[_Endpoint] | None = None
    ports: list[EndpointPort] | None = None


class End(NamedTuple):
    """One end of a connection, in the form that kube-proxy's commands accept: addresses, or the text of a Service.

    `node` is the node of this end ('' if unknown or outside of the cluster); `port` is the text after the address, with
    the colon."""

    addresses: tuple[str, ...]
    service: str = ""
    port: str = ""
    node: str = ""


class Names:
    """Resolves names, and remembers the names of addresses, such as {"10.244.0.7": "default/a"}."""

    def __init__(self, kubectl: Kubectl, nodes: Sequence[Node], namespace: str) -> None:
        self._kubectl = kubectl
        self._nodes = {one.metadata.name: one for one in nodes}
        self._namespace = namespace
        self.known: dict[str, str] = {}
        self.other_family = ""
        """The destination in the address family that the question omits; '' if there is only one family."""

    def client(self, text: str) -> End:
        """Resolve the client of a connection. Raises QuestionError, NoAnswerError."""
        if text == NODE:
            return End((NODE,))
        if _address(text):
            packed, number = source_of(text)
            assert packed is not None  # noqa: S101 - `_address` has parsed it
            return End((unpack(packed),), port=f":{number}" if number else "", node=self._node_of(packed))
        kind, namespace, name, port = _parts(text, "pod")
        if port:
            raise QuestionError(f"{text}: a client's port is only possible with the client's address")
        if kind == "service":
            raise QuestionError(f"{text}: a Service is no client; expected pod/NAME, node/NAME or an address")
        if kind == NODE:
            self._node(name)
            return End((NODE,), node=name)
        pod = self._pod(namespace, name)
        # The node picks the source address of packets of a pod with hostNetwork.
        addresses = (NODE,) if pod.spec.host_network else pod.addresses
        return End(addresses, node=pod.spec.node_name)

    def target(self, text: str) -> End:
        """Resolve the destination of a connection. Raises QuestionError, NoAnswerError."""
        if found := _address(text):
            return End(found[:1], port=found[1], node=self._node_with(found[0]))
        kind, namespace, name, port = _parts(text, "service")
        if kind == NODE:
            return End(tuple(_node_addresses(self._node(name))), port=port, node=name)
        if kind == "pod":
            return End(self._pod(namespace, name).addresses, port=port)
        return self._service(namespace, name, port)

    def service(self, text: str) -> str:
        """Return a Service as NAMESPACE/NAME; with a given namespace the Service need not exist. Raises QuestionError,
        NoAnswerError."""
        kind, namespace, name, port = _parts(text, "service")
        if kind != "service" or port:
            raise QuestionError(f"{text}: expected svc/NAME or NAMESPACE/NAME")
        if not (namespace := namespace or self._namespace):
            own = self._get(Service, "services", "", name).metadata.namespace or "default"
            self._endpoints(own, name)
            return f"{own}/{name}"
        self._endpoints(namespace, name)
        return f"{namespace}/{name}"

    def has_family(self, service: str, place: str) -> bool:
        """Return whether a Service NAMESPACE/NAME has a cluster IP in the address family of a destination, such as
        [fd00::1]:30080. Return False if the Service cannot be read."""
        namespace, _, name = service.partition("/")
        with suppress(NoAnswerError, QuestionError):  # the name comes from a node's answer, and may be invalid
            spec = self._kubectl.get(Service, "services", name, namespace=namespace).spec
            return any((":" in one) is place.startswith("[") for one in spec.cluster_ips or [spec.cluster_ip or ""])
        return False

    def _get(self, kind: type[T], resource: str, namespace: str, name: str) -> T:
        """Return an object. Raises NoAnswerError. If the object is missing, the error lists the namespaces that have an
        object of this name."""
        where = namespace or self._namespace
        try:
            return self._kubectl.get(kind, resource, name, namespace=where)
        except NoAnswerError as error:
            if "(NotFound)" not in str(error):
                raise
            searched = f" in namespace {where}" if where else " in the namespace of the kubeconfig's context (see -n)"
            if ': namespaces "' in str(error):  # the namespace itself does not exist
                searched = ""
            raise NoAnswerError(f"{error}{searched}{self._in_other_namespaces(resource, name)}") from None

    def _in_other_namespaces(self, resource: str, name: str) -> str:
        options = {"all_namespaces": "true", "field_selector": f"metadata.name={name}"}
        with suppress(NoAnswerError):  # the user may have no right to list all namespaces
            found = self._kubectl.get(Items[NamedResource], resource, **options).items
            if found:
                return "; there is " + ", ".join(f"{one.metadata.namespace}/{name}" for one in found[:_SHOWN])
        return ""

    def _pod(self, namespace: str, name: str) -> ListedPod:
        pod = self._get(ListedPod, "pods", namespace, name)
        if not pod.spec.node_name or not pod.addresses or pod.status.phase in {"Succeeded", "Failed"}:
            raise QuestionError(f"pod {pod.key} has no node and address: it is {pod.status.phase or 'not started'}")
        if not pod.spec.host_network:
            self.known |= dict.fromkeys(pod.addresses, pod.key)
        return pod

    def _node(self, name: str) -> Node:
        if name not in self._nodes:
            raise QuestionError(f"node {name}: there is no such Node, or Nodes could not be listed")
        self.known |= dict.fromkeys(_node_addresses(self._nodes[name]), f"node {name}")
        return self._nodes[name]

    def _service(self, namespace: str, name: str, port: str) -> End:
        service = self._get(Service, "services", namespace, name)
        own = service.metadata.namespace or "default"
        self._endpoints(own, name)
        ports = service.spec.ports or []
        if not port and len(ports) == 1:
            port = f":{ports[0].port}/{(ports[0].protocol or 'TCP').lower()}"
        wanted, _, protocol = port[1:].partition("/")
        known = [(one.name or "", one.protocol or "TCP", one.port) for one in ports]
        fits = any(label == wanted and protocol.upper() in {"", kind} for label, kind, _ in known)
        if known and not wanted.isdigit() and not (wanted and fits):
            texts = [f"{label} {number}/{kind}".strip() for label, kind, number in known]
            raise no_such_port(f"{own}/{name}", wanted, protocol.upper(), texts)
        addresses = service.spec.cluster_ips or [service.spec.cluster_ip or ""]
        numbers = [f":{number}/{kind.lower()}" for label, kind, number in known if label and wanted == label]
        return End(tuple(filter(pack, addresses)), f"{own}/{name}{port}", next(iter(numbers), port))

    def listed(self, why: Why) -> set[tuple[bytes, int]] | None:
        """Return the API server's endpoints for the Service of an answer, or None without readable EndpointSlices. An
        EndpointSlice does not list the ports of a port range, so for a range the port comes from the answer."""
        slices = self._endpoints(*why.service.split("/")) if why.service and (why.endpoints or why.missing) else []
        is_ranged = bool(slices and why.endpoints) and [one.field for one in why.steps[:1]] == [FIELD]
        in_range = [end_of(why.endpoints[0].address)[1]] if is_ranged else []
        ends = {
            (pack(address) or b"", number)
            for piece in slices
            for number in in_range or [port.port or 0 for port in piece.ports or ()]
            for one in piece.endpoints or ()
            for address in one.addresses or ()
        }
        return ends if slices else None

    def placed(self, why: Why, most: int) -> Why:
        """Return an answer that contains the node of each of its first `most` endpoints, even if the slice lacks
        nodeName; the node is '' if no pod, Node or podCIDR has the endpoint's address. Remember the names of these
        nodes' addresses."""
        ends = [
            replace(one, node=one.node or self._node_of(end_of(one.address)[0])) if one.host != why.source else one
            for one in why.endpoints[:most]
        ]
        for name in {one.node for one in ends} & self._nodes.keys():
            self.known = dict.fromkeys(_node_addresses(self._nodes[name]), f"node {name}") | self.known
        return replace(why, endpoints=(*ends, *why.endpoints[most:]))

    def _endpoints(self, namespace: str, name: str) -> list[_Slice]:
        """Return a Service's EndpointSlices ([] if they cannot be read), and remember the names of its pods."""
        label = f"kubernetes.io/service-name={name}"
        try:
            found = self._kubectl.get(Items[_Slice], "endpointslices", namespace=namespace, selector=label).items
        except NoAnswerError:
            return []
        for one in (each for piece in found for each in piece.endpoints or ()):
            if one.target_ref.name:
                pod = f"{one.target_ref.namespace or namespace}/{one.target_ref.name}"
                self.known |= dict.fromkeys(one.addresses or (), pod)
        return found

    def address_of(self, name: str, place: str) -> str:
        """Return the address of a Node in the family of a destination; '' if unknown."""
        known = _node_addresses(self._nodes[name]) if name in self._nodes else ()
        return next((one for one in known if (":" in one) is place.startswith("[")), "")

    def _node_with(self, address: str) -> str:
        for name, node in self._nodes.items():
            if pack(address) in map(pack, _node_addresses(node)):
                self.known[address] = f"node {name}"
                return name
        return ""

    def _node_of(self, address: bytes) -> str:
        """Return the name of the node to which an address belongs, or ''. An address belongs to a node if it is an
        address of the Node or of its pods, or is in its pod networks."""
        text = unpack(address)
        if owner := self._node_with(text):
            return owner
        with suppress(NoAnswerError):  # the user may have no right to list the pods of all namespaces
            options = {"field_selector": f"status.podIP={text}", "all_namespaces": "true"}
            for pod in self._kubectl.get(Items[ListedPod], "pods", **options).items:
                if pod.runs and pod.spec.node_name:
                    self.known[text] = pod.key
                    return pod.spec.node_name
        holding = (
            name
            for name, node in self._nodes.items()
            if within(address, parse_networks(pod_cidrs(node), family_of(address)))
        )
        return next(holding, "")


def question(source: End, target: End) -> tuple[str, str]:
    """Return the two arguments of `kube-proxy why`. Raises QuestionError if client and destination share no family."""
    there = target.addresses or (("",) if target.service else ())
    for one, other in ((one, other) for one in source.addresses for other in there):
        if one == NODE or not other or (":" in one) is (":" in other):
            return _place(one, source.port), target.service or _place(other, target.port)
    ours, theirs = ", ".join(source.addresses), ", ".join(target.addresses) or "without an address"
    raise QuestionError(f"client ({ours}) and destination ({theirs}) have no address family in common")


def in_other_family(source: End, target: End, asked: str) -> str:
    """Return the destination with the address family that the destination `asked` does not have; '' if client or
    destination has no address of that family."""
    is_ipv6 = not asked.startswith("[")
    is_shared = NODE in source.addresses or any((":" in one) is is_ipv6 for one in source.addresses)
    others = [one for one in target.addresses if (":" in one) is is_ipv6]
    return _place(others[0], target.port) if is_shared and others and asked else ""


def _place(address: str, port: str) -> str:
    return f"[{address}]{port}" if port and ":" in address else f"{address}{port}"


def named(line: str, known: Mapping[str, str]) -> str:
    """Insert the names of pods and nodes after their addresses in a line of an answer, except in quoted rules and
    commands, which a user copies."""
    if not known:
        return line
    ones = "|".join(map(re.escape, sorted(known, key=len, reverse=True)))
    place = rf"\"[^\"]*\"|`[^`]*`|(?<![\w.:/])\[?({ones})\]?(:\d+(/\w+)?)?(?!\w|:\w|\.\d|/\w)"

    def with_name(found: re.Match[str]) -> str:
        is_longer = bool(found[1] and found[2]) and ":" in found[1] and "]" not in found[0]  # another IPv6 address
        return f"{found[0]} ({known[found[1]]})" if found[1] and not is_longer else found[0]

    return re.sub(place, with_name, line)


def _address(text: str) -> tuple[str, str] | None:
    """Split a text into an address and the rest, such as ':53/udp' or ''; return None if the text does not start with
    an address."""
    match = None if pack(text) else _ADDRESS.fullmatch(text)
    address, end = (match["address"].strip("[]"), match["end"] or "") if match else (text, "")
    return (address, end) if pack(address) else None


def _parts(text: str, usual: str) -> tuple[str, str, str, str]:
    """Split the name of an end into kind (`usual` if missing), namespace ('' if missing), name, and port with the
    colon."""
    match = _NAMED.fullmatch(text)
    if match is None:
        raise QuestionError(
            f"{text[:300]!r} is no address and no name; expected pod/NAME, svc/NAME:PORT, node/NAME, NAMESPACE/NAME "
            "or an address"
        )
    kind = _KINDS[match["kind"].lower()] if match["kind"] else usual
    port = f":{match['port']}" if match["port"] else ""
    return kind, match["namespace"] or "", match["name"], port


def _node_addresses(node: Node) -> list[str]:
    addresses = node.status.addresses if node.status is not None else None
    return [one.address for one in addresses or () if one.type == "InternalIP"]
