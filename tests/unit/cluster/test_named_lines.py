"""Names of pods and nodes are inserted after addresses in texts, and not into rules and commands that a user copies."""

from __future__ import annotations

import pytest

from kubeproxy.cluster.names import named

KNOWN = {"10.244.0.10": "default/a1", "fd00::7": "node node-a"}


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("to 10.244.0.10:3000 on node-a", "to 10.244.0.10:3000 (default/a1) on node-a"),
        ("from [fd00::7]:80/tcp", "from [fd00::7]:80/tcp (node node-a)"),
        ("see `ping 10.244.0.10`: to 10.244.0.10", "see `ping 10.244.0.10`: to 10.244.0.10 (default/a1)"),
        (
            'dropped by rule "iifname "eth0" ip daddr 10.244.0.10 drop" of 10.244.0.10',
            'dropped by rule "iifname "eth0" ip daddr 10.244.0.10 drop" of 10.244.0.10 (default/a1)',
        ),
        ("to 10.244.0.10:80/tcp: it waits", "to 10.244.0.10:80/tcp (default/a1): it waits"),
        ("for 10.244.0.10: it waits", "for 10.244.0.10 (default/a1): it waits"),
        ("not fd00::7:8 or 10.244.0.10/32", "not fd00::7:8 or 10.244.0.10/32"),
        ('an open " before 10.244.0.10', 'an open " before 10.244.0.10 (default/a1)'),
        ("not 10.244.0.0/16, 10.244.0.10.5 or 10.244.0.101", "not 10.244.0.0/16, 10.244.0.10.5 or 10.244.0.101"),
    ],
)
def test_a_name_follows_each_address_outside_of_quotes_and_backticks(line: str, shown: str):
    assert named(line, KNOWN) == shown
