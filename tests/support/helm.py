"""Renders the objects of deploy/chart with Helm."""

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
"""The release name with which the chart's objects have the names of the kustomize folders."""


class RefusedError(Exception):
    """Helm refuses the values; with its message."""


def template(chart: Path, values: Json, namespace: str, release: str = RELEASE) -> list[Json]:
    """Return the objects that a chart renders with these values. Each caller gets separate copies."""
    return [obj for obj in yaml.safe_load_all(_text(chart, json.dumps(values), namespace, release)) if obj]


@cache
def _text(chart: Path, values: str, namespace: str, release: str) -> str:
    command = [program("helm"), "template", release, str(chart), "--namespace", namespace, "--values", "-"]
    done = subprocess.run(command, input=values, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise RefusedError(done.stderr)
    return done.stdout


def notes(chart: Path, values: Json, namespace: str) -> str:
    """Return the notes that Helm prints after an installation with these values."""
    command = [program("helm"), "install", "--dry-run=client", "--namespace", namespace, "--values", "-"]
    command += [RELEASE, str(chart)]
    done = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.partition("\nNOTES:\n")[2]


def lint(chart: Path, values: Json) -> str:
    """Return Helm's complaints about a chart and values, '' for none."""
    command = [program("helm"), "lint", "--strict", "--quiet", str(chart), "--values", "-"]
    done = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=False, timeout=60)
    return done.stdout + done.stderr if done.returncode else ""
