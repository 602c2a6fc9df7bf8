"""Commands on a machine other than the node in question: one line with the command to use, and no findings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kubeproxy.ask.checks import whereabouts
from kubeproxy.ask.checks.whereabouts import elsewhere, must_be_here
from kubeproxy.errors import NoAnswerError
from support.cluster_objects import HERE, address, node_object

OURS, THEIRS = "192.0.2.1", "192.0.2.9"
ASKED = "kubectl kubeproxy doctor"


def node_of(**fields: Any) -> Any:
    facts = {"node": None, "world": SimpleNamespace(node_name=HERE), "reach": SimpleNamespace(nodes_listed=True)}
    known = {"running": False, "proxies": [], "facts": SimpleNamespace(**facts)}
    return SimpleNamespace(**known | fields)


def of_node(ip: str) -> Any:
    return SimpleNamespace(node=node_object(HERE, ("InternalIP", ip)), world=SimpleNamespace(node_name=HERE))


@pytest.mark.parametrize(
    ("node", "rules", "kubelet", "what", "fix"),
    [
        pytest.param(
            node_of(facts=of_node(THEIRS)),
            True,
            True,
            f"this machine is not Node {HERE}: it has none of the Node's addresses {THEIRS}",
            f"ask its proxy: `{ASKED} --node {HERE}`; if this machine is that Node, have the kubelet register",
            id="another Node's addresses, whatever rules are here",
        ),
        pytest.param(node_of(facts=of_node(OURS)), False, False, "", "", id="this Node, without rules"),
        pytest.param(node_of(facts=of_node(THEIRS), running=True), True, True, "", "", id="a running proxy"),
        pytest.param(
            node_of(),
            False,
            True,
            f"this machine is no node: there is no Node {HERE}, no kube-proxy runs, and the kernel has no rules of "
            f"a kube-proxy",
            "if this machine is a node, give the name of its Node with --hostname-override",
            id="no Node, no rules",
        ),
        pytest.param(node_of(), True, False, "", "", id="a wrong name of a machine with rules"),
        pytest.param(node_of(proxies=[1]), False, False, "", "", id="a wrong name of a machine with a proxy"),
        pytest.param(
            node_of(facts=None), False, False, "this machine is no node: no kubelet runs here", ASKED, id="no objects"
        ),
        pytest.param(node_of(facts=None), False, True, "", "", id="no objects, and a kubelet"),
    ],
)
def test_this_machine(
    node: Any, rules: bool, kubelet: bool, what: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whereabouts, "own_addresses", lambda: {address(OURS)})
    monkeypatch.setattr(whereabouts, "_has_rules", lambda _: rules)
    monkeypatch.setattr(whereabouts.processes, "named", lambda _: kubelet)
    found = elsewhere(node, ASKED)
    if not what:
        assert found is None
        must_be_here(node, ASKED)
        return
    assert found is not None
    assert found.what.startswith(what)
    assert fix in found.fix
    with pytest.raises(NoAnswerError, match=r"\. Fix: ask "):
        must_be_here(node, ASKED)
