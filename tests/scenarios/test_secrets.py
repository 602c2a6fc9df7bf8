"""No secret appears in the proxy's logs, answers or requests, in any kind of failure."""

from __future__ import annotations

import base64
import stat
from pathlib import Path

import pytest
import yaml

from lab.netns import run_in_async
from lab.probes import http_get
from lab.proxyprocess import METRICS_PORT, proxy_command
from support.live import Live
from support.scripted import TLS

PAGES = (
    "/healthz", "/livez", "/readyz", "/metrics", "/metrics/slis", "/proxyMode", "/configz", "/statusz", "/flagz",
    "/debug/state", "/debug/pprof/", "/debug/pprof/cmdline", "/debug/pprof/goroutine?debug=2",
    "/debug/pprof/profile?seconds=1", "/ui/", "/ui/api/facts", "/ui/api/services", "/ui/api/service?name=default/web",
    "/ui/api/journal",
)  # fmt: skip
COMMANDS = (
    ["doctor"],
    ["services"],
    ["services", "default/web", "-o", "json"],
    ["why", "10.244.0.2", "web"],
    ["verify"],
    ["changes"],
)
PASSWORD = "a-password-of-somebody"
KEY = (TLS / "client.key").read_bytes()


def kubeconfig(live: Live, path: Path, user: dict[str, object]) -> Path:
    """The node's kubeconfig with every possible kind of secret in its user."""
    config = yaml.safe_load(live.cluster.node_kubeconfig.read_text(encoding="utf-8"))
    certificate = base64.b64encode((TLS / "client.crt").read_bytes()).decode()
    pair = {"client-certificate-data": certificate, "client-key-data": base64.b64encode(KEY).decode()}
    config["users"] = [{"name": "lab", "user": {**pair, **user}}]
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(config))
    return path


async def shown(live: Live) -> dict[str, str]:
    """Return every text that the proxy shows to others, by place."""
    found = {"log": live.proxy.log.read_text(errors="replace")}
    for port in (METRICS_PORT, 10256):
        for page in PAGES:
            ask = lambda page=page, port=port: http_get("127.0.0.1", port, page, 10.0)  # noqa: E731
            status, body = await run_in_async(live.proxy.namespace, ask)
            found[f"{port}{page}"] = f"{status} {body.decode(errors='replace')}"
    for command in COMMANDS:
        found[" ".join(command)] = (await live.ask(*command))[1]
    found["events"] = str([record.decode() for record in live.cluster.store.records("events")])
    return found | {name: of_process(live, name) for name in ("cmdline", "environ")}


def of_process(live: Live, name: str) -> str:
    return Path(f"/proc/{live.proxy.pid}/{name}").read_bytes().decode(errors="replace")


@pytest.mark.slow("each command, page and log")
async def test_secrets_are_in_nothing_that_is_shown(bare: Live, tmp_path: Path) -> None:
    token = bare.cluster.server.tokens.issue("system:kube-proxy")
    path = kubeconfig(bare, tmp_path / "kubeconfig", {"token": token})
    secrets = [token, PASSWORD, base64.b64encode(KEY).decode()[:60], *KEY.decode().splitlines()[1:3]]
    bare.service("web", "a1")
    await bare.start(
        {"clientConnection": {"kubeconfig": str(path)}, "enableProfiling": True}, ["-v=10"], ["env", proxy_command()]
    )

    async def hidden() -> dict[str, str]:
        found = await shown(bare)
        told = [(where, secret) for where, text in found.items() for secret in secrets if secret in text]
        assert told == []
        return found

    found = await hidden()
    answered = [where for where, text in found.items() if text.startswith("200 ")]
    assert len(answered) >= len(PAGES) - 1, [(where, text[:80]) for where, text in found.items()]
    a_socket_and_its_folder_are_the_owners_alone(bare)

    bare.cluster.server.tokens.end(token, 0.0)
    bare.cluster.server.end_watches()
    await bare.until(lambda: bare.cluster.server.tokens.refused, "a refused token")
    await bare.until(lambda: bare.logged("401|nauthorized"), "a word of it")
    await hidden()
    await bare.proxy.stop()

    plugin = tmp_path / "plugin"
    plugin.write_text(f'#!/bin/sh\nprintf \'{{"status":{{"token":"{PASSWORD}"}}\'\n')
    plugin.chmod(0o700)
    exec_config = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(plugin)}
    wrong_users: list[dict[str, object]] = [
        {"token": f"{token}\n{PASSWORD}"},
        {"token": token, "username": "me", "password": PASSWORD},
        {"token": token, "client-key-data": f"{PASSWORD}!"},
        {"exec": exec_config | {"env": [{"name": "SECRET", "value": PASSWORD}]}},
    ]
    for number, user in enumerate(wrong_users):
        wrong = kubeconfig(bare, tmp_path / f"wrong-{number}", user)
        connection = {"clientConnection": {"kubeconfig": str(wrong)}}
        proxy = await bare.start(connection, ["-v=10"], ["env", proxy_command()], ready_within=None)
        await bare.until(lambda name=wrong.name: bare.logged(rf"{name}: users\[lab\]"), "a word of what is wrong")
        await proxy.stop()
        log = proxy.log.read_text(errors="replace")
        assert [secret for secret in secrets if secret in log] == []


def a_socket_and_its_folder_are_the_owners_alone(live: Live) -> None:
    folder = Path(f"/proc/{live.proxy.pid}/root{live.proxy.control.parent}")
    modes = [stat.S_IMODE(place.stat().st_mode) for place in (folder, folder / live.proxy.control.name)]
    assert modes == [0o700, 0o600]
