"""Runs a command under a separate kernel: user-mode Linux, which has IPVS, dummy interfaces and ip sets as modules.

The guest sees this machine's files (the same .venv) and cannot change them; see init.py. It has one CPU, only the
network that the command sets up, and boots in about three seconds. Needs root, and Debian's packages user-mode-linux
and kmod.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from support.guest import narrow

KERNEL = "linux.uml"
INIT = Path(__file__).with_name("init.py")
MEGABYTE = 1 << 20
_ENVIRONMENT = {"PYTHONUNBUFFERED": "1"}
READY, DONE = "guest: ready\n", "guest: done\n"  # the names that init.py uses


class GuestError(Exception):
    """The guest did not boot, or did not finish; the text contains the reason and the end of the output."""


class Echo(Protocol):
    """A destination of output, such as a file."""

    def write(self, line: str, /) -> object:
        """Write a line."""

    def flush(self) -> object:
        """Flush the written lines."""


class Done(NamedTuple):
    """The result of a command that ended in the guest."""

    status: int
    output: str


def run_in_guest(
    argv: Sequence[str | Path],
    timeout: float,
    *,
    environment: Mapping[str, str] | None = None,
    writable: Sequence[Path] = (),
    memory: int = 1024,
    echo: Echo | None = None,
) -> Done:
    """Boot a guest, run one command in the current folder there, and return its exit status and output.

    `timeout` is in seconds for all of it, `memory` in megabytes. `writable` are the host's folders that the command may
    change. `echo` gets the output line by line as it comes. The guest's processes end with this call, and with this
    process. Raises GuestError.
    """
    kernel = shutil.which(KERNEL)
    if kernel is None or shutil.which("modprobe") is None:
        raise GuestError(f"{KERNEL} or modprobe is missing: apt-get install user-mode-linux kmod (make setup does it)")
    if os.geteuid() != 0:
        raise GuestError("root is needed, as the guest sees this machine's files with our rights: run it with sudo")
    wide = narrow.wide_here()
    with tempfile.TemporaryDirectory(prefix="kubeproxy-guest-") as folder:
        order = {
            "argv": [str(word) for word in argv],
            "cwd": str(Path.cwd()),
            "environment": {**_ENVIRONMENT, **(narrow.WIDE_UNUSED if wide else {}), **(environment or {})},
            "starter": narrow.starter("/sbin/modprobe", narrow.WIDE_UNUSED).hex() if wide else "",
            "writable": [str(path) for path in writable],
        }
        Path(folder, "order.json").write_text(json.dumps(order))
        printed, ended = _boot(_command(kernel, folder, memory, wide), _memory_folder(memory), timeout, echo)
        status = Path(folder, "exit.json")
        if status.exists():
            return Done(int(status.read_text()), printed.partition(READY)[2].rpartition(f"\n{DONE}")[0])
    reason = "ended before the command did" if ended else f"was not done after {timeout:g} s and was stopped"
    raise GuestError(f"the guest ({kernel}) {reason}; its last output:\n{printed[-4000:]}")


def run_module_in_guest(module: str, argv: Sequence[str], timeout: float, *, writable: Sequence[Path] = ()) -> int:
    """Run a module of this project with these arguments in a guest, where support.modes.GUEST is true. Print the output
    as it comes, and return the exit status. Raises GuestError."""
    command = [sys.executable, "-m", module, *argv]
    environment = {"KUBEPROXY_GUEST": "1"}
    return run_in_guest(command, timeout, environment=environment, writable=writable, echo=sys.stdout).status


def _command(kernel: str, folder: str, memory: int, wide: bool) -> list[str]:
    # The guest has its own process namespace, because its kernel consists of a dozen processes that must end together.
    # setpriv ends them if this process is killed.
    narrowed = [sys.executable, "-I", "-S", narrow.__file__] if wide else []
    return [
        *("setpriv", "--pdeathsig", "KILL"),
        *("unshare", "--pid", "--fork", "--kill-child=KILL"),
        *narrowed,
        kernel,
        f"mem={memory}M",
        *("root=none", "rootfstype=hostfs", "rootflags=/", "ro"),
        *("con=null", "con0=null,fd:1", "quiet", "loglevel=2", "panic=-1", f"uml_dir={folder}/"),
        *(f"{name}={value}" for name, value in (narrow.WIDE_UNUSED if wide else {}).items()),
        f"init={sys.executable}",
        *("--", "-I", "-S", str(INIT), folder),
    ]


def _boot(command: list[str], memory_folder: str, timeout: float, echo: Echo | None) -> tuple[str, bool]:
    """Return the output, and whether the guest ended in order."""
    lines: list[str] = []
    environment = {**os.environ, "TMPDIR": memory_folder}
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        late = threading.Timer(timeout, process.kill)
        late.start()
        try:
            assert process.stdout is not None
            for line in _of_the_command(process.stdout, lines):
                if echo is not None:
                    echo.write(line)
                    echo.flush()
        finally:
            process.kill()
            ended = late.is_alive()
            late.cancel()
    return "".join(lines), ended


def _of_the_command(printed: Iterable[str], lines: list[str]) -> Iterator[str]:
    """Yield the lines between the marks of init.py, without the line end that it adds before the last mark;

    `lines` gets all lines.
    """
    inside = False
    held = ""
    for line in printed:
        lines.append(line)
        if inside and line == DONE:
            inside = False
        elif inside:
            if held:
                yield held
            held = line if line == "\n" else ""
            if not held:
                yield line
        else:
            inside = line == READY


def _memory_folder(memory: int) -> str:
    """Return a folder for the file of the guest's memory: with enough space, and without the mount option noexec."""
    places = [place for place in ("/dev/shm", os.environ.get("TMPDIR"), "/tmp", "/var/tmp") if place]
    for place in places:
        if not Path(place).is_dir():
            continue
        found = os.statvfs(place)
        if not found.f_flag & os.ST_NOEXEC and found.f_bavail * found.f_frsize >= memory * MEGABYTE:
            return place
    raise GuestError(f"no room for {memory} MB of guest memory in {', '.join(places)}, mounted without noexec")


def main() -> int:
    """`python -m support.guest.guest COMMAND ...` runs a command in a guest for up to ten minutes."""
    try:
        return run_in_guest(sys.argv[1:], 600, echo=sys.stdout).status
    except GuestError as error:
        print(f"guest: {error}", file=sys.stderr)
        return 125


if __name__ == "__main__":
    sys.exit(main())
