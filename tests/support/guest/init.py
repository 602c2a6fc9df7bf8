"""The first process of the guest: mounts the file systems, runs one command, writes its exit status, halts.

The output between READY and DONE is the command's. Runs under `python -I -S` with nothing but the standard library; its
argument is the host's folder with order.json, which gets exit.json. The root is the host's file system, read-only,
under an overlay that ends with the guest: a command may write anywhere, and the host sees only its changes in the
folders that order.json names.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

MODULES = Path("/usr/lib/uml/modules")
READY = "guest: ready"
DONE = "guest: done"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MNT_DETACH = 2
RB_POWER_OFF = 0x4321FEDC  # linux/reboot.h

_libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(kind: str, target: str, options: str = "", source: str = "") -> None:
    Path(target).mkdir(parents=True, exist_ok=True)
    done = _libc.mount((source or kind).encode(), target.encode(), kind.encode(), 0, options.encode())
    check(done, f"mounting {kind} at {target}")


def mount_root() -> None:
    """Make the overlay the root; after that /lib/modules contains the guest kernel's modules."""
    mount("proc", "/proc")
    mount("tmpfs", "/mnt")
    for name in ("upper", "work", "root", "modules/lib"):
        Path("/mnt", name).mkdir(parents=True)
    Path("/mnt/modules/lib/modules").symlink_to(MODULES)
    subprocess.run(["modprobe", "-d", "/mnt/modules", "overlay"], check=True, env={**os.environ, "PATH": PATH})
    mount("overlay", "/mnt/root", "lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work")
    os.chdir("/mnt/root")
    check(_libc.pivot_root(b".", b"mnt"), "pivot_root")
    os.chdir("/")
    check(_libc.umount2(b"/mnt", MNT_DETACH), "unmounting the old root")
    modules = Path("/lib/modules")
    modules.mkdir(exist_ok=True)
    for release in MODULES.iterdir():
        modules.joinpath(release.name).symlink_to(release)


def mount_rest(writable: list[str]) -> None:
    mount("proc", "/proc")
    mount("sysfs", "/sys")
    mount("devtmpfs", "/dev")
    for target in ("/dev/shm", "/run"):
        mount("tmpfs", target)
    mount("devpts", "/dev/pts", "ptmxmode=0666")
    for folder in writable:
        mount("hostfs", folder, folder)


def plain_console() -> None:
    """Disable carriage returns in the output."""
    settings = termios.tcgetattr(1)
    settings[1] &= ~termios.OPOST
    termios.tcsetattr(1, termios.TCSANOW, settings)


def run(order: dict[str, Any]) -> int:
    os.environ.clear()
    os.environ.update({"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8", **order["environment"]})
    if starter := order["starter"]:
        Path("/run/modprobe").write_bytes(bytes.fromhex(starter))
        Path("/run/modprobe").chmod(0o755)
        Path("/proc/sys/kernel/modprobe").write_text("/run/modprobe")
    # These are built into most kernels, but are modules here.
    subprocess.run(["modprobe", "-a", "ipv6"], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    child = subprocess.Popen(order["argv"], cwd=order["cwd"], stdin=subprocess.DEVNULL)
    while True:  # Orphaned processes become children of the first process.
        pid, status = os.wait()
        if pid == child.pid:
            return os.waitstatus_to_exitcode(status)


def main() -> None:
    folder = sys.argv[1]
    try:
        plain_console()
        order = json.loads(Path(folder, "order.json").read_text())
        mount_root()
        mount_rest([folder, *order["writable"]])
        print(READY, flush=True)
        status = run(order)
        print(f"\n{DONE}", flush=True)
        Path(folder, "exit.json").write_text(json.dumps(status))
    except Exception as error:
        print(f"guest: {error!r}", flush=True)
    finally:
        os.sync()
        _libc.reboot(RB_POWER_OFF)


main()
