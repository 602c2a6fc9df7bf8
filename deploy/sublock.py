"""Prints a part of requirements.lock: the named packages and their dependencies, with versions and hashes.

python deploy/sublock.py msgspec PyYAML httptools > deploy/run.lock
python deploy/sublock.py hatchling > deploy/build.lock
python deploy/sublock.py msgspec PyYAML httptools aiohttp rich > tools/demo.lock
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

LOCK = Path(__file__).resolve().parent.parent / "requirements.lock"


def normal(name: str) -> str:
    """Return a package's name in its normal form (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def entries(lock: str) -> dict[str, str]:
    """Return the entries of a lock by name: version and hashes, without the comments that name the dependents."""
    found: dict[str, str] = {}
    for block in re.split(r"\n(?=\S)", lock):
        lines = [line for line in block.splitlines() if line.strip() and not line.lstrip().startswith("#")]
        if lines and "==" in lines[0]:
            found[normal(lines[0].partition("==")[0])] = "\n".join(lines).rstrip("\\ ") + "\n"
    return found


def needed(names: Iterable[str]) -> list[str]:
    """Return the packages and all their dependencies, as installed here, without extras and without dependencies whose
    markers do not match."""
    found: dict[str, None] = {}
    waiting = [normal(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found[name] = None
        for text in metadata.requires(name) or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(normal(requirement.name))
    return sorted(found)


def cut(names: Iterable[str], lock: str) -> str:
    """Return the lock of the named packages only. Raises KeyError for a package that is not in the lock."""
    pinned = entries(lock)
    return "".join(pinned[name] for name in needed(names))


if __name__ == "__main__":
    sys.stdout.write(cut(sys.argv[1:], LOCK.read_text()))
