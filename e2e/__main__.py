"""Upstream's end-to-end tests against our kube-proxy or the Go one: run them, or render the page from results."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from e2e import dns, loadbalancer, page
from e2e.binaries import missing_packages, programs
from e2e.cluster import cluster, remove, say
from e2e.errors import E2EError
from e2e.layout import FOLDER
from e2e.results import RESULTS, read, write
from e2e.run import SHARDS, SKIP, result, run, versions
from lab.iproute import LinkError

MODES = ("nftables", "iptables", "userspace")


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    top = argparse.ArgumentParser(prog="python -m e2e", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="make a cluster, run the tests, remove the cluster")
    runs.add_argument("--kubernetes", type=Path, required=True, metavar="DIR", help="source tree or folder of binaries")
    runs.add_argument("--proxy", choices=("ours", "go"), default="ours")
    runs.add_argument("--mode", choices=MODES, default="nftables")
    runs.add_argument("--focus", metavar="REGEX", help="tests to run, instead of all that a kube-proxy decides")
    runs.add_argument("--skip", metavar="REGEX", default=SKIP, help="tests to leave out (default: %(default)s)")
    runs.add_argument("--timeout", metavar="TIME", default="3h", help="end of all tests, as 90m (default: %(default)s)")
    runs.add_argument("--shards", type=int, choices=(1, 2, 3), default=3, help="how many tests run side by side")
    commands.add_parser("page", help="write docs/conformance.md from e2e/results")
    commands.add_parser("down", help="remove what a killed run left")
    stand_in = commands.add_parser("stand-in", help="what a run starts inside its cluster")
    stand_in.add_argument("name", choices=("dns", "loadbalancer"))
    return top


def main() -> int:
    """Run a command; exit code 0 when all tests passed, 1 when some failed, 2 when they could not run."""
    arguments = parser().parse_args()
    try:
        if arguments.command == "run":
            return _run(arguments)
        if arguments.command == "stand-in":
            {"dns": dns.serve, "loadbalancer": loadbalancer.serve}[arguments.name](FOLDER)
        elif arguments.command == "down":
            remove()
        else:
            page.PAGE.write_text(page.render(read()))
    except (E2EError, LinkError, OSError) as e:
        print(f"e2e: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _run(arguments: argparse.Namespace) -> int:
    if os.geteuid() != 0:
        raise E2EError("root is needed, for network namespaces and containers: run it with sudo")
    if missing := missing_packages():
        raise E2EError(f"Debian packages are missing: apt-get install {' '.join(missing)}")
    signal.signal(signal.SIGTERM, _interrupt)
    folder = programs(arguments.kubernetes.resolve())
    ours = Path(sys.executable).with_name("kube-proxy")
    proxy = [str(ours if arguments.proxy == "ours" else folder / "kube-proxy")]
    chosen = [arguments.focus] if arguments.focus else list(SHARDS)
    shards = ["|".join(chosen[n :: arguments.shards]) for n in range(min(arguments.shards, len(chosen)))]
    with cluster(folder, proxy, arguments.mode) as processes:
        known = versions(folder, proxy)
        say("running the tests")
        found, seconds = run(folder, processes, shards, arguments.skip, arguments.timeout)
    made = result(arguments.proxy, arguments.mode, found, seconds, known, part=bool(arguments.focus))
    path = write(made, Path("/tmp/kpe2e-results") if made.part else RESULTS)  # noqa: S108 - a file to read
    passed = sum(verdict.state == "passed" for verdict in found.values())
    say(f"{passed} passed, {len(made.failed)} failed, in {seconds:.0f} s: {path}")
    for name in made.failed:
        print(f"  failed: {name}\n    {found[name].reason}")
    return 1 if made.failed or not passed else 0


def _interrupt(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
