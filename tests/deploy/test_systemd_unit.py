"""The systemd unit: its protection of the host leaves the proxy everything that it needs."""

from support.places import ROOT

UNIT = ROOT / "deploy/systemd/kube-proxy.service"


def settings():
    lines = (line.partition("=") for line in UNIT.read_text().splitlines() if not line.startswith(("#", "[")))
    return {name: value for name, _, value in lines if name}


def test_the_modules_of_the_kernel_can_be_looked_up_but_not_loaded():
    """ipvs mode looks for built-in modules under /lib/modules, which ProtectKernelModules= hides."""
    found = settings()
    assert "ProtectKernelModules" not in found
    assert found["CapabilityBoundingSet"] == "CAP_NET_ADMIN"
    assert found["SystemCallFilter"] == "@system-service"  # no call of @module
