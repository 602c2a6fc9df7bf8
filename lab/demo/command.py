"""The subcommand `demo` of python -m lab."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What may follow `demo`."""
    parser.add_argument("--keep", action="store_true", help="leave it up until Ctrl-C, to try things with kubectl")
    parser.add_argument("--id", default="", help="names the cluster (default: demo, or a random one beside another)")


def play(args: argparse.Namespace) -> int:
    """Play the demo; the exit status. Raises KubeProxyError where this machine cannot."""
    # Only here: the other commands need no rich.
    from lab.demo.play import DemoConfig, run  # noqa: PLC0415

    return run(DemoConfig(cluster_id=args.id, keep=args.keep))
