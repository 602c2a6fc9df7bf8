"""The kube-proxy processes of this network namespace that /proc shows. Reads only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Final, NamedTuple

PROC: Final = Path("/proc")

_NAME: Final = "kube-proxy"
_PYTHON: Final = re.compile(r"python[0-9.]*")


class ProxyProcess(NamedTuple):
    """A kube-proxy process: its arguments, and whether it is this program or the Go one."""

    pid: int
    arguments: tuple[str, ...]
    ours: bool


class Descriptors(NamedTuple):
    """The number of open files of a process, and its limit."""

    used: int
    limit: int


def proxies(proc: Path = PROC) -> list[ProxyProcess]:
    """Return the kube-proxies of the caller's network namespace, without subcommands."""
    here = _namespace(proc / "self")
    found = []
    for entry in sorted(proc.iterdir()):
        if not entry.name.isdecimal():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
            process = _read(int(entry.name), words)
            if process is not None and here is not None and _namespace(entry) == here:
                found.append(process)
        except OSError:
            continue  # it has ended, or is not to be seen
    return found


def descriptors(pid: int, proc: Path = PROC) -> Descriptors | None:
    """Return the open files of a process, None if they are not visible."""
    try:
        used = sum(1 for _ in (proc / str(pid) / "fd").iterdir())
        limits = (proc / str(pid) / "limits").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    match = re.search(r"^Max open files +(\d+)", limits, re.MULTILINE)
    return Descriptors(used, int(match[1])) if match is not None else None


def value_of(arguments: Sequence[str], flag: str) -> str:
    """Return the value of a flag on a command line, '' without it."""
    for position, word in enumerate(arguments):
        if word.lstrip("-") == flag and position + 1 < len(arguments):
            return arguments[position + 1]
        if word.lstrip("-").startswith(f"{flag}="):
            return word.partition("=")[2]
    return ""


def _read(pid: int, words: list[str]) -> ProxyProcess | None:
    program, arguments, ours = PurePath(words[0]).name, words[1:], False
    if _PYTHON.fullmatch(program):
        # python [-options] /path/of/kube-proxy ..., as a script's first line has it, or python -m kubeproxy.cli ...
        scripts = [at for at, word in enumerate(arguments) if not word.startswith("-")]
        if not scripts:
            return None
        name, arguments, ours = arguments[scripts[0]], arguments[scripts[0] + 1 :], True
        program = _NAME if name in {"kubeproxy", "kubeproxy.cli"} else PurePath(name).name
    if program != _NAME or (arguments and not arguments[0].startswith("-")):
        return None
    return ProxyProcess(pid, tuple(arguments), ours)


def _namespace(process: Path) -> tuple[int, int] | None:
    try:
        status = (process / "ns/net").stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
