"""The relay of NodePorts on loopback takes nothing away from the backend that it stands beside."""

from __future__ import annotations

from kubeproxy.backends.nftables.localhost import RelayingBackend
from kubeproxy.engine.engine import Progress
from support.nftables_plans import WORLD


def test_a_full_sync_says_how_far_it_is(ground):
    backend = RelayingBackend(ground.start(), relay=None, world=WORLD)
    assert str(Progress(backend, 3)) == "Programming 0 of 3 Services, IPv4"
