"""The startup taint is removed once, and no other taint with it, for any answers of the API server."""

from __future__ import annotations

import asyncio
import json

import pytest

from kubeproxy.errors import SourceError
from kubeproxy.model.objects import Node, NodeSpec, ObjectMeta, Taint
from kubeproxy.program import startup_taint
from kubeproxy.program.startup_taint import removal
from lab.apiserver.patching import JSON_PATCH, apply_patch
from lab.apiserver.status import ApiError

KEY = "kube-proxy-py/not-ready"


def node(*keys: str) -> Node:
    return Node(ObjectMeta(name="node-a"), NodeSpec(taints=[Taint(key) for key in keys]))


def raw(*keys: str) -> dict[str, object]:
    return {"spec": {"taints": [{"key": key, "effect": f"Effect{n}"} for n, key in enumerate(keys)]}}


@pytest.mark.parametrize(
    ("keys", "left"),
    [((KEY,), ()), (("a", KEY, "b"), ("a", "b")), ((KEY, "a", KEY), ("a",)), (("a", KEY), ("a",))],
)
def test_the_patch_removes_this_key_alone(keys, left):
    patch = removal(node(*keys), KEY)
    changed = apply_patch(("v1", "Node"), raw(*keys), json.loads(patch), JSON_PATCH)
    assert tuple(taint["key"] for taint in changed["spec"]["taints"]) == left


@pytest.mark.parametrize("now", [(), ("a",), ("b", "a"), (KEY, "a", "b")])
def test_a_patch_for_another_state_changes_nothing(now):
    with pytest.raises(ApiError):
        apply_patch(("v1", "Node"), raw(*now), json.loads(removal(node("a", KEY), KEY)), JSON_PATCH)


@pytest.mark.parametrize("empty", [Node(ObjectMeta(name="a")), node(), node("a", f"{KEY}-not")])
def test_a_node_without_the_taint_is_not_changed(empty):
    assert removal(empty, KEY) is None


class Api:
    """A client that returns answers in turn; its watch shows these Nodes one after the other."""

    def __init__(self, answers, nodes) -> None:
        self.answers = list(answers)
        self.nodes = list(nodes)
        self.patches = []
        self.told = []

    def node(self):
        return self.nodes.pop(0) if len(self.nodes) > 1 else self.nodes[0]

    async def patch(self, path, body):
        self.patches.append((path, json.loads(body)))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def tell(self, kind, reason, note):
        self.told.append((kind, reason, note))

    def remove(self):
        work = startup_taint.remove(KEY, "node-a", self.node, self.patch, self.tell)
        asyncio.run(asyncio.wait_for(work, 10))
        return [(kind, reason) for kind, reason, _ in self.told]


REMOVED = ("Normal", "StartupTaintRemoved")
STAYS = ("Warning", "StartupTaintStays")


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(startup_taint, "FIRST_RETRY", 0.001)
    monkeypatch.setattr(startup_taint, "SLOWEST_RETRY", 0.002)


@pytest.mark.parametrize(
    ("answers", "nodes", "told", "patches"),
    [
        ([200], [node(KEY)], [REMOVED], 1),
        ([200], [None, None, node(KEY)], [REMOVED], 1),  # the Node is registered late
        ([422, 409, 200], [node(KEY), node("a", KEY)], [REMOVED], 3),
        ([404, 200], [node(KEY)], [REMOVED], 2),
        ([OSError("away"), SourceError("cut"), 503, 200], [node(KEY)], [STAYS, REMOVED], 4),
        ([403, 403, 200], [node(KEY)], [STAYS, STAYS, REMOVED], 3),
        ([422], [node(KEY), node("a")], [], 1),  # another program removed it
        ([], [node("a")], [], 0),
    ],
)
def test_it_is_tried_until_it_is_gone(answers, nodes, told, patches):
    api = Api(answers, nodes)
    assert api.remove() == told
    assert len(api.patches) == patches
    assert {path for path, _ in api.patches} <= {"/api/v1/nodes/node-a"}


def test_a_missing_right_is_reported_with_the_role_to_bind():
    api = Api([403, 200], [node(KEY)])
    api.remove()
    assert "kube-proxy-py-startup-taint" in api.told[0][2]
