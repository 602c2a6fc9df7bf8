"""A real cluster with our kube-proxy or the Go one: run upstream's end-to-end tests, or disrupt it under traffic."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import NoReturn

from e2e import dns, loadbalancer, page, run, scale
from e2e.binaries import programs_to_run
from e2e.choice import choose
from e2e.cluster import cluster, remove, say
from e2e.disruption import results as disruptions
from e2e.disruption.programs import MODES as DISRUPTED
from e2e.disruption.run import disrupt
from e2e.errors import E2EError
from e2e.layout import FOLDER
from e2e.results import RESULTS, SOME, file_of, read, read_file, write
from lab.iproute import LinkError
from lab.proxyprocess import proxy_command

MODES = ("nftables", "iptables", "userspace")


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    top = argparse.ArgumentParser(prog="python -m e2e", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="make a cluster, run the tests, remove the cluster")
    disrupts = commands.add_parser("disrupt", help="make a cluster, disrupt it under traffic, remove it")
    for each, modes in ((runs, MODES), (disrupts, DISRUPTED)):
        each.add_argument(
            "--kubernetes", type=Path, required=True, metavar="DIR", help="source tree or folder of binaries"
        )
        each.add_argument("--proxy", choices=("ours", "go"), default="ours")
        each.add_argument("--mode", choices=modes, default="nftables")
        each.add_argument(
            "--focus", metavar="REGEX", default="", help="regular expression of the tests, or disruptions, to run"
        )
    runs.add_argument("--resume", action="store_true", help="continue a run: tests without a verdict, and failed tests")
    runs.add_argument("--parallel", type=int, default=4, metavar="N", help="number of parallel tests (%(default)s)")
    runs.add_argument("--minutes", type=int, default=15, metavar="N", help="time limit of a test (%(default)s)")
    disrupts.add_argument("--previous", metavar="REVISION", default="", help="git revision of ours that replaces ours")
    scaled = commands.add_parser("scale", help="thousands of Services on a real API server")
    scaled.add_argument("--kubernetes", type=Path, required=True, metavar="DIR", help="as for run")
    scaled.add_argument("--services", type=int, action="append", metavar="N", help="may be repeated (5000, 10000)")
    scaled.add_argument("--mode", choices=scale.MODES, action="append", help="may be repeated (all)")
    commands.add_parser("page", help="write conformance.md, disruption.md and a part of capacity.md in docs")
    commands.add_parser("down", help="remove the remains of a killed run")
    stand_in = commands.add_parser("stand-in", help="programs that a run starts inside its cluster")
    stand_in.add_argument("name", choices=("dns", "loadbalancer"))
    return top


def main() -> int:
    """Run a command; exit code 0 if all tests passed, 1 if a test failed, 2 if they could not run."""
    arguments = parser().parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if arguments.command in ("run", "disrupt"):
            return (_run if arguments.command == "run" else disrupt)(arguments)
        if arguments.command == "scale":
            folder = programs_to_run(arguments.kubernetes.resolve())
            scale.run(folder, proxy_command(), arguments.services or (5000, 10000), arguments.mode or scale.MODES)
        elif arguments.command == "stand-in":
            {"dns": dns.serve, "loadbalancer": loadbalancer.serve}[arguments.name](FOLDER)
        elif arguments.command == "down":
            remove()
        else:
            page.PAGE.write_text(page.render(read()))
            disruptions.PAGE.write_text(disruptions.render(disruptions.read()))
            scale.PAGE.write_text(scale.into(scale.PAGE.read_text(), scale.read()))
    except (E2EError, LinkError, OSError) as e:
        print(f"e2e: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _run(arguments: argparse.Namespace) -> int:
    folder = programs_to_run(arguments.kubernetes.resolve())
    proxy = [proxy_command() if arguments.proxy == "ours" else str(folder / "kube-proxy")]
    results = SOME if arguments.focus else RESULTS
    with cluster(folder, proxy, arguments.mode) as processes:
        chosen, left_out = choose(run.list_tests(folder), arguments.focus)
        made = run.begin(arguments.proxy, arguments.mode, arguments.focus, chosen, left_out)
        if arguments.resume and (path := file_of(made.proxy, made.mode, results)).exists():
            made = run.resume(read_file(path), made)
        run.stamp(made, run.versions(folder, proxy))
        path = write(made, results)
        say(f"{len(made.pending)} tests to run, {len(made.tests)} have a verdict: {path}")
        try:
            run.run(
                run.Run(folder, processes, arguments.minutes), made, arguments.parallel, lambda: write(made, results)
            )
        except KeyboardInterrupt:
            say(f"interrupted: {len(made.pending)} tests have no verdict; RESUME=1 goes on with them")
            raise
    say(f"{made.count('passed')} passed, {len(made.failed)} failed, {made.count('skipped')} skipped themselves: {path}")
    for name in made.failed:
        print(f"  failed: {name}\n    {made.tests[name].reason}")
    if not made.focus:
        print("python -m e2e page writes docs/conformance.md from all results")
    return 1 if made.failed or not made.count("passed") else 0


def _interrupt(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
