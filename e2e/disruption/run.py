"""One run: a cluster, the disruptions that FOCUS selects, and the file of their results."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from e2e import run
from e2e.binaries import programs_to_run
from e2e.cluster import cluster, say
from e2e.disruption import play, programs, traffic
from e2e.disruption.programs import Program
from e2e.disruption.results import Record, failed, render, write
from e2e.images import IMAGES, tags, upstream_names
from e2e.layout import FOLDER, NODES
from e2e.processes import Processes
from e2e.results import RESULTS, SOME
from prove.asking import Crowd


def disrupt(arguments: argparse.Namespace) -> int:
    """Run with these arguments; return the exit code: 1 if a request failed. Raises E2EError."""
    folder = programs_to_run(arguments.kubernetes.resolve())
    own = programs.ours(arguments.mode) if arguments.proxy == "ours" else programs.go(folder, arguments.mode)
    with cluster(folder, own.command, own.mode) as processes:
        stage = play.Stage(folder, processes, own)
        steps = play.chosen(stage.disruptions(_ways(arguments, folder)), arguments.focus)
        stage.replace(own)  # with its flags
        record = Record(arguments.proxy, own.mode, run.today(), run.commit(), run.versions(folder, own.command), [])
        record.versions |= {"flowtables": _flowtables(own, processes), "load": f"{os.getloadavg()[0]:.0f}"}
        _play(stage, steps, _crowd(folder), record, SOME if arguments.focus else RESULTS)
    return int(bool(failed(record.rows)))


def _ways(arguments: argparse.Namespace, folder: Path) -> dict[str, tuple[Program, ...]]:
    ways: dict[str, tuple[Program, ...]] = {f"go-{mode}": (programs.go(folder, mode),) for mode in programs.MODES}
    if arguments.proxy == "ours":
        other = next(mode for mode in programs.MODES if mode != arguments.mode)
        ways["two-steps"] = (programs.ours(other), programs.go(folder, other))
        revision = arguments.previous or programs.last_revision()
        ways["previous"] = (programs.earlier(revision, arguments.mode, FOLDER / "previous"),)
    return ways


def _crowd(folder: Path) -> Crowd:
    say("starting Services, pods and clients")
    upstream = upstream_names(folder / "e2e.test")
    server, pause = (tags(image, upstream)[0] for image in IMAGES[:2])
    return Crowd(traffic.make(folder, server, pause), traffic.ask)


def _play(stage: play.Stage, steps: list[play.Step], crowd: Crowd, record: Record, results: Path) -> None:
    """Run the steps, write and print their rows; after an error or an interruption too, but not into `results`."""
    windows: list[play.Window] = []
    try:
        play.play(stage, steps, crowd, windows.append)
    finally:
        record.rows = list(play.rows(crowd, windows))
        path = write(record, (results if len(windows) == len(steps) else SOME) / "disruption")
        print("", render([record]).partition("\n## ")[2], path, sep="\n", flush=True)
    print("python -m e2e page writes docs/disruption.md from all results")


def _flowtables(own: Program, processes: Processes) -> str:
    """Return whether our kube-proxy uses fast forwarding, "" for another program or another mode."""
    if not own.flags or own.mode != "nftables":
        return ""
    log = processes.log(f"kube-proxy-{NODES[1].name}").read_text(errors="replace")
    return "none" if "this kernel has no flowtables" in log else "in use"
