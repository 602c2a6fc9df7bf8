"""Shell completion of `kubectl kubeproxy`: the program kubectl_complete-kubeproxy, which prints cobra's format."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final

from kubeproxy.cluster.kubectl import Items, Kubectl, NamedResource
from kubeproxy.cluster.main import parser
from kubeproxy.commands.completion import arguments_at
from kubeproxy.errors import KubeProxyError

TIMEOUT: Final = 3.0
"""Seconds to wait for the API server after the user presses Tab."""
_NO_FILES: Final = ":4"
"""The last line (cobra's ShellCompDirectiveNoFileComp), which keeps the shell from proposing files."""
_KINDS: Final = {"CLIENT": ("pod", "node"), "TARGET": ("svc", "node"), "NAME": ("svc",)}
_RESOURCES: Final = {"pod": "pods", "svc": "services", "node": "nodes"}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the continuations of a command line with an incomplete last word; return the exit code."""
    *before, last = (sys.argv[1:] if argv is None else argv) or [""]
    found = [one for one in following(before) if one.startswith(last)]
    sys.stdout.writelines(f"{one}\n" for one in (*found, _NO_FILES))
    return 0


def following(before: Sequence[str]) -> Iterable[str]:
    """Return the possible continuations of these words."""
    (commands,) = (one for one in parser()._actions if isinstance(one, argparse._SubParsersAction))
    if not before:
        return list(commands.choices)
    command = commands.choices.get(before[0])
    if command is None:
        return ()
    pending, positional = arguments_at(command, before[1:])
    namespace = next((value for flag, value in pairwise(before) if flag in {"-n", "--namespace"}), "")
    if pending is not None:
        return pending.choices or (_names("node", namespace) if pending.dest == "node" else ())
    kinds = _KINDS[str(positional.metavar)] if positional is not None else ()
    return [*command._option_string_actions, *(f"{kind}/{name}" for kind in kinds for name in _names(kind, namespace))]


def _names(kind: str, namespace: str) -> Iterator[str]:
    try:
        found = Kubectl((), TIMEOUT).get(Items[NamedResource], _RESOURCES[kind], namespace=namespace)
    except KubeProxyError:
        return
    yield from (one.metadata.name for one in found.items)
