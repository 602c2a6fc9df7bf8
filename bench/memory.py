"""The memory and the CPU time of a process, and what the kernel keeps for tables, as /proc tells."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path


def resident(pid: int | None = None) -> tuple[float, float]:
    """Return resident memory of a process (this one) now, and the most that it ever was, in MB."""
    found = {}
    for line in Path(f"/proc/{pid or os.getpid()}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in {"VmRSS", "VmHWM"}:
            found[name] = int(value.split()[0]) / 1024
    return found["VmRSS"], found["VmHWM"]


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process and the processes it waited for have used."""
    own = time.clock_gettime((~pid << 3) | 2)  # the process's clock: see clock_getcpuclockid(3)
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return own + (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def machine() -> dict[str, int]:
    """Return what /proc/meminfo says, in kB."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {name: int(re.sub(r"\D", "", value)) for name, _, value in (line.partition(":") for line in lines)}


def kmalloc(caches: str = "kmalloc") -> int:
    """Return the bytes of the kernel's objects in its general caches whose names begin so.

    Sets, rules and xtables' tables are accounted to control groups, and so lie in caches of their own, kmalloc-cg-*.
    """
    held = 0
    for line in Path("/proc/slabinfo").read_text().splitlines():
        if line.startswith(caches):
            _, active, _, size, *_ = line.split()
            held += int(active) * int(size)
    return held
