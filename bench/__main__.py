"""The command line of the benchmarks: `python -m bench [WHAT...]` from the repository's root, as root."""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from bench import picture
from bench import report as reports
from bench.charts import draw
from bench.runs import Run
from bench.worker import BenchmarkFailed

DEFAULT = ("sync", "change", "churn", "start", "e2e", "path", "firstpacket", "counters")
OTHER_MODES = ("iptables", "ipvs", "userspace", "lasting")  # half an hour more
SEEING = ("seeing", "page")
BEYOND = ("resets", "ejection", "unfounded", "balancing", "flowtable", "udp", "restart", "large", "resident", "hostile")
ALL = DEFAULT + OTHER_MODES + SEEING + BEYOND
WIDTH = 190  # columns of a table when the output is no terminal


def main(argv: Sequence[str] | None = None) -> int:
    """Run the given benchmarks; return the exit code."""
    given = _parse(argv)
    out = Console(width=None if sys.stdout.isatty() else WIDTH)
    err = Console(stderr=True)
    if problem := _missing():
        err.print(f"error: {problem}", style="red", highlight=False)
        return 1
    try:
        if "gate" in given.what:
            from bench import gate  # noqa: PLC0415 - each benchmark imports its own requirements

            with progress("gate", err) as tell:
                return gate.check(Run(True, tell), out)
        if "markdown" in given.what:
            out.print(reports.markdown(), soft_wrap=True, highlight=False, markup=False)
            return 0
        if "picture" in given.what:
            for subject in (picture.CHANGE, picture.SYNC):
                out.print(f"drawn: {_shown(picture.draw(subject))}", highlight=False)
            return 0
        names = given.what or DEFAULT
        for number, name in enumerate(names, 1):
            _run(name, f"{number} of {len(names)}, {name}" if len(names) > 1 else name, given, out, err)
    except BenchmarkFailed as error:
        err.print(f"error: {error}", style="red", highlight=False, markup=False)
        return 1
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Benchmarks of kube-proxy; see docs/performance.md."
    )
    parser.add_argument(
        "what",
        nargs="*",
        metavar="WHAT",
        help=f"{', '.join(DEFAULT)} (if none is named), {', '.join(OTHER_MODES + SEEING + BEYOND)}, gate, "
        "markdown (last figures), picture (the README's charts of them)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes and runs")
    parser.add_argument(
        "--peer", metavar="COMMAND", help="another kube-proxy for e2e, such as 'kube-proxy --config {config}'"
    )
    parser.add_argument("--peer-mode", default="nftables", metavar="MODE", help="the mode the peer runs in (nftables)")
    given = parser.parse_args(argv)
    if unknown := [name for name in given.what if name not in {*ALL, "gate", "markdown", "picture"}]:
        parser.error(f"no benchmark {unknown[0]}: there are {', '.join(ALL)}, gate, markdown and picture")
    if given.peer and "{config}" not in given.peer:
        parser.error("--peer: the command must contain {config}, where the configuration file goes")
    return given


def _missing() -> str:
    """Return the reason why the benchmarks cannot run, '' for none."""
    if os.geteuid() != 0:
        return "the benchmarks make network namespaces and program nftables: run them as root"
    for tool, package in (("nft", "nftables"), ("ip", "iproute2")):
        if shutil.which(tool) is None:
            return f"{tool} is missing: install the package {package} (apt-get install {package})"
    return ""


def _run(name: str, title: str, given: argparse.Namespace, out: Console, err: Console) -> None:
    benchmark: Callable[[Run], reports.Report] = importlib.import_module(f"bench.{name}").run
    started, began = time.time(), time.perf_counter()
    with progress(title, err) as tell:
        found = benchmark(Run(given.quick, tell, given.peer, given.peer_mode))
    about = reports.circumstances(started, time.perf_counter() - began, given.quick)
    path = reports.write(found, about)
    chart = path.with_suffix(".svg")
    draw(found.chart, chart, f"{about.machine}, {about.cpus} CPUs, Linux {about.kernel}, {about.revision}")
    reports.show(out, found)
    out.print(f"  {about.seconds:.0f} s; figures in {_shown(path)}, chart in {_shown(chart)}", highlight=False)


def _shown(path: os.PathLike[str]) -> str:
    return os.path.relpath(path)


class progress:  # noqa: N801 - reads as a statement
    """Prints the present measurement and its duration: on one line of a terminal, otherwise one line per
    measurement."""

    def __init__(self, title: str, console: Console) -> None:
        self._title = title
        self._console = console
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        self._live = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self._task = self._live.add_task(title, total=None) if self._live is not None else None

    def __enter__(self) -> Callable[[str], None]:
        if self._live is not None:
            self._live.start()
        return self._tell

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def _tell(self, what: str) -> None:
        if self._live is not None and self._task is not None:
            self._live.update(self._task, description=f"{self._title}: {what}")
        else:
            self._console.print(f"{self._title}: {what}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
