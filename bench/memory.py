"""Reads the memory and the CPU time of a process, and the kernel's memory for tables, from /proc."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path


def resident(pid: int | None = None) -> tuple[float, float]:
    """Return the present and the maximum resident memory of a process (default: this one), in MB."""
    found = {}
    for line in Path(f"/proc/{pid or os.getpid()}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in {"VmRSS", "VmHWM"}:
            found[name] = int(value.split()[0]) / 1024
    return found["VmRSS"], found["VmHWM"]


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and of its ended children."""
    own = time.clock_gettime((~pid << 3) | 2)  # clock of a process: see clock_getcpuclockid(3)
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return own + (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def machine() -> dict[str, int]:
    """Return the value of a field of /proc/meminfo, in kB."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {name: int(re.sub(r"\D", "", value)) for name, _, value in (line.partition(":") for line in lines)}


def kmalloc(caches: str = "kmalloc") -> int:
    """Return the bytes of the kernel's objects in the general caches with this prefix.

    Sets, rules and xtables' tables are accounted to control groups, so they are in separate caches, kmalloc-cg-*.
    """
    held = 0
    for line in Path("/proc/slabinfo").read_text().splitlines():
        if line.startswith(caches):
            _, active, _, size, *_ = line.split()
            held += int(active) * int(size)
    return held
