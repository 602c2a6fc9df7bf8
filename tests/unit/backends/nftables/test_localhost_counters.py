"""A scrape reads the counters of refused packets: one read of the table per family, over one socket."""

from __future__ import annotations

from kubeproxy.backends.nftables import localhost
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.netlink import protocol
from kubeproxy.model.addresses import Family


class Link:
    """A socket that records its opening and closing."""

    opened = closed = 0

    @classmethod
    def open(cls):
        cls.opened += 1
        return cls()

    def close(self):
        type(self).closed += 1


def test_a_scrape_reads_the_table_once(monkeypatch):
    monkeypatch.setattr(Link, "opened", 0)
    monkeypatch.setattr(Link, "closed", 0)
    monkeypatch.setattr(protocol, "Netlink", Link)
    answers = [{"localhost-udp": 1}, {"localhost-udp": 2, "localhost-tcp": 3}, ApplyError("no"), {"localhost-udp": 4}]

    def packets(_):
        answer = answers.pop(0)
        if isinstance(answer, ApplyError):
            raise answer
        return answer

    monkeypatch.setattr(localhost.TableReader, "counter_packets", packets)
    counters = localhost.TableCounters(Family.IPV4)
    scrapes = [[counters.packets(name) for name in ("localhost-tcp", "localhost-udp")] for _ in range(4)]
    assert scrapes == [[0, 1], [3, 2], [0, 0], [0, 4]]
    assert (Link.opened, Link.closed) == (2, 1)
