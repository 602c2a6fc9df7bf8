"""The subcommand `demo` of python -m lab."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `demo`."""
    parser.add_argument("--keep", action="store_true", help="leave the cluster up until Ctrl-C, for kubectl")
    parser.add_argument("--id", default="", help="id of the cluster (default: demo, or random if demo is in use)")


def play(args: argparse.Namespace) -> int:
    """Run the demo; return the exit status. Raises KubeProxyError if this machine lacks a requirement."""
    # Imported here, because only this command needs rich.
    from lab.demo.play import DemoConfig, run  # noqa: PLC0415

    return run(DemoConfig(cluster_id=args.id, keep=args.keep))
