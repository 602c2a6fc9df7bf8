"""A stand-in for kubectl, first in PATH: it answers from a file, and records its calls.

`StandIn` writes the file. Its copy in a folder of the test is the program itself, which imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

Json = dict[str, Any]


class StandIn:
    """The objects of a made-up cluster, and what the proxies in its pods print."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects: dict[str, list[Json]] = {"pods": [], "nodes": [], "services": [], "endpointslices": []}
        self.errors: dict[str, str] = {}
        """What `kubectl get RESOURCE` fails with."""
        self.printed: dict[str, Json] = {}
        """By pod what `exec` does: out (text), err, status, hangs, flood (bytes); under a command's name what differs
        for it.
        """

    def node(self, name: str, *, app: str = "kube-proxy-py", **printed: Any) -> None:
        """Add a Node with a kube-proxy; `printed` is what the pod prints, as in `self.printed`."""
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

    def install(self, *, quick: bool = False) -> str:
        """Write the program and its file; return the value of PATH for it.

        A `quick` one starts no Python for `exec`, whatever its arguments, and records how many run at a time.
        """
        program = self.folder / "bin/kubectl"
        program.parent.mkdir(exist_ok=True)
        text = Path(__file__).read_text(encoding="utf-8").partition("\n")[2]
        slow = program.with_name("kubectl.py")
        slow.write_text(f'#!{sys.executable} -SE\n"""A stand-in.\n{text}', encoding="utf-8")
        slow.chmod(0o755)
        (self.folder / "cluster.json").write_text(
            json.dumps({"objects": self.objects, "errors": self.errors, "printed": self.printed}), encoding="utf-8"
        )
        if quick:
            for name in ("running", "quick"):
                (self.folder / name).mkdir()
            for pod, printed in self.printed.items():
                (self.folder / "quick" / pod).write_text(printed["out"], encoding="utf-8")
        program.write_text(_QUICK.format(folder=self.folder, case="exec" if quick else "none"), encoding="utf-8")
        program.chmod(0o755)
        return f"{program.parent}:{os.environ['PATH']}"

    @property
    def calls(self) -> list[list[str]]:
        """The arguments of each call."""
        path = self.folder / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def at_a_time(self) -> list[int]:
        """For each quick call, how many ran."""
        return [int(line) for line in (self.folder / "at-a-time").read_text().split()]


_QUICK = """\
#!/bin/sh
if [ "$1" = {case} ]; then
    : > {folder}/running/$$
    set -- "$4" {folder}/running/*
    pod=$1
    shift
    echo $# >> {folder}/at-a-time
    cat {folder}/quick/"$pod"
    rm {folder}/running/$$
    exit
fi
exec {folder}/bin/kubectl.py "$@"
"""
"""`kubectl exec --namespace=… --container=… POD …`."""


def _main(words: list[str]) -> int:
    folder = Path(__file__).parent.parent
    with (folder / "calls").open("a") as calls:
        calls.write(json.dumps(words) + "\n")
    held = json.loads((folder / "cluster.json").read_text())
    given = [word for word in words if not word.startswith(("--context", "--kubeconfig", "--as"))]
    return _get(held, given[1:]) if given[0] == "get" else _exec(held["printed"], given[1:])


def _get(held: Json, words: list[str]) -> int:
    options = dict(word[2:].split("=", 1) for word in words if word.startswith("--"))
    resource, *names = [word for word in words if not word.startswith("--")]
    if resource in held["errors"]:
        sys.stderr.write(held["errors"][resource] + "\n")
        return 1
    namespace = "" if "all-namespaces" in options or resource == "nodes" else options.get("namespace", "default")
    items = [
        one for one in held["objects"][resource] if one["metadata"].get("namespace", "") == namespace or not namespace
    ]
    if selector := options.get("selector"):
        key, _, value = selector.partition("=")
        labels = [one["metadata"].get("labels", {}).get(key, "") for one in items]
        items = [one for one, label in zip(items, labels, strict=True) if label and value in {"", label}]
    if field := options.get("field-selector"):
        items = [one for one in items if one["status"]["podIPs"][:1] == [{"ip": field.removeprefix("status.podIP=")}]]
    if not names:
        json.dump({"items": items}, sys.stdout)
        return 0
    found = [one for one in items if one["metadata"]["name"] == names[0]]
    if not found:
        sys.stderr.write(f'Error from server (NotFound): {resource} "{names[0]}" not found\n')
        return 1
    json.dump(found[0], sys.stdout)
    return 0


def _exec(printed: Json, words: list[str]) -> int:
    pod = next(word for word in words if not word.startswith("--"))
    does = printed[pod] | printed[pod].get(words[words.index("kube-proxy") + 1], {})
    if "--version" in words and "version" in does:
        sys.stdout.write(does["version"])
        return 0
    if does.get("hangs"):
        time.sleep(600)
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write("x" * does.get("flood", 0) + does.get("out", ""))
        sys.stdout.flush()
    sys.stderr.write(does.get("err", ""))
    if does.get("status"):
        sys.stderr.write(f"command terminated with exit code {does['status']}\n")
    return int(does.get("status", 0))


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
