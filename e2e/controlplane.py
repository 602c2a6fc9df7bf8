"""Starts the control plane in the hub's namespace: keys, kubeconfigs, etcd, API server, controllers, scheduler."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Final

import yaml

from e2e.binaries import etcd
from e2e.errors import E2EError
from e2e.layout import API, CLUSTER_DNS, HUB, HUB_IPV4, POD_CIDRS, SERVICE_CIDRS, TOKENS, Node
from e2e.network import inside
from e2e.processes import Processes

_NAMES: Final = f"subjectAltName=IP:{HUB_IPV4},IP:127.0.0.1,IP:10.96.0.1,DNS:kubernetes.default.svc,DNS:kubernetes"
_ETCD: Final = "http://127.0.0.1:2379"


def kubeconfig(folder: Path, client: str) -> Path:
    """Return the path of a client's kubeconfig; clients are the keys of TOKENS."""
    return folder / f"{client}.conf"


def write_credentials(folder: Path) -> None:
    """Make a certificate authority, the API server's pair, the key of service accounts, and all kubeconfigs."""
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "30", "-x509"]
    _openssl(folder, "req", *new_key, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=kpe2e-ca")
    signed = ["-CA", "ca.crt", "-CAkey", "ca.key", "-addext", _NAMES, "-addext", "basicConstraints=critical,CA:FALSE"]
    server = ["-keyout", "api.key", "-out", "api.crt", "-subj", "/CN=kube-apiserver"]
    _openssl(folder, "req", *new_key, *server, *signed)
    _openssl(folder, "genrsa", "-out", "sa.key", "2048")
    _openssl(folder, "rsa", "-in", "sa.key", "-pubout", "-out", "sa.pub")
    lines = [f'{client},{user},{client},"{group}"' for client, (user, group) in TOKENS.items()]
    (folder / "tokens.csv").write_text("\n".join(lines) + "\n")
    for client in TOKENS:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": API, "certificate-authority": str(folder / "ca.crt")}}],
            "users": [{"name": "u", "user": {"token": client}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        kubeconfig(folder, client).write_text(yaml.safe_dump(config))


def _openssl(folder: Path, *arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise E2EError(f"openssl {arguments[0]}: {done.stderr.strip()[-300:]}")


def start_api(programs: Path, folder: Path, processes: Processes) -> None:
    """Start etcd and the API server, and wait until they are ready. Raises E2EError."""
    command = [etcd(programs), "--data-dir", str(folder / "etcd"), "--unsafe-no-fsync", "--log-level=warn"]
    processes.start("etcd", HUB, [*command, f"--listen-client-urls={_ETCD}", f"--advertise-client-urls={_ETCD}"])
    processes.start("apiserver", HUB, [str(programs / "kube-apiserver"), *_apiserver_flags(folder)])
    wait(programs, folder, processes)


def start(programs: Path, folder: Path, processes: Processes) -> None:
    """Start the control plane and wait until it is ready. Raises E2EError."""
    start_api(programs, folder, processes)
    controllers = [
        f"--kubeconfig={kubeconfig(folder, 'controller-manager')}",
        f"--service-account-private-key-file={folder / 'sa.key'}",
        f"--root-ca-file={folder / 'ca.crt'}",
        "--leader-elect=false",
        f"--cluster-cidr={POD_CIDRS}",
        f"--service-cluster-ip-range={SERVICE_CIDRS}",
        f"--flex-volume-plugin-dir={folder / 'volumeplugins'}",
        "--controllers=*,-nodeipam,-node-route-controller,-cloud-node-lifecycle-controller",
        f"--cluster-signing-cert-file={folder / 'ca.crt'}",
        f"--cluster-signing-key-file={folder / 'ca.key'}",
    ]
    processes.start("controller-manager", HUB, [str(programs / "kube-controller-manager"), *controllers])
    scheduler = [f"--kubeconfig={kubeconfig(folder, 'scheduler')}", "--leader-elect=false"]
    processes.start("scheduler", HUB, [str(programs / "kube-scheduler"), *scheduler])


def _apiserver_flags(folder: Path) -> list[str]:
    return [
        f"--etcd-servers={_ETCD}",
        f"--service-cluster-ip-range={SERVICE_CIDRS}",
        f"--tls-cert-file={folder / 'api.crt'}",
        f"--tls-private-key-file={folder / 'api.key'}",
        f"--client-ca-file={folder / 'ca.crt'}",
        f"--token-auth-file={folder / 'tokens.csv'}",
        "--authorization-mode=Node,RBAC",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={folder / 'sa.pub'}",
        f"--service-account-signing-key-file={folder / 'sa.key'}",
        f"--advertise-address={HUB_IPV4}",
        f"--bind-address={HUB_IPV4}",
        "--secure-port=6443",
        "--allow-privileged=true",
        "--kubelet-preferred-address-types=InternalIP",
        "--profiling=false",
    ]


def kubectl(programs: Path, folder: Path, *arguments: str, given: str = "") -> str:
    """Run kubectl as the administrator and return its output. Raises E2EError."""
    command = [*inside(HUB), str(programs / "kubectl"), f"--kubeconfig={kubeconfig(folder, 'admin')}", *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise E2EError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()[-300:]}")
    return done.stdout


def wait(programs: Path, folder: Path, processes: Processes, seconds: float = 180) -> None:
    """Wait until the API server serves requests. Raises E2EError."""
    deadline = time.monotonic() + seconds
    while True:
        processes.check()
        try:
            kubectl(programs, folder, "get", "--raw", "/readyz")
            kubectl(programs, folder, "get", "namespace", "kube-system")
        except E2EError as e:
            if time.monotonic() > deadline:
                raise E2EError(f"the API server is not ready after {seconds:.0f} s: {e}") from e
            time.sleep(1)
        else:
            return


def add_node(programs: Path, folder: Path, node: Node) -> None:
    """Create a Node object, if no kubelet creates it. Raises E2EError."""
    addresses = [{"type": "InternalIP", "address": address} for address in (node.ipv4, node.ipv6)]
    spec = {"podCIDR": node.pods_ipv4, "podCIDRs": [node.pods_ipv4, node.pods_ipv6]}
    made = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node.name}, "spec": spec}
    kubectl(programs, folder, "create", "--validate=false", "-f", "-", given=json.dumps(made))
    patch = json.dumps({"status": {"addresses": addresses}})
    kubectl(programs, folder, "patch", "node", node.name, "--subresource=status", "--type=merge", "-p", patch)


def add_dns(programs: Path, folder: Path) -> None:
    """Create the Service kube-dns, whose endpoint is the substitute of cluster DNS in the hub."""
    ports = [{"name": "dns", "port": 53, "protocol": "UDP"}]
    meta = {"namespace": "kube-system"}
    labels = {"kubernetes.io/service-name": "kube-dns"}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "kube-dns", **meta},
        "spec": {"clusterIP": CLUSTER_DNS, "ports": ports},
    }
    endpoints = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "kube-dns-1", "labels": labels, **meta},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [HUB_IPV4], "conditions": {"ready": True}}],
        "ports": ports,
    }
    both = {"apiVersion": "v1", "kind": "List", "items": [service, endpoints]}
    # Without validation, because an API server that was built without its OpenAPI files offers none.
    kubectl(programs, folder, "apply", "--validate=false", "-f", "-", given=json.dumps(both))
