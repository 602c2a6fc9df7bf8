"""The lab with a real kubectl: both kinds of apply, explain by both versions of OpenAPI, validation, and output.

Tests without kubectl cover the same requests: test_lab_apply.py, test_lab_openapi.py, test_lab_recordings.py.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from support.lab_client import Client, with_server
from support.programs import program

MANIFEST = """\
apiVersion: v1
kind: Service
metadata: {name: web, labels: {app: web}}
spec:
  selector: {app: web}
  ports:
  - {name: http, port: 80, targetPort: 8080}
  - {name: dns, port: 53, protocol: UDP}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: settings}
data: {a: b}
---
apiVersion: v1
kind: Endpoints
metadata: {name: web}
subsets: [{addresses: [{ip: 10.244.0.1}], ports: [{port: 80, protocol: TCP}]}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
endpoints: [{addresses: [10.244.0.1], conditions: {ready: true}}]
ports: [{name: http, port: 8080, protocol: TCP}]
---
apiVersion: coordination.k8s.io/v1
kind: Lease
metadata: {name: holder}
spec: {holderIdentity: node-a}
---
apiVersion: v1
kind: ReplicationController
metadata: {name: web}
spec:
  replicas: 1
  template:
    metadata: {labels: {app: web}}
    spec: {containers: [{name: web, image: whoami, ports: [{containerPort: 8080}]}]}
"""


class Done(NamedTuple):
    status: int
    out: str
    err: str


class Kubectl:
    """A kubectl that connects to a server, with a separate home folder."""

    def __init__(self, client: Client, home: Path) -> None:
        self._program = os.environ.get("KUBECTL") or program("kubectl")
        self._home = home
        self._config = home / "config"
        cluster = {"name": "c", "cluster": {"server": client.url}}
        context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
        users = [{"name": "u", "user": {"token": "t"}}]
        config = {"apiVersion": "v1", "kind": "Config", "clusters": [cluster], "contexts": [context], "users": users}
        self._config.write_text(json.dumps(config | {"current-context": "x"}))

    async def __call__(self, *arguments: str, text: str = "", **environment: str) -> Done:
        env = {"PATH": os.environ["PATH"], "HOME": str(self._home), "KUBECONFIG": str(self._config), **environment}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            self._program, *arguments, stdin=pipe, stdout=pipe, stderr=pipe, env=env
        )
        out, err = await process.communicate(text.encode())
        return Done(process.returncode or 0, out.decode(), err.decode())

    async def ok(self, *arguments: str, text: str = "", **environment: str) -> str:
        """Return its output; it must not fail."""
        done = await self(*arguments, text=text, **environment)
        assert done.status == 0, done.err
        return done.out


def by_kubectl(tmp_path: Path, test: Callable[[Kubectl], Awaitable[None]]) -> None:
    async def main(client: Client) -> None:
        await test(Kubectl(client, tmp_path))

    with_server(main)


PORTS = "jsonpath={range .spec.ports[*]}{.port}/{.protocol}>{.targetPort} {end}"


# kubectl makes its patches from version 3 of OpenAPI if possible, or from version 2.
@pytest.mark.parametrize("version", ["true", "false"], ids=["v3", "v2"])
def test_apply_creates_changes_and_changes_nothing(tmp_path: Path, version: str) -> None:
    async def test(kubectl: Kubectl) -> None:
        async def apply(text: str) -> list[str]:
            out = await kubectl.ok("apply", "-f", "-", text=text, KUBECTL_OPENAPIV3_PATCH=version)
            return [line.rpartition(" ")[2] for line in out.splitlines()]

        assert await apply(MANIFEST) == ["created"] * 6
        assert await apply(MANIFEST) == ["unchanged"] * 6
        changed = MANIFEST.replace("8080}", "8081}").replace("port: 53", "port: 54").replace("{a: b}", "{c: d}")
        assert await apply(changed) == [*["configured"] * 2, *["unchanged"] * 3, "configured"]
        assert await kubectl.ok("get", "service", "web", "-o", PORTS) == "80/TCP>8081 54/UDP>54 "
        assert json.loads(await kubectl.ok("get", "cm", "settings", "-o", "json"))["data"] == {"c": "d"}
        assert await kubectl.ok("diff", "-f", "-", text=changed) == ""

    by_kubectl(tmp_path, test)


def test_server_side_apply(tmp_path: Path) -> None:
    async def test(kubectl: Kubectl) -> None:
        apply = ("apply", "--server-side", "-f", "-")
        out = await kubectl.ok(*apply, text=MANIFEST)
        assert [line.rpartition(" ")[2] for line in out.splitlines()] == ["serverside-applied"] * 6
        other = MANIFEST.replace("8080}", "9999}", 1).partition("---")[0]
        done = await kubectl(*apply, "--field-manager=other", text=other)
        assert done.status == 1
        wanted = 'Apply failed with 1 conflict: conflict with "kubectl": .spec.ports[port=80,protocol="TCP"].targetPort'
        assert wanted in done.err
        assert "--force-conflicts" in done.err
        await kubectl.ok(*apply, "--field-manager=other", "--force-conflicts", text=other)
        assert await kubectl.ok("get", "service", "web", "-o", PORTS) == "80/TCP>9999 53/UDP>53 "
        assert await kubectl.ok("diff", "--server-side", "--field-manager=other", "-f", "-", text=other) == ""

    by_kubectl(tmp_path, test)


def test_from_client_side_to_server_side_apply(tmp_path: Path) -> None:
    async def test(kubectl: Kubectl) -> None:
        await kubectl.ok("apply", "-f", "-", text=MANIFEST)
        await kubectl.ok("label", "service", "web", "x=y")
        await kubectl.ok("apply", "--server-side", "-f", "-", text=MANIFEST)
        less = MANIFEST.replace("  - {name: dns, port: 53, protocol: UDP}\n", "")
        await kubectl.ok("apply", "--server-side", "-f", "-", text=less)
        assert await kubectl.ok("get", "service", "web", "-o", PORTS) == "80/TCP>8080 "
        labels = json.loads(await kubectl.ok("get", "service", "web", "-o", "jsonpath={.metadata.labels}"))
        assert labels == {"app": "web", "x": "y"}

    by_kubectl(tmp_path, test)


@pytest.mark.parametrize("output", ["plaintext", "plaintext-openapiv2"])
def test_explain(tmp_path: Path, output: str) -> None:
    async def test(kubectl: Kubectl) -> None:
        kinds = ("services", "pods", "nodes", "endpoints", "configmaps", "leases", "endpointslices", "servicecidrs")
        for kind in kinds:
            assert "FIELDS:" in await kubectl.ok("explain", kind, f"--output={output}")
        ports = await kubectl.ok("explain", "service.spec.ports", f"--output={output}")
        assert "targetPort" in ports
        assert "[]ServicePort" in ports or "[]Object" in ports

    by_kubectl(tmp_path, test)


def test_validation_names_the_field(tmp_path: Path) -> None:
    async def test(kubectl: Kubectl) -> None:
        typo = MANIFEST.replace("selector:", "selektor:", 1)
        done = await kubectl("apply", "-f", "-", text=typo)
        assert done.status == 1
        assert 'unknown field "spec.selektor"' in done.err
        done = await kubectl("apply", "--validate=warn", "-f", "-", text=typo)
        assert done.status == 0
        assert 'unknown field "spec.selektor"' in done.err

    by_kubectl(tmp_path, test)


def test_objects_are_created_shown_and_deleted(tmp_path: Path) -> None:
    async def test(kubectl: Kubectl) -> None:
        await kubectl.ok("create", "configmap", "c", "--from-literal=a=b")
        await kubectl.ok("apply", "-f", "-", text=MANIFEST)
        shown = await kubectl.ok("get", "cm,ep,leases,endpointslices,svc")
        for word in ("configmap/c", "configmap/settings", "endpoints/web", "node-a", "10.244.0.1", "80/TCP,53/UDP"):
            assert word in shown, word
        await kubectl.ok("delete", "-f", "-", text=MANIFEST)
        assert "settings" not in await kubectl.ok("get", "cm")

    by_kubectl(tmp_path, test)
