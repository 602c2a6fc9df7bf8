"""The folder of examples, by the command line of the README: in a separate network, where its endpoints answer."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.netns import open_socket_in, run_in
from lab.proxyprocess import proxy_command
from support.places import ROOT

READY = "http://127.0.0.1:10256/readyz"


def line_of_the_readme() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^    kube-proxy (--manifests .*)$", text, re.M)
    return shlex.split(line)


@pytest.fixture
def network() -> Iterator[str]:
    """A network namespace whose loopback has the addresses of the first two endpoints, and routes to cluster IPs."""
    name = f"kp-examples-{time.monotonic_ns() % 10**9}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        for words in (
            "link set lo up",
            *(f"addr add 10.244.0.{end}/32 dev lo" for end in (1, 10, 11)),
            "route add 10.96.0.0/16 dev lo src 10.244.0.1",
        ):
            subprocess.run(["ip", "-n", name, *words.split()], check=True)
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


def answering(network: str, address: str) -> socket.socket:
    """A listener on an endpoint that sends its own address to each client."""
    listener = open_socket_in(network, socket.socket)
    listener.bind((address, 8080))
    listener.listen()

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client:
                client.sendall(address.encode())

    threading.Thread(target=serve, daemon=True).start()
    return listener


def answer(network: str, address: str, port: int) -> str:
    with open_socket_in(network, socket.socket) as client:
        client.settimeout(5)
        client.connect((address, port))
        return client.recv(100).decode()


def is_ready() -> bool:
    try:
        with urllib.request.urlopen(READY, timeout=2) as page:
            return bool(page.status == 200)
    except OSError:
        return False


def test_the_line_of_the_readme_programs_the_examples(network: str, tmp_path: Path) -> None:
    log, control = tmp_path / "log", tmp_path / "control.sock"
    (tmp_path / "hashsize").write_text("1024\n", encoding="ascii")
    # The only sysctl of the whole machine that it would change.
    script = 'mount --bind "$1" /sys/module/nf_conntrack/parameters/hashsize; shift; exec "$@"'
    command = ["ip", "netns", "exec", network, "sh", "-ec", script, "sh", str(tmp_path / "hashsize")]
    command += [proxy_command(), *line_of_the_readme(), f"--control-socket={control}"]
    with log.open("wb") as output:
        proxy = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
    listeners = [answering(network, address) for address in ("10.244.0.10", "10.244.0.11")]
    try:
        until = time.monotonic() + 60
        while not run_in(network, is_ready):
            assert proxy.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        assert {answer(network, "10.96.0.80", 80) for _ in range(40)} == {"10.244.0.10", "10.244.0.11"}
        asked = ["ip", "netns", "exec", network, proxy_command(), "services", "--control-socket", str(control)]
        services = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        assert [row.split()[:3] for row in services.splitlines()[1:]] == [
            ["default/web", "programmed", "2"],
            ["kube-system/dns", "programmed", "1"],
        ]
        # The examples contain no mistake.
        assert not re.findall(r"^[WE]\d{4} .*(?:Service|EndpointSlice|manifest).*", log.read_text(), re.M)
    finally:
        proxy.terminate()
        assert proxy.wait(30) == 0
        for listener in listeners:
            listener.close()
