"""The programs of a Kubernetes release: found in a folder, or built from a source tree with `go`."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from e2e.errors import E2EError

PACKAGES: Final = {
    "kube-proxy": "./cmd/kube-proxy",
    "kube-scheduler": "./cmd/kube-scheduler",
    "kube-controller-manager": "./cmd/kube-controller-manager",
    "kube-apiserver": "./cmd/kube-apiserver",
    "kubelet": "./cmd/kubelet",
    "kubectl": "./cmd/kubectl",
    "agnhost": "./test/images/agnhost",
    "regression-issue-74839": "./test/images/regression-issue-74839",
    "e2e.test": "./test/e2e",
}
"""Each program and its Go package."""

DEBIAN: Final = {
    "etcd": "etcd-server",
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "iptables-nft": "iptables",
    "nft": "nftables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "busybox": "busybox-static",
    "nc.openbsd": "netcat-openbsd",
    "dig": "bind9-dnsutils",
    "curl": "curl",
    "wget": "wget",
    "iperf": "iperf",
    "openssl": "openssl",
    "nsenter": "util-linux",
}
"""Programs of this machine, and the Debian package of each."""

CNI: Final = Path("/usr/lib/cni")


def missing_packages() -> list[str]:
    """Return the Debian packages that a run needs and this machine does not have."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = {package for program, package in DEBIAN.items() if shutil.which(program, path=path) is None}
    if not (CNI / "bridge").exists():
        missing.add("containernetworking-plugins")
    return sorted(missing)


def programs(kubernetes: Path) -> Path:
    """Return the folder with every program of PACKAGES; those that a source tree lacks are built.

    A source tree (with `go.mod`) keeps them in `_output/e2e`. Raises E2EError.
    """
    tree = kubernetes if (kubernetes / "go.mod").exists() else None
    folder = tree / "_output/e2e" if tree else kubernetes
    missing = [name for name in PACKAGES if not os.access(folder / name, os.X_OK)]
    if missing and tree is None:
        raise E2EError(
            f"KUBERNETES={kubernetes}: no {', '.join(missing)} there; name a Kubernetes source tree to have it built"
        )
    if missing and tree:
        _build(tree, folder, missing)
    return folder


def _build(tree: Path, folder: Path, missing: Iterable[str]) -> None:
    if shutil.which("go") is None:
        raise E2EError(
            "go is not in PATH, which builds Kubernetes: apt-get install golang, or name a folder of binaries"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name in missing:
        print(f"building {name} of {tree} (minutes for a large one) ...", flush=True)
        begin = time.monotonic()
        part = folder / f"{name}.part"
        done = subprocess.run(build_command(name, part), cwd=tree, env=build_environment(tree), check=False)
        if done.returncode != 0:
            raise E2EError(f"{name} could not be built; go wrote why above")
        part.rename(folder / name)
        print(f"built {name} in {time.monotonic() - begin:.0f} s", flush=True)


def build_command(name: str, out: Path) -> list[str]:
    """Return the command that builds one program; e2e.test is a test binary."""
    verb = ["test", "-c"] if name.endswith(".test") else ["build"]
    return ["nice", "-n", "10", "go", *verb, "-ldflags=-s -w", "-o", str(out), PACKAGES[name]]


def build_environment(tree: Path) -> dict[str, str]:
    """Return the environment of `go`: static programs, from the tree's vendor folder where there is one."""
    flags = {"GOFLAGS": "-mod=vendor", "GOPROXY": "off"} if (tree / "vendor").is_dir() else {}
    return {**os.environ, "CGO_ENABLED": "0", **flags}
