"""A substitute for kubectl, first in PATH: it answers from files, and records its calls.

It is a shell script, because it starts often; kubectl_get.py implements its `kubectl get`.
"""

from __future__ import annotations

import json
import marshal
import os
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

Json = dict[str, Any]


class StandIn:
    """The objects of an invented cluster, and the output of the proxies in its pods."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects: dict[str, list[Json]] = {"pods": [], "nodes": [], "services": [], "endpointslices": []}
        self.errors: dict[str, str] = {}
        """The error messages of `kubectl get RESOURCE`."""
        self.printed: dict[str, Json] = {}
        """The behaviour of `exec` by pod: out (text), err, status, hangs, flood (bytes); the entry of a command's name
        overrides it for this command, the entry "send" for a trace with --send, the entry ADDRESS:PORT for a question
        about this destination.
        """

    def node(self, name: str, *, app: str = "kube-proxy-py", **printed: Any) -> None:
        """Add a Node with a kube-proxy; `printed` is the pod's output, as in `self.printed`."""
        number = len(self.objects["nodes"])
        pods = f"10.244.{number}.0/24"
        self.objects["nodes"].append(
            {
                "metadata": {"name": name},
                "spec": {"podCIDRs": [pods, f"fd00:244:{number:x}::/64"]},
                "status": {"addresses": [{"type": "InternalIP", "address": f"192.0.2.{number + 1}"}]},
            }
        )
        self.pod(f"{app}-{name}", "kube-system", name, [f"192.0.2.{number + 1}"], app=app, host=True)
        self.printed[f"{app}-{name}"] = printed

    def pod(
        self,
        name: str,
        namespace: str,
        node: str,
        ips: list[str],
        *,
        app: str = "",
        phase: str = "Running",
        host: bool = False,
    ) -> Json:
        """Add a pod, and return it."""
        made: Json = {
            "metadata": {"name": name, "namespace": namespace, "labels": {"k8s-app": app} if app else {}},
            "spec": {"nodeName": node, "hostNetwork": host, "containers": [{"name": "kube-proxy" if app else "c"}]},
            "status": {"phase": phase, "podIPs": [{"ip": ip} for ip in ips]},
        }
        self.objects["pods"].append(made)
        return made

    def install(self) -> str:
        """Write the program and its files; return the value of PATH that selects it."""
        program = self.folder / "bin/kubectl"
        program.parent.mkdir(exist_ok=True)
        program.write_text(
            _PROGRAM.format(folder=self.folder, python=sys.executable, get=Path(__file__).with_name("kubectl_get.py"))
        )
        program.chmod(0o755)
        rows = {resource: [_row(one) for one in objects] for resource, objects in self.objects.items()}
        (self.folder / "objects").write_bytes(marshal.dumps((rows, self.errors)))
        for pod, printed in self.printed.items():
            _write(self.folder / "printed" / pod, printed)
            for command in [name for name, value in printed.items() if isinstance(value, dict)]:
                _write(self.folder / "printed" / pod / command, printed | printed[command])
        return f"{program.parent}:{os.environ['PATH']}"

    @property
    def calls(self) -> list[list[str]]:
        """Return the arguments of each call."""
        path = self.folder / "calls"
        return [call.split("\0")[:-1] for call in path.read_text().split("\n\0")[:-1]] if path.exists() else []

    @property
    def at_a_time(self) -> list[int]:
        """Return the numbers of running `kubectl exec` after each start and each end of one."""
        return [*accumulate(map(int, (self.folder / "running").read_text().split()))]


def _write(files: Path, printed: Json) -> None:
    files.mkdir(parents=True, exist_ok=True)
    (files / "out").write_text("x" * printed.get("flood", 0) + printed.get("out", ""), encoding="utf-8")
    (files / "status").write_text(f"{printed.get('status', 0)}\n")
    for name in printed.keys() & {"err", "version", "hangs"}:
        (files / name).write_text(str(printed[name]), encoding="utf-8")


def _row(found: Json) -> tuple[str, str, dict[str, str], str, str]:
    """An object for kubectl_get.py: name, namespace, labels, first address, JSON."""
    about, addresses = found["metadata"], found.get("status", {}).get("podIPs") or [{"ip": ""}]
    return about["name"], about.get("namespace", ""), about.get("labels", {}), addresses[0]["ip"], json.dumps(found)


_PROGRAM = """\
#!/bin/sh
printf '%s\\0' "$@" '
' >> {folder}/calls
while :; do case $1 in --*) shift ;; *) break ;; esac; done
[ "$1" = exec ] || exec {python} -ISE {get} {folder}/objects "$@"
shift
while :; do case $1 in --*) shift ;; *) break ;; esac; done
cd {folder}/printed/"$1" || exit
[ ! -d "$4" ] || cd "$4" || exit
case " $* " in *" --send "*) [ ! -d ../send ] || cd ../send || exit ;; esac
for last do :; done
[ ! -d "${{last%/*}}" ] || cd "${{last%/*}}" || exit
echo +1 >> {folder}/running
[ ! -e hangs ] || exec sleep 600
case "$*" in *--version*) [ ! -e version ] || exec cat version ;; esac
cat out
[ ! -e err ] || cat err >&2
read -r status < status
[ "$status" = 0 ] || echo "command terminated with exit code $status" >&2
echo -1 >> {folder}/running
exit "$status"
"""
