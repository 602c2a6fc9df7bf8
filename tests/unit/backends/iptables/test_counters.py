"""Packet counters of iptables mode: created, unsupported, or temporarily unavailable."""

from __future__ import annotations

import errno

import pytest

from kubeproxy.backends.iptables.metrics import make_counters
from kubeproxy.backends.iptables.skeleton import StartOptions
from kubeproxy.kernel.netlink.protocol import Netlink, NetlinkError
from kubeproxy.kernel.xtables import xtables
from kubeproxy.model.addresses import Family
from support.fake_tables import Told, backend
from support.iptables_kernel import WORLD


@pytest.fixture
def answers(monkeypatch):
    """The kernel's errors for the creation of a counter in turn, then 0."""
    made: list[int] = []

    class Link:
        refusal = NetlinkError

        def __enter__(self):
            return self

        def __exit__(self, *error): ...

        request = Netlink.request

        def requests(self, *_):
            return [(made.pop(0) if made else 0, "")]

    monkeypatch.setattr(Netlink, "open", lambda *_: Link())
    return made


@pytest.mark.parametrize(
    ("code", "there"),
    [(0, True), (errno.EEXIST, True), (errno.EBUSY, True), (errno.EINVAL, False), (errno.EOPNOTSUPP, False)],
)
def test_a_kernel_has_them_or_not(answers, code, there):
    answers.append(code)
    assert xtables.ensure_counter("x") is there


@pytest.mark.parametrize("code", [errno.ENOBUFS, errno.ENOMEM, errno.EPERM])
def test_a_refusal_for_another_reason_is_no_property_of_the_kernel(answers, code):
    answers.extend([code, code])
    with pytest.raises(NetlinkError):
        xtables.ensure_counter("x")
    assert make_counters(Told()) is None


def test_each_full_sync_asks_again_until_the_kernel_answers(answers):
    made = backend(WORLD, Family.IPV4, options=StartOptions(True, False, None))

    def counting() -> list[str]:
        list(made.resync({}))
        return [rule for rules in made.tables.chains.values() for rule in rules if "nfacct" in rule]

    answers.append(errno.ENOBUFS)
    assert counting() == []
    assert counting() != []
