"""Reads the command line of a subcommand, runs it, and turns errors into the exit code that says "could not tell"."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from kubeproxy.commands import ALONE, COMMANDS, HIDDEN, UNKNOWN
from kubeproxy.config.flags import BY_NAME
from kubeproxy.errors import KubeProxyError
from kubeproxy.kernel.proc.capability import raise_net_admin


def run(argv: Sequence[str]) -> int:
    """Run the subcommand that the first word names; return the exit code."""
    name = argv[0]
    raise_net_admin()
    try:
        status: int = import_module(f"kubeproxy.commands.{name}").run(parser_of(name).parse_args(argv[1:]))
        sys.stdout.flush()
    except BrokenPipeError:  # a reader that has seen enough, as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNKNOWN
    except KubeProxyError as error:
        from kubeproxy.commands.output import shown  # noqa: PLC0415 - what completes a line is waited for

        print(f"Error: {shown(str(error))}", file=sys.stderr)
        return UNKNOWN
    except KeyboardInterrupt:
        return UNKNOWN
    return status


def parser_of(name: str) -> argparse.ArgumentParser:
    """Return the parser of a subcommand's arguments."""
    module, about = import_module(f"kubeproxy.commands.{name}"), {**COMMANDS, **HIDDEN}[name]
    parser = argparse.ArgumentParser(
        prog=f"kube-proxy {name}",
        description=f"{about[0].upper()}{about[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=module.__doc__.partition("\n\n")[2] if module.__doc__ else None,
    )
    module.arguments(parser)
    if name not in ALONE:
        _source_arguments(parser)
    return parser


def _source_arguments(parser: argparse.ArgumentParser) -> None:
    """Add where the answer comes from: a running proxy, or objects that are read for this one question."""
    group = parser.add_argument_group("where to ask")
    socket = BY_NAME["control-socket"].default
    group.add_argument(
        "--control-socket", metavar="PATH", default=socket, help=f"the running proxy's (default {socket})"
    )
    group.add_argument("--manifests", metavar="FOLDER", help="ask no proxy: read the objects from these files")
    group.add_argument("--kubeconfig", metavar="FILE", help="ask no proxy: read the objects from this API server")
    group.add_argument("--config", metavar="FILE", help="with one of these: the proxy's configuration file")
    group.add_argument("--proxy-mode", metavar="MODE", help="with one of these: the mode, unless the file says it")
    group.add_argument("--hostname-override", metavar="NAME", help="with one of these: the Node, instead of this host")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="for people, or for programs")
