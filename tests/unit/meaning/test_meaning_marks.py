"""Detection of other programs' chains that certainly drop a packet, if the result depends on the masquerade mark."""

from __future__ import annotations

from functools import partial

import pytest

from kubeproxy.meaning import iptables
from kubeproxy.meaning.firewall import Firewall, PassingPacket
from kubeproxy.meaning.rules import CompiledFor
from support.rulesets import PLACE

POD, END, FRONT = bytes((10, 244, 0, 2)), bytes((10, 244, 1, 10)), bytes((10, 96, 0, 1))
MARK = 0x4000
REQUEST = PassingPacket("forward", -1000, 1000, POD, END, 6, 3000, (FRONT, 80), ("cbr0", "eth0"), True)
RULES = """*filter
:FORWARD {policy} [0:0]
:KUBE-FORWARD - [0:0]
-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
{more}-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
COMMIT
"""
SETS = "-A FORWARD {} -j MARK --set-xmark 0x4000/0x4000\n-A FORWARD -m mark --mark 0x4000/0x4000 -j DROP\n"
CLOSED = "-A FORWARD -d 10.244.1.0/24 -j DROP\n"


def judged(packet: PassingPacket, more: str = "", policy: str = "ACCEPT") -> tuple[bool, bool]:
    """Return whether the chain FORWARD surely drops a packet, and whether it surely accepts it and all later ones."""
    text = RULES.format(more=more, policy=policy)
    table = Firewall("iptables", "ip", partial(iptables.compiled, text), lambda _: PLACE, whole=True)
    return bool(list(table.drops([packet]))), table.harmless([packet]) == {"FORWARD"}


@pytest.mark.parametrize(
    ("marks", "more", "policy", "wanted"),
    [
        ((0, 0), CLOSED, "ACCEPT", (False, False)),
        ((MARK, 0), CLOSED, "ACCEPT", (True, False)),
        ((MARK, MARK), CLOSED, "ACCEPT", (False, True)),
        ((MARK, 0), "", "DROP", (True, False)),
        ((MARK, MARK), "", "DROP", (False, True)),
        ((MARK, 0), "", "ACCEPT", (False, True)),
        # Other marks remain unknown, even if they contain the known bit.
        ((MARK, 0), "-A FORWARD -m mark ! --mark 0x1/0x1 -j DROP\n", "ACCEPT", (False, False)),
        ((MARK, 0), "-A FORWARD -m mark --mark 0x4000 -j ACCEPT\n", "DROP", (False, False)),
        ((MARK, MARK), "-A FORWARD -m connmark --mark 0x4000/0x4000 -j DROP\n", "ACCEPT", (False, True)),
        ((MARK, 0), "-A FORWARD -m connmark --mark 0x4000/0x4000 -j ACCEPT\n", "DROP", (False, False)),
        ((MARK, 0), "-A FORWARD -m mark --mark 0x4000/0x4000 -j DROP\n", "ACCEPT", (False, True)),
        # Rules that change the mark of all packets, or of an unknown part of them.
        ((MARK, 0), SETS.format("-m mark --mark 0x1/0x1"), "ACCEPT", (False, False)),
        ((MARK, 0), SETS.format("-m mark ! --mark 0x1/0x1"), "ACCEPT", (False, False)),
        ((MARK, 0), SETS.format("-p tcp"), "ACCEPT", (True, False)),
    ],
)
def test_the_mark_of_masquerading_is_known(marks, more, policy, wanted):
    assert judged(REQUEST._replace(marks=marks), more, policy) == wanted


def test_only_the_first_packet_of_a_connection_has_the_mark():
    # The rule is before the jump to KUBE-FORWARD, which accepts all later packets.
    text = RULES.format(more="", policy="ACCEPT").replace(
        "-A FORWARD -m comment", "-A FORWARD -m mark ! --mark 0x4000/0x4000 -j DROP\n-A FORWARD -m comment"
    )
    table = Firewall("iptables", "ip", partial(iptables.compiled, text), lambda _: PLACE, whole=True)
    first = REQUEST._replace(marks=(MARK, MARK))
    answer = first._replace(source=END, destination=POD, purpose=CompiledFor.ANSWER)
    assert [bool(list(table.drops([each]))) for each in (first, answer)] == [False, True]
    assert table.harmless([first]) == frozenset()
