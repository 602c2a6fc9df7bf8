"""A folder of manifests instead of a cluster: the same packets, live edits, and mistakes in one object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab.proxyprocess import METRICS_PORT, proxy_command
from support.live import Front, Live, slice_of

WEB = Front("10.96.5.1", 80)


@pytest.fixture
def folder(bare: Live) -> Path:
    made = bare.cluster.folder / "manifests"
    made.mkdir()
    return made


def service(name: str, address: str, **spec: Any) -> dict[str, Any]:
    port = {"name": "tcp", "port": 80, "protocol": "TCP", "targetPort": 3000}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"clusterIP": address, "ports": [port]} | spec,
    }


def endpoints(live: Live, name: str, text: str) -> dict[str, Any]:
    found = [live._endpoint(word, "IPv4") for word in text.split()]
    head = {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice"}
    made = head | slice_of(name, "IPv4", found)
    del made["metadata"]["uid"]
    return made


def write(path: Path, *documents: dict[str, Any]) -> None:
    """Save like an editor: a new file replaces the old one."""
    text = "---\n".join(yaml.safe_dump(d) for d in documents) if path.suffix != ".json" else json.dumps(documents[0])
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


async def start(live: Live, folder: Path) -> None:
    await live.start({"clientConnection": {"kubeconfig": ""}}, ["--manifests", str(folder)])


async def test_files_are_followed(bare: Live, folder: Path) -> None:
    write(folder / "web.yaml", service("web", WEB.address), endpoints(bare, "web", "a1 b1"))
    await start(bare, folder)
    await bare.expect(WEB, {"pod": "a1 b1 kept", "outside": "a1 b1 masqueraded"}, "tcp")
    _, shown = await bare.page("/ui/api/service?name=default/web", METRICS_PORT)
    assert {one["zone"] for one in json.loads(shown)["endpoints"]} == {"zone-a", "zone-b"}

    write(folder / "web.yaml", service("web", WEB.address), endpoints(bare, "web", "b2"))
    await bare.expect(WEB, {"pod": "b2"}, "tcp")

    other = Front("10.96.5.2", 80)
    write(folder / "slice.json", endpoints(bare, "other", "a2"))
    write(folder / "other.yml", service("other", other.address, type="NodePort", externalIPs=["198.51.100.5"]))
    await bare.expect(other, {"pod": "a2"}, "tcp")
    await bare.expect(Front("198.51.100.5", 80), {"outside": "a2"}, "tcp")

    (folder / "other.yml").unlink()
    await bare.eventually(lambda: _no_element(bare, other.address))
    await bare.expect(WEB, {"pod": "b2"}, "tcp")


async def _no_element(live: Live, address: str) -> str:
    text = await live.nft("list", "table", "ip", "kube-proxy")
    return text if address in text else ""


MISTAKES = {
    "no-yaml": "spec: [unclosed",
    "wrong-type": yaml.safe_dump(service("web", WEB.address) | {"spec": 5}),
    "half-a-file": yaml.safe_dump(service("web", WEB.address))[:60] + "\n  : :",
    "binary": "\x00\x01\x02",
}


@pytest.mark.quick("half-a-file")
@pytest.mark.parametrize("mistake", MISTAKES)
async def test_a_mistake_keeps_the_last_good_state(bare: Live, folder: Path, mistake: str) -> None:
    write(folder / "web.yaml", service("web", WEB.address))
    write(folder / "slices.yaml", endpoints(bare, "web", "a1"), endpoints(bare, "other", "b1"))
    write(folder / "other.yaml", service("other", "10.96.5.2"))
    await start(bare, folder)
    await bare.expect(WEB, {"pod": "a1"}, "tcp")
    (folder / "web.yaml").write_text(MISTAKES[mistake])
    await bare.until(lambda: bare.logged(r"web\.yaml"), "a complaint that names the file")
    write(folder / "slices.yaml", endpoints(bare, "web", "a2"), endpoints(bare, "other", "b2"))
    await bare.expect(Front("10.96.5.2", 80), {"pod": "b2"}, "tcp")
    await bare.expect(WEB, {"pod": "a2"}, "tcp")
    write(folder / "web.yaml", service("web", "10.96.5.9"))
    await bare.expect(Front("10.96.5.9", 80), {"pod": "a2"}, "tcp")
    assert bare.proxy.returncode is None
    assert not bare.logged("Traceback")


async def test_a_restart_on_a_folder_changes_nothing(bare: Live, folder: Path) -> None:
    write(folder / "web.yaml", service("web", WEB.address), endpoints(bare, "web", "a1 b1"))
    await start(bare, folder)
    await bare.expect(WEB, {"pod": "a1 b1"}, "tcp")
    before = await bare.nft("list", "map", "ip", "kube-proxy", "endpoints")
    await bare.proxy.kill()
    await start(bare, folder)
    assert await bare.nft("list", "map", "ip", "kube-proxy", "endpoints") == before
    assert not bare.logged("Replacing the table")


async def test_an_empty_folder_is_a_cluster_without_services(bare: Live, folder: Path) -> None:
    await start(bare, folder)
    assert (await bare.page("/readyz"))[0] == 200
    write(folder / "web.yaml", service("web", WEB.address), endpoints(bare, "web", "a1"))
    await bare.expect(WEB, {"pod": "a1"}, "tcp")


async def test_the_node_can_come_from_the_folder(bare: Live, folder: Path) -> None:
    port = {"name": "tcp", "port": 80, "protocol": "TCP", "nodePort": 30080}
    write(folder / "web.yaml", service("web", WEB.address, type="NodePort", ports=[port]))
    write(folder / "slice.yaml", endpoints(bare, "web", "a1"))
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-a"}}
    status = {"addresses": [{"type": "InternalIP", "address": "172.31.0.2"}]}
    write(folder / "node.yaml", node | {"status": status})
    await start(bare, folder)
    await bare.expect(Front("172.31.0.2", 30080), {"outside": "a1"}, "tcp")
    await bare.expect(Front("192.168.100.2", 30080), {"outside": "refused"}, "tcp")


async def test_a_missing_folder_is_reported_in_one_line(bare: Live, folder: Path) -> None:
    command = [proxy_command(), "--manifests", str(folder / "none")]
    proxy = await bare.start(command=command, ready_within=None)
    await bare.until(lambda: proxy.returncode is not None, "the end")
    assert proxy.returncode == 1
    assert "is no directory" in proxy.tail()
    assert "Traceback" not in proxy.tail()
