"""Upstream's SCTP: Services in all modes; packets only under the guest's kernel, which supports the protocol.

test_fronts.py tests the rules for SCTP Services on other kernels.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.netns import open_socket_in, run_in_async
from support.live import Front
from support.stage import Stage
from support.upstream import modes, upstream

PORT = {"name": "sctp", "port": 80, "protocol": "SCTP", "targetPort": 5060}
CONTAINER_PORT = {"containerPort": 5060, "protocol": "SCTP"}
PODS = ("netserver-0", "netserver-1")


@pytest.mark.slow("two nodes for one question")
@upstream("Services should allow creating a basic SCTP service with pod and endpoints [LinuxOnly] [Serial]")
async def test_a_service_loads_no_module(stage: Stage) -> None:
    before = has_sctp()
    stage.service(type="NodePort", ports=[PORT])
    stage.service("known", selector={"app": "web"})
    await stage.pods("pod@a", ports=[CONTAINER_PORT, 3000])
    await stage.live.until(lambda: len(stage.endpoints()) == 1, "an endpoint")
    await stage.reachable("pod", "known")
    stage.delete_pod("pod")
    await stage.live.until(lambda: not stage.endpoints(), "no endpoints")
    assert has_sctp() == before


def has_sctp() -> bool:
    """Return whether the kernel supports SCTP now."""
    return Path("/proc/net/sctp").exists()


@pytest.fixture
def sctp() -> None:
    """Load the kernel's SCTP module."""
    subprocess.run(["modprobe", "sctp"], check=True)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            "IPv4",
            marks=upstream(
                "Networking Granular Checks: Services should function for pod-Service: sctp [Feature:SCTPConnectivity]",
                "Networking Granular Checks: Services should function for node-Service: sctp"
                " [Feature:SCTPConnectivity]",
                "Networking Granular Checks: Services should function for endpoint-Service: sctp"
                " [Feature:SCTPConnectivity]",
            ),
        ),
        pytest.param(
            "IPv6",
            marks=upstream(
                "[Feature:IPv6DualStack] Granular Checks: Services Secondary IP Family [LinuxOnly]"
                " should function for pod-Service: sctp [Feature:SCTPConnectivity]"
            ),
        ),
    ],
)
@modes("ipvs")
@pytest.mark.usefixtures("sctp")
async def test_associations(stage: Stage, family: str) -> None:
    stage.service(type="NodePort", ports=[PORT], ipFamilyPolicy="RequireDualStack", ipFamilies=["IPv4", "IPv6"])
    await stage.pods("netserver-0@a netserver-1@b", ports=[CONTAINER_PORT])
    with contextlib.ExitStack() as servers:
        for pod in PODS:
            servers.enter_context(serving(stage, pod))
        for front in (stage.front(family=family), stage.front("nodeport", family=family)):
            for place in ("client-a", "node", "netserver-0"):
                await meets_all(stage, place, front)


@contextlib.contextmanager
def serving(stage: Stage, pod: str) -> Iterator[None]:
    """Answer each association in a pod with the pod's name."""
    place = stage.cluster.namespace_of(stage.place(pod))
    with open_socket_in(place, lambda: _socket("IPv6")) as listener:
        listener.bind(("::", 5060))
        listener.listen(16)
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.add_reader(listener, _answer, listener, pod.encode())
        try:
            yield
        finally:
            loop.remove_reader(listener)


def _answer(listener: socket.socket, name: bytes) -> None:
    accepted, _ = listener.accept()
    with accepted:
        accepted.send(name)


def _socket(family: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if family == "IPv6" else socket.AF_INET, socket.SOCK_STREAM, 132)


async def meets_all(stage: Stage, place: str, front: Front) -> None:
    """Wait until associations from a place have reached all pods."""
    met: set[str] = set()

    def ask() -> str:
        with _socket("IPv6" if ":" in front.address else "IPv4") as sock:
            sock.settimeout(3)
            sock.connect(front)
            return sock.recv(100).decode()

    async def check() -> str:
        try:
            met.add(await run_in_async(stage.cluster.namespace_of(stage.place(place)), ask))
        except OSError as error:
            return f"{place} {front}: {error}"
        return "" if met == set(PODS) else f"{place} {front}: met {met}"

    await stage.live.eventually(check)
