"""The programs of a Kubernetes release: found in a folder, or built from a source tree with `go`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
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
"""Programs of this machine, with their Debian packages."""

ETCD_SINCE: Final = ((3, 4, 31), (3, 5, 13))
"""For each older series of etcd the first version whose progress notifications Kubernetes can use; all of 3.6 can."""

CNI: Final = Path("/usr/lib/cni")


def missing_packages() -> list[str]:
    """Return the missing Debian packages that a run needs."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = {package for program, package in DEBIAN.items() if shutil.which(program, path=path) is None}
    if not (CNI / "bridge").exists():
        missing.add("containernetworking-plugins")
    return sorted(missing)


def etcd(folder: Path) -> str:
    """Return the path of etcd in the folder of programs, else on this machine. Raises E2EError."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    if found := shutil.which("etcd", path=f"{folder}:{path}"):
        return found
    raise E2EError(
        f"no etcd in {folder} or PATH: put a release of etcd there, or apt-get install etcd-server (3.5.13 or later)"
    )


def outdated_etcd(line: str) -> str:
    """Return the problem of the etcd that prints this line for --version; "" for none."""
    found = re.search(r"(\d+)\.(\d+)\.(\d+)", line)
    if found is None:
        return f"etcd --version printed {line!r}, not a version"
    version = tuple(map(int, found.groups()))
    since = next((each for each in ETCD_SINCE if each[:2] == version[:2]), ETCD_SINCE[-1])
    if version >= since:
        return ""
    return (
        f"etcd {found[0]} is older than {'.'.join(map(str, since))}: it sends no progress notifications of watches, so "
        "controllers of Kubernetes 1.36 wait for ever and the tests of rolling updates fail; "
        "put a later etcd into the folder of programs"
    )


def programs(kubernetes: Path) -> Path:
    """Return the folder with every program of PACKAGES; missing programs of a source tree are built.

    A source tree (with `go.mod`) contains them in `_output/e2e`. Raises E2EError.
    """
    tree = kubernetes if (kubernetes / "go.mod").exists() else None
    folder = tree / "_output/e2e" if tree else kubernetes
    missing = [name for name in PACKAGES if not os.access(folder / name, os.X_OK)]
    if missing and tree is None:
        raise E2EError(
            f"KUBERNETES={kubernetes}: no {', '.join(missing)} there; name a Kubernetes source tree to build it"
        )
    if missing and tree:
        _build(tree, folder, missing)
    return folder


def programs_to_run(kubernetes: Path) -> Path:
    """Return the folder of `programs`, if this process is root and this machine has the requirements.

    Raises E2EError.
    """
    if os.geteuid() != 0:
        raise E2EError("root is needed, for network namespaces and containers: run it with sudo")
    if missing := missing_packages():
        raise E2EError(f"Debian packages are missing: apt-get install {' '.join(missing)}")
    folder = programs(kubernetes)
    if wrong := outdated_etcd(first_line([etcd(folder), "--version"])):
        print(f"warning: {wrong}", flush=True)
    return folder


def first_line(command: Sequence[str]) -> str:
    """Return the first line of a program's output."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout.splitlines() or [""])[0].strip()


def _build(tree: Path, folder: Path, missing: Iterable[str]) -> None:
    if shutil.which("go") is None:
        raise E2EError(
            "go, which builds Kubernetes, is not in PATH: apt-get install golang, or name a folder of binaries"
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
    """Return the environment of `go`: static programs, from the tree's vendor folder if there is one."""
    flags = {"GOFLAGS": "-mod=vendor", "GOPROXY": "off"} if (tree / "vendor").is_dir() else {}
    return {**os.environ, "CGO_ENABLED": "0", **flags}
