"""Reads the command line of a subcommand, runs it, and turns errors into the exit code for "unknown"."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from kubeproxy.commands import UNKNOWN
from kubeproxy.commands.parsers import parser_of
from kubeproxy.errors import KubeProxyError
from kubeproxy.kernel.proc.capability import raise_net_admin


def run(argv: Sequence[str]) -> int:
    """Run the subcommand named by the first word; return the exit code."""
    name = argv[0]
    raise_net_admin()
    try:
        command = import_module(f"kubeproxy.commands.{name}")
        gc.freeze()  # modules are no garbage: searching them at the exit takes a fifth of a short command's CPU time
        status: int = command.run(parser_of(name).parse_args(argv[1:]))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe early, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNKNOWN
    except KubeProxyError as error:
        from kubeproxy.commands.output import shown  # noqa: PLC0415 - completion must start fast

        print(f"Error: {shown(str(error))}", file=sys.stderr)
        return UNKNOWN
    except KeyboardInterrupt:
        return UNKNOWN
    return status
