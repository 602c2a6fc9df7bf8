"""A mode is a folder, an entry in the list, and its configuration: this test adds a fifth mode in memory."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from kubeproxy.backends.mode import Abilities, Deprecation, FlowsEnd, Metric, Mode, Operations
from kubeproxy.config.load import load_file
from kubeproxy.config.messages import Mistake
from kubeproxy.config.modes import MODES, ModeConfig
from kubeproxy.config.options import Options
from kubeproxy.errors import ConfigError
from kubeproxy.model.addresses import unpack
from kubeproxy.program import app
from kubeproxy.report.events import EventRecorder
from kubeproxy.setup import host, modes

ROOM = "kubeproxy.backends.memory"
OLD = Deprecation("MemoryDeprecation", "Memory fades")
FILE = """
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: memory
hostnameOverride: node-a
iptables: {{masqueradeBit: 5, syncPeriod: {period}}}
"""
SERVICE = """
apiVersion: v1
kind: Service
metadata: {name: web, namespace: default, uid: u}
spec: {clusterIP: 10.96.0.10, clusterIPs: [10.96.0.10], ports: [{port: 80, protocol: TCP}]}
"""


class MemoryBackend:
    """A backend that stores the plans of one family."""

    abilities = Abilities()

    def __init__(self, family, written):
        self.family = family
        self.plans = {}
        self._written = written

    def set_world(self, world):
        return True

    def sync(self, changes):
        for name, plans in changes:
            self.plans[name] = plans
            self._written.inc()
        yield len(changes)

    def resync(self, wanted):
        self.plans.clear()
        yield from self.sync(list(wanted.items()))

    def inspect(self, depth):
        return None

    def upkeep(self): ...

    def close(self): ...


class MemoryConfig(ModeConfig, frozen=True, kw_only=True):
    def mistakes(self, config):
        if config.iptables.sync_period > 60:
            yield Mistake("iptables.syncPeriod", "is too long for the memory")


@pytest.fixture
def memory(monkeypatch):
    """Return the backends that the mode opens, after its registration."""
    opened = []

    def open_all(config, world, registry):
        written = registry.counter("memory_written_total", "Services written").labels()
        opened.extend(MemoryBackend(family, written) for family in world.families)
        return opened

    config = MemoryConfig(name="memory", syncs="iptables", masquerades="iptables", flags={})
    refusals = Metric("memory_refusals_total", "Syncs that the memory refused")
    mode = Mode(config, ROOM, interface="memory0", flows_end=FlowsEnd.PROXY, refusals=refusals, deprecation=OLD)
    nothing = lambda config, families: None  # noqa: E731
    operations = Operations(check=nothing, look=nothing, weigh=None, open=open_all, examine=None)
    monkeypatch.setitem(MODES, config.name, config)
    monkeypatch.setitem(sys.modules, ROOM, SimpleNamespace(MODE=mode))
    monkeypatch.setitem(sys.modules, f"{ROOM}.mode", SimpleNamespace(OPERATIONS=operations))
    monkeypatch.setitem(sys.modules, f"{ROOM}.cleanup", SimpleNamespace(cleanup=lambda keeps: ["memory leaks"]))
    return opened


def configured(tmp_path, period="30s"):
    file = tmp_path / "config.conf"
    file.write_text(FILE.format(period=period))
    return replace(load_file(file), healthz_bind_address="", metrics_bind_address="")


def test_it_is_programmed_by_the_program_as_any_other(memory, tmp_path, monkeypatch):
    monkeypatch.setattr(modes, "remove_others", lambda mode: [])  # the test must not touch this machine's rules
    monkeypatch.setattr(host, "tune", lambda *_: None)  # nor its sysctls
    events = []
    monkeypatch.setattr(EventRecorder, "record", lambda recorder, *event: events.append(event[1:]))
    folder = tmp_path / "manifests"
    folder.mkdir()
    (folder / "web.yaml").write_text(SERVICE)
    config = configured(tmp_path)
    mode = modes.named(config.active_mode)

    async def run():
        output = SimpleNamespace(handler=SimpleNamespace(buffered=False, flush=lambda: None))
        options = Options(config=config, manifests=str(folder))
        opened = app.opened(options, host.settings(config), mode, output, lambda files, plugin: None)
        async with asyncio.timeout(30), opened as program:
            running = asyncio.create_task(program.run())
            await program._engine.ready.wait()
            program._lifetime.stop(0)
            assert await running == 0
        return program._metrics.render().decode()

    metrics = asyncio.run(run())
    (plan,) = memory[0].plans["default", "web"]
    assert unpack(plan.frontends[0].address) == "10.96.0.10"
    assert "\nmemory_written_total " in metrics
    assert '\nmemory_refusals_total{ip_family="IPv4"} 0\n' in metrics  # nothing was refused
    assert "\nkubeproxy_ready 1\n" in metrics
    assert '\nkubeproxy_services{ip_family="IPv4"} 1\n' in metrics
    assert ("Warning", "MemoryDeprecation", "StartKubeProxy", "Memory fades") in events


def test_the_configured_value_is_used(memory, tmp_path):
    config = configured(tmp_path)
    assert (config.masquerades.masquerade_bit, config.syncs.sync_period) == (5, 30)
    with pytest.raises(ConfigError, match=r"iptables\.syncPeriod: is too long for the memory"):
        configured(tmp_path, period="2m")


def test_other_modes_recognise_its_interface_and_remove_its_leftovers(memory, monkeypatch):
    assert "memory0" in modes.interfaces()
    monkeypatch.setattr(modes, "MODES", {name: MODES[name] for name in ("nftables", "memory")})
    assert modes.remove_others(modes.named("nftables")) == ["memory leaks"]
