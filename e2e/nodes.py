"""Starts the two nodes: containerd and a kubelet in each network namespace, and a kube-proxy."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import yaml

from e2e.binaries import CNI
from e2e.controlplane import kubeconfig, kubectl
from e2e.errors import E2EError
from e2e.layout import CLUSTER_DNS, DOMAIN, LOGS, NODES, POD_CIDRS, Node
from e2e.processes import Processes, cgroups

_CONTAINERD: Final = """version = 2
root = "{at}/root"
state = "{at}/state"
[grpc]
  address = "{at}/cd.sock"
[ttrpc]
  address = "{at}/cd.sock.ttrpc"
[plugins."io.containerd.internal.v1.opt"]
  path = "{at}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  disable_apparmor = true
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni}"
    conf_dir = "{at}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      Root = "{at}/runc"
"""


def network_configuration(node: Node, folder: Path) -> dict[str, Any]:
    """Return the node's CNI configuration: a bridge, addresses of both families, and host ports."""
    ranges = [[{"subnet": node.pods_ipv4}], [{"subnet": node.pods_ipv6}]]
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "isDefaultGateway": True,
        "hairpinMode": True,
        "ipMasq": False,
        "ipam": {"type": "host-local", "dataDir": str(folder / "ipam"), "ranges": ranges},
    }
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "0.4.0", "name": "kpe2e", "plugins": [bridge, portmap]}


def kubelet_configuration(node: Node, folder: Path) -> dict[str, Any]:
    """Return the node's KubeletConfiguration."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "failCgroupV1": False,
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{node.namespace}",
        "clusterDNS": [CLUSTER_DNS],
        "clusterDomain": DOMAIN,
        "containerRuntimeEndpoint": f"unix://{folder / 'cd.sock'}",
        "failSwapOn": False,
        "resolvConf": "/dev/null",
        "maxPods": 200,
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "volumePluginDir": str(folder / "volumeplugins"),
        "podLogsDir": str(folder / "podlogs"),
    }


def start(programs: Path, folder: Path, images: Mapping[str, Sequence[str]], processes: Processes) -> None:
    """Start both nodes, load their images, and wait until the API reports them as ready. Raises E2EError."""
    _make_cgroups()
    for node in NODES:
        at = folder / node.name
        (at / "cni").mkdir(parents=True)
        (at / "cni/10-kpe2e.conflist").write_text(json.dumps(network_configuration(node, at)))
        (at / "containerd.toml").write_text(_CONTAINERD.format(at=at, cni=CNI, pause=images["pause"][0]))
        (at / "kubelet.yaml").write_text(yaml.safe_dump(kubelet_configuration(node, at)))
        command = ["containerd", "-c", str(at / "containerd.toml")]
        processes.start(f"containerd-{node.name}", node.namespace, command, hostname=node.name)
    for node in NODES:
        _load_images(folder / node.name / "cd.sock", folder / "images", images)
        at = folder / node.name
        command = [str(programs / "kubelet"), f"--config={at / 'kubelet.yaml'}", f"--root-dir={at / 'kubelet'}"]
        command += [f"--kubeconfig={kubeconfig(folder, node.name)}", f"--hostname-override={node.name}"]
        command += [f"--cert-dir={at / 'pki'}", f"--node-ip={node.ipv4},{node.ipv6}"]
        command += [f"--node-labels=topology.kubernetes.io/zone=zone-{node.number}"]
        processes.start(f"kubelet-{node.name}", node.namespace, command, hostname=node.name)
    _wait(programs, folder, processes)


def _make_cgroups() -> None:
    for cgroup in cgroups():
        cgroup.mkdir(exist_ok=True)
        if cgroup.parent.name == "cpuset":
            # A new cpuset of cgroup v1 is empty, and accepts no process.
            for file in ("cpuset.cpus", "cpuset.mems"):
                (cgroup / file).write_text((cgroup.parent / file).read_text())


def _load_images(socket: Path, folder: Path, images: Mapping[str, Sequence[str]], seconds: float = 60) -> None:
    ctr = ["ctr", "--address", str(socket), "--namespace", "k8s.io"]
    deadline = time.monotonic() + seconds
    while subprocess.run([*ctr, "version"], capture_output=True, check=False).returncode != 0:
        if time.monotonic() > deadline:
            raise E2EError(f"containerd does not answer at {socket}: see its log")
        time.sleep(0.5)
    for name in images:
        command = [*ctr, "images", "import", str(folder / f"{name}.tar")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise E2EError(f"image {name}: {done.stderr.strip()[-300:]}")


def _wait(programs: Path, folder: Path, processes: Processes, seconds: float = 180) -> None:
    path = "-o=jsonpath={.items[*].status.conditions[?(@.type=='Ready')].status}"
    deadline = time.monotonic() + seconds
    while kubectl(programs, folder, "get", "nodes", path).split() != ["True"] * len(NODES):
        processes.check()
        if time.monotonic() > deadline:
            raise E2EError(f"the nodes are not ready after {seconds:.0f} s: see {LOGS}/kubelet-*.log")
        time.sleep(1)


def proxy_configuration(node: Node, folder: Path, mode: str) -> dict[str, Any]:
    """Return the node's KubeProxyConfiguration, for ours and the Go kube-proxy."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": mode,
        "hostnameOverride": node.name,
        "clientConnection": {"kubeconfig": str(kubeconfig(folder, "proxy"))},
        "clusterCIDR": POD_CIDRS,
        "detectLocalMode": "ClusterCIDR",
        "bindAddress": "0.0.0.0",
        "conntrack": {"maxPerCore": 0},
    }


def start_proxies(
    command: Sequence[str],
    mode: str,
    folder: Path,
    processes: Processes,
    flags: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> None:
    """Start a kube-proxy on each node, with the flags for that node, and wait for its health port. Raises E2EError."""
    for node in NODES:
        file = folder / node.name / "proxy.yaml"
        file.write_text(yaml.safe_dump(proxy_configuration(node, folder, mode)))
        line = [*command, "--config", str(file), *flags.get(node.name, ())]
        processes.start(f"kube-proxy-{node.name}", node.namespace, line)
    deadline = time.monotonic() + 60
    for node in NODES:
        while not _healthy(node):
            processes.check()
            if time.monotonic() > deadline:
                raise E2EError(f"kube-proxy on {node.name} is not healthy: see {LOGS}")
            time.sleep(0.5)


def _healthy(node: Node) -> bool:
    command = ["ip", "netns", "exec", node.namespace, "curl", "-sf", "-m2", "http://127.0.0.1:10256/healthz"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
