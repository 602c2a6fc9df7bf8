"""Finds the nodes of the cluster, and the container of kube-proxy on each node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from msgspec import field

from kubeproxy.cluster.kubectl import Container, Items, Kubectl
from kubeproxy.errors import NoAnswerError, QuestionError
from kubeproxy.model.objects import ApiStruct, Node

NAMESPACE: Final = "kube-system"
LABEL: Final = "k8s-app"
"""The label of kube-proxy's pods in this project's chart and kustomization, and in kubeadm. The label's value contains
KUBE_PROXY."""
KUBE_PROXY: Final = "kube-proxy"
"""The name of kube-proxy's container, and the value of LABEL with kubeadm."""


class _Meta(ApiStruct, frozen=True):
    name: str
    namespace: str
    labels: Mapping[str, str] = {}
    creation_timestamp: str = ""
    deletion_timestamp: str = ""


class _Container(ApiStruct, frozen=True):
    name: str


class _Spec(ApiStruct, frozen=True):
    containers: list[_Container]
    node_name: str = ""
    host_network: bool = False


class _IP(ApiStruct, frozen=True):
    ip: str


class _Status(ApiStruct, frozen=True):
    phase: str = ""
    pod_ips: list[_IP] = field(default_factory=list, name="podIPs")


class ListedPod(ApiStruct, frozen=True):
    """A core/v1 Pod, with only the fields that this package reads."""

    metadata: _Meta
    spec: _Spec
    status: _Status = _Status()

    @property
    def key(self) -> str:
        """NAMESPACE/NAME."""
        return f"{self.metadata.namespace}/{self.metadata.name}"

    @property
    def addresses(self) -> tuple[str, ...]:
        """The pod's addresses, of all families."""
        return tuple(one.ip for one in self.status.pod_ips)

    @property
    def runs(self) -> bool:
        """Whether the pod is running and not being deleted."""
        return self.status.phase == "Running" and not self.metadata.deletion_timestamp


class ProxyPlace(NamedTuple):
    """A node with the container of its kube-proxy, or the reason why there is none. On this node, `arguments` replace
    the question's arguments, and the command gets the further `options`."""

    node: str
    container: Container | None = None
    problem: str = ""
    arguments: Sequence[str] = ()
    options: Sequence[str] = ()


class Survey(NamedTuple):
    """All nodes by name; the Node objects, if they could be listed; the reason why nodes may be missing, else ''."""

    places: Mapping[str, ProxyPlace]
    nodes: Sequence[Node]
    problem: str

    def of(self, names: Sequence[str]) -> list[ProxyPlace]:
        """Return the nodes with these names; all nodes if `names` is empty. Raises QuestionError for unknown names."""
        for name in names:
            if name not in self.places:
                raise QuestionError(f"node {name}: there is no such Node; `kubectl get nodes` lists them")
        return [self.places[name] for name in dict.fromkeys(names or self.places)]

    def any_of(self, names: Iterable[str]) -> list[ProxyPlace]:
        """Return the nodes with these names, including unknown nodes."""
        return [self.places.get(one) or ProxyPlace(one, problem="no kube-proxy was found there") for one in names]


def survey(kubectl: Kubectl, namespace: str, selector: str) -> Survey:
    """Find the kube-proxy of each node. Raises NoAnswerError if pods cannot be listed."""
    pods = kubectl.get(Items[ListedPod], "pods", namespace=namespace, selector=selector or LABEL)
    listed: list[Node] = []
    problem = ""
    try:
        listed = kubectl.get(Items[Node], "nodes").items
    except NoAnswerError as error:
        problem = f"nodes could not be listed, so nodes without a kube-proxy are unknown: {error}"
    found: dict[str, ListedPod] = {}
    for pod in sorted(pods.items, key=_preference):
        if _container(pod, selector) and pod.spec.node_name:
            found[pod.spec.node_name] = pod
    if not found:
        raise NoAnswerError(f"no kube-proxy in namespace {namespace}: see --proxy-namespace and --proxy-selector")
    names = sorted({*found, *(node.metadata.name for node in listed)})
    return Survey({name: _place(name, found.get(name), namespace, selector) for name in names}, listed, problem)


def _preference(pod: ListedPod) -> tuple[bool, bool, str]:
    """Return a sort key for the pods of a node; the pod with the highest key is queried. A node may have two pods
    during a roll-out."""
    return pod.runs, pod.metadata.labels.get(LABEL) != KUBE_PROXY, pod.metadata.creation_timestamp


def _container(pod: ListedPod, selector: str) -> str:
    names = [one.name for one in pod.spec.containers]
    if KUBE_PROXY in names and (selector or KUBE_PROXY in pod.metadata.labels.get(LABEL, "")):
        return KUBE_PROXY
    return names[0] if selector and names else ""


def _place(node: str, pod: ListedPod | None, namespace: str, selector: str) -> ProxyPlace:
    if pod is None:
        return ProxyPlace(node, problem=f"no pod of kube-proxy in namespace {namespace}")
    container = Container(pod.metadata.namespace, pod.metadata.name, _container(pod, selector))
    if pod.runs:
        return ProxyPlace(node, container)
    state = "being deleted" if pod.metadata.deletion_timestamp else pod.status.phase or "in no phase"
    return ProxyPlace(node, problem=f"pod {pod.key} is {state}")
