"""No constructor opens a socket, starts a thread or reads addresses: only methods have these effects."""

import ast
from pathlib import Path

import pytest

import kubeproxy

SOURCES = sorted(Path(kubeproxy.__file__).parent.rglob("*.py"))
OPENING = {
    *("socket", "socketpair", "create_connection", "create_server", "epoll", "pipe", "pipe2", "inotify_init1"),
    *("open", "open_connection", "start", "Popen", "new_event_loop"),
    *("local_addresses", "link_addresses", "if_nameindex", "getaddrinfo", "listen"),
}


def calls(function):
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            yield node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def constructors(tree):
    """Yield each constructor, with its calls, including calls in the methods of its class."""
    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        methods = {node.name: set(calls(node)) for node in owner.body if isinstance(node, ast.FunctionDef)}
        reached, left = set(), ["__init__"]
        while left:
            name = left.pop()
            called = methods.pop(name, set())
            reached |= called
            left += called & methods.keys()
        yield owner.name, reached


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: "/".join(path.parts[-2:]))
def test_constructors_open_nothing(path):
    found = {name: reached & OPENING for name, reached in constructors(ast.parse(path.read_text()))}
    assert {name: reached for name, reached in found.items() if reached} == {}
