"""The watch of iptables-nft: changes that arrive while an inspection checks earlier changes."""

from __future__ import annotations

from types import SimpleNamespace

from kubeproxy.backends.iptables import watch
from kubeproxy.backends.iptables.watch import NftWatch
from kubeproxy.kernel.nftables.changes import ForeignChanges
from kubeproxy.model.addresses import Family

OUTPUT, PREROUTING = ("nat", "OUTPUT"), ("nat", "PREROUTING")


class Announced:
    """Announced changes, in place of a ChangeMonitor."""

    def __init__(self) -> None:
        self.chains: set[tuple[str, str]] = set()

    def changes(self, *_: object) -> ForeignChanges:
        return ForeignChanges(True, frozenset(), bool(self.chains), frozenset(), frozenset(self.chains))

    def take(self, *_: object) -> ForeignChanges:
        found = self.changes()
        self.chains.clear()
        return found


def test_a_jump_that_is_removed_during_an_inspection_is_found_by_the_next(monkeypatch):
    others, removed = Announced(), set()
    commands = SimpleNamespace(family=Family.IPV4)
    seen = NftWatch(commands, SimpleNamespace(generation=lambda: 1), others)

    def has_jump(_family, table, chain, _target):
        if (table, chain) == PREROUTING and not removed:  # another program removes the jump of OUTPUT just now
            removed.add(OUTPUT)
            others.chains.add(OUTPUT)
        return (table, chain) not in removed

    monkeypatch.setattr(watch, "has_jump", has_jump)
    others.chains.add(PREROUTING)
    assert seen.inspect() is None
    assert seen.places == {PREROUTING}, "only these chains were checked"
    assert seen.touched()
    assert "OUTPUT" in seen.inspect().what
