"""For any names of objects, iptables gets the same rules: external texts end no comment, no line and no table."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kubeproxy.backends.iptables.found import read
from kubeproxy.kernel.xtables import xtables
from kubeproxy.model.addresses import Family
from kubeproxy.model.objects import EndpointPort, ServicePort
from support.cluster_objects import HERE, endpoint, parsed, service
from support.compiled import compile_service
from support.effort import examples
from support.fake_tables import backend as fake_backend
from support.iptables_kernel import OPTIONS, WORLD
from support.own_network import own_network

WORDS = (
    'a" -j ACCEPT\nCOMMIT\n*filter\n-F\nCOMMIT\n', "\n-A INPUT -j ACCEPT", "'", "\\", "`id`", "$(id)", ";", "-j",
    "x\0y", "\r", "A" * 5000, "\u2028-A", "ä" * 300, "\ud800", "!", "# ", "*nat", "a b", "%s",
    "", "\x7f\x1b[2J", "COMMIT",
)  # fmt: skip
words = st.one_of(
    st.sampled_from(WORDS), st.text(max_size=300), st.text(st.sampled_from("\"'\\\n;-AjJ *:#COMIT\0"), max_size=40)
)


def restored(variant: str, namespace: str, name: str, port: str, node: str):
    """Write Services that contain these texts, each with rules of another kind; return the kernel's rules."""
    state = {}
    for number, spec in enumerate(
        (
            {},
            {"external_traffic_policy": "Local", "session_affinity": "ClientIP", "external_ips": ["203.0.113.1"]},
            {"ingress": ["198.51.100.1"], "load_balancer_source_ranges": ["192.0.2.0/24"]},
        ),
        1,
    ):
        known = f"{name}{number}"
        ports = [ServicePort(port=80, node_port=30000 + number, name=port)]
        subject = service(known, f"10.96.0.{number}", namespace=namespace, ports=ports, **spec)
        members = [endpoint(f"10.244.0.{number}", HERE), endpoint(f"10.244.1.{number}", node)]
        slices = [parsed(*members, family="IPv4", ports=[EndpointPort(port=80, name=port)])] if number > 0 else []
        plans = compile_service(subject, slices, WORLD).plans
        state[namespace, known] = tuple(plan for plan in plans if plan.key.family is Family.IPV4)
    made = fake_backend(WORLD, Family.IPV4, options=OPTIONS)
    list(made.resync(state))
    commands = xtables.variant_commands(Family.IPV4, variant)
    with own_network():
        for text in made.tables.inputs:
            commands.restore([text])
        tables = {table: read(commands, table, lambda _: True) for table in ("filter", "nat", "mangle")}
        return {name: {chain: table.present(chain) for chain in table.chains} for name, table in tables.items()}


def shape(tables) -> list[object]:
    """Return the rules without comments and without chains' names, which are hashes of the texts."""
    plain = re.compile(r'-m comment --comment (?:"[^"]*"|\S+)[ \n]|KUBE-(?:SVC|SVL|EXT|FW|SEP)-[A-Z2-7]{16}|--name \S+')
    return [(table, sorted(len(r) for r in c.values()), sorted(plain.sub("", r) for rs in c.values() for r in rs))
            for table, c in tables.items()]  # fmt: skip


@pytest.mark.parametrize("kind", ["nft", "legacy"])
@examples(12)
@given(words, words, words, words)
@example(WORDS[0], WORDS[0], WORDS[0], WORDS[0])
@example(WORDS[1], "w" * 5000, WORDS[11], "\n")
@example("ä" * 200, "\ud800", "\0", "\0")
def test_names_change_no_rule_but_by_their_hash(kind: str, namespace: str, name: str, port: str, node: str) -> None:
    assert shape(restored(kind, namespace, name, port, node)) == shape(restored(kind, "default", "web", "p", "node-b"))
