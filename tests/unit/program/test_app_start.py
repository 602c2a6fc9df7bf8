"""The order in which a start checks its permission, and changes the host."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from kubeproxy.api.source import Route
from kubeproxy.backends.mode import Abilities, Operations
from kubeproxy.config.options import Options
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.errors import ConfigError, Unsupported
from kubeproxy.model.addresses import Family
from kubeproxy.model.world import Settings
from kubeproxy.program import app
from kubeproxy.setup import host


class Sources:
    """A source that records its opening and closing."""

    post = None
    plugin = "login"
    reach = nodes = None

    def files(self):
        return ["/token"]

    def __init__(self, steps):
        self.steps, self.route = steps, Route()
        steps.append("sources")

    async def close(self):
        self.steps.append("sources closed")

    def node_timeout(self, needs_pod_cidrs):
        return 0.0


@pytest.fixture
def steps(monkeypatch):
    """The steps of a start, in order."""
    made = []
    monkeypatch.setattr(app, "open_sources", lambda *_: Sources(made))
    monkeypatch.setattr(host, "tune", lambda *_: made.append("sysctls"))
    return made


def start(steps, fails=None):
    """Create the program and end it; a backend may fail to open."""

    def opens(config, world, registry):
        steps.append("backends")
        if fails is not None:
            raise fails
        closing = {"abilities": Abilities(), "close": lambda: steps.append("closed")}
        return [SimpleNamespace(family=family, **closing) for family in world.families]

    operations = Operations(
        check=lambda *_: None,
        look=lambda *_: None,
        weigh=None,
        open=opens,
        examine=None,
        prepare=lambda _: steps.append("mode's sysctls"),
    )
    mode = SimpleNamespace(name="m", refusals=None, flows_end=None, operations=lambda: operations)
    output = SimpleNamespace(handler=SimpleNamespace(flush=lambda: None))

    async def run():
        settings = Settings(node_name="node-a", families=tuple(Family))
        options = Options(config=KubeProxyConfiguration(), config_file="/config")
        async with app.opened(
            options, settings, mode, output, lambda files, plugin: steps.append(("given up", files, plugin))
        ):
            steps.append("made")

    asyncio.run(run())


def test_the_host_is_touched_when_the_source_is_known_to_be_good(steps):
    start(steps)
    assert steps == [
        *["sources", "sysctls", "mode's sysctls", ("given up", ["/config", "/token"], "login"), "backends", "made"],
        *["closed", "closed", "sources closed"],
    ]


def test_a_source_that_cannot_be_opened_leaves_the_host_alone(steps, monkeypatch):
    def refuse(*_):
        raise ConfigError("clientConnection.kubeconfig: no such file")

    monkeypatch.setattr(app, "open_sources", refuse)
    with pytest.raises(ConfigError, match="no such file"):
        start(steps)
    assert steps == []


def test_open_resources_are_closed_when_the_start_fails(steps):
    with pytest.raises(Unsupported):
        start(steps, Unsupported("no such table"))
    assert steps[-1] == "sources closed"


def chosen(monkeypatch, mode, lacking):
    """Choose a mode on a node that lacks a requirement of these modes; return the mode's name."""

    def able(options):
        name = options.config.active_mode
        if name in lacking:
            raise Unsupported(f"no kernel for {name}")
        return options, SimpleNamespace(name=name), None

    monkeypatch.setattr(app, "_in_mode", able)
    return app._chosen(Options(config=KubeProxyConfiguration(mode=mode)))[1].name


@pytest.mark.parametrize(
    ("mode", "lacking", "runs"),
    [
        ("", (), "nftables"),
        ("", ("nftables",), "iptables"),
        ("nftables", (), "nftables"),
        ("ipvs", ("nftables",), "ipvs"),
    ],
)
def test_an_empty_mode_runs_iptables_mode_where_the_default_one_cannot_run(monkeypatch, caplog, mode, lacking, runs):
    assert chosen(monkeypatch, mode, lacking) == runs
    assert ("running iptables mode" in caplog.text) == (mode == "" and bool(lacking))


@pytest.mark.parametrize(("mode", "lacking"), [("nftables", ("nftables",)), ("", ("nftables", "iptables"))])
def test_a_named_mode_or_a_node_that_can_run_neither_is_refused_for_the_first_reason(monkeypatch, mode, lacking):
    with pytest.raises(Unsupported, match="no kernel for nftables"):
        chosen(monkeypatch, mode, lacking)
