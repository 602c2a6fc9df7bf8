"""The objects of deploy/chart, by Helm itself."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from support.programs import program

Json = dict[str, Any]
RELEASE = "kube-proxy-py"
"""The release that has the names of the folders."""


class RefusedError(Exception):
    """Helm does not take the values; its message."""


def template(chart: Path, values: Json, namespace: str, release: str = RELEASE) -> list[Json]:
    """The objects that a chart makes with these values. Each caller has its own."""
    return [obj for obj in yaml.safe_load_all(_text(chart, json.dumps(values), namespace, release)) if obj]


@cache
def _text(chart: Path, values: str, namespace: str, release: str) -> str:
    command = [program("helm"), "template", release, str(chart), "--namespace", namespace, "--values", "-"]
    done = subprocess.run(command, input=values, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise RefusedError(done.stderr)
    return done.stdout


def notes(chart: Path, values: Json, namespace: str) -> str:
    """What Helm tells whoever installs the chart with these values."""
    command = [program("helm"), "install", "--dry-run=client", "--namespace", namespace, "--values", "-"]
    command += [RELEASE, str(chart)]
    done = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.partition("\nNOTES:\n")[2]


def lint(chart: Path, values: Json) -> str:
    """What Helm has against a chart and values, '' for nothing."""
    command = [program("helm"), "lint", "--strict", "--quiet", str(chart), "--values", "-"]
    done = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=False, timeout=60)
    return done.stdout + done.stderr if done.returncode else ""
