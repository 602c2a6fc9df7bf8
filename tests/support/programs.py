"""Programs that tests ask and that are not part of the system: `make setup` puts them into .venv/bin."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support.places import ROOT


def program(name: str) -> str:
    """The path of a program: that of the set-up, or else the system's. A test without it fails."""
    found = shutil.which(name, path=f"{ROOT / '.venv/bin'}:{os.environ['PATH']}")
    if found is None:
        pytest.fail(f"{name} is missing: make setup")
    return found


def output(name: str, *arguments: str, cwd: Path | None = None) -> str:
    """What a program printed; raises subprocess.CalledProcessError with what it said when it fails."""
    command = [program(name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd, timeout=60).stdout
