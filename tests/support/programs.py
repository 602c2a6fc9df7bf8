"""Programs that tests call and that are not part of the system: `make setup` installs them in .venv/bin."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support.places import ROOT


def program(name: str) -> str:
    """Return the path of a program: in .venv/bin, or else in the system. Without it the test fails."""
    found = shutil.which(name, path=f"{ROOT / '.venv/bin'}:{os.environ['PATH']}")
    if found is None:
        pytest.fail(f"{name} is missing: make setup")
    return found


def output(name: str, *arguments: str, cwd: Path | None = None) -> str:
    """Return the output of a program; raises subprocess.CalledProcessError with its output if it fails."""
    command = [program(name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd, timeout=60).stdout
