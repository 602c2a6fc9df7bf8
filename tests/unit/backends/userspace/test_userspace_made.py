"""The backend of userspace mode before it programs anything: it accesses neither the kernel nor the node."""

from kubeproxy.backends.userspace.backend import UserspaceBackend
from kubeproxy.model.addresses import Family
from support.cluster_objects import world


def test_nothing_is_read_before_the_world_changes():
    reads = []

    def addresses():
        reads.append(1)
        return [bytes([192, 0, 2, 7])]

    backend = UserspaceBackend(Family.IPV4, world(), path=None, listeners=None, transactions=None, addresses=addresses)
    assert not reads
    assert backend.set_world(world()) is True  # the rules contain an address now
    assert backend.set_world(world()) is False
    assert len(reads) == 2
