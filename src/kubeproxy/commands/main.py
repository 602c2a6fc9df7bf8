"""Reads the command line of a subcommand, and runs it."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from importlib import import_module

from kubeproxy.commands import completed
from kubeproxy.commands.parsers import parser_of
from kubeproxy.kernel.proc.capability import raise_net_admin


def run(argv: Sequence[str]) -> int:
    """Run the subcommand named by the first word; return the exit code."""
    raise_net_admin()
    return completed(lambda: _run(*argv))


def _run(name: str, *words: str) -> int:
    command = import_module(f"kubeproxy.commands.{name}")
    gc.freeze()  # modules are no garbage: searching them at the exit takes a fifth of a short command's CPU time
    status: int = command.run(parser_of(name).parse_args(words))
    return status
