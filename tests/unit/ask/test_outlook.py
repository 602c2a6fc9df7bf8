"""The settings that `kube-proxy plan` takes from the running proxy."""

from types import SimpleNamespace

import pytest

from kubeproxy.ask import outlook as plan
from kubeproxy.config.fields import DetectLocal
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.features import BALANCING
from kubeproxy.kernel.route import NetworkInterface
from kubeproxy.model.plan import FamilyGlobals, Globals
from kubeproxy.setup import modes


@pytest.mark.parametrize(
    ("now", "new", "named"), [("", "nosuch0", True), ("", "cbr0", False), ("nosuch0", "nosuch0", False)]
)
def test_an_interface_of_pods_that_is_not_there_is_named(now, new, named, monkeypatch):
    monkeypatch.setattr(plan.route, "interfaces", lambda: [NetworkInterface(2, "cbr0", True, True, True)])

    def by(name):
        return KubeProxyConfiguration(
            detect_local_mode="BridgeInterface", detect_local=DetectLocal(bridge_interface=name)
        )

    text = "pods of this node count as outside: there is no interface nosuch0 (detectLocal.bridgeInterface)"
    assert plan._unmet(by(now), by(new)) == [text] * named


@pytest.mark.parametrize(
    ("now", "new", "said"),
    [
        ("0.0.0.0:10256", "127.0.0.1:10256", "answer on 127.0.0.1:10256, no longer on 0.0.0.0:10256"),
        ("0.0.0.0:10256", "", "answer on no address, no longer on 0.0.0.0:10256"),
        ("0.0.0.0:10256", "0.0.0.0:10256", ""),
        ("", "0.0.0.0:10256", ""),
    ],
)
def test_another_address_of_the_nodes_health_is_named(now, new, said):
    old, other = (KubeProxyConfiguration(healthz_bind_address=one) for one in (now, new))
    found = plan._moved(old, other)
    assert (len(found), found[0].endswith(said) if said else found) == (bool(said), True if said else [])


@pytest.mark.parametrize("entries", [0, 5000])
def test_another_configuration_leaves_the_flag_of_balancing_as_it_is(entries, monkeypatch):
    """The setting is separate from the configuration; 0 disables annotations, which differs from a full table."""
    monkeypatch.setattr(
        plan.host, "supported", lambda families, primary, look: SimpleNamespace(families=families, lack="")
    )
    now = BALANCING.on(Globals("node", ipv4=FamilyGlobals()), entries)
    facts = SimpleNamespace(world=now, node=None)
    new = KubeProxyConfiguration(mode="nftables", hostname_override="node")
    settings, _, _ = plan.settings_for(facts, new, modes.named("nftables"))
    world, _ = plan.world_for(facts, settings, {})
    assert BALANCING.value(world) == entries
