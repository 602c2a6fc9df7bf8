"""Runs a command under a kernel of Debian, in an emulated machine: for features that user-mode Linux lacks, such as
flowtables.

It has one emulated CPU, an order of magnitude slower than ours, and boots in about twenty seconds. While it computes,
its clock counts instructions, a nanosecond each: a busy host makes a command last longer, but no timeout in the machine
expires earlier. It sees this machine's files, or those of another Debian in a folder, and cannot change them. Needs
Debian's packages qemu-system-x86 and kmod, and a kernel that tools/guest-kernel has downloaded.
"""

from __future__ import annotations

import lzma
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from support.guest.guest import Done, GuestError
from support.places import ROOT

KERNEL = ROOT / ".venv/guest"
QEMU = "qemu-system-x86_64"
READY, DONE = "machine: ready", "machine: done"
_MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay", "br_netfilter")
"""Modules that give access to this machine's files, and br_netfilter, as on a node: pods of one bridge reach each other
directly over it, and their packets still pass the netfilter hooks."""

_INIT = """#!/bin/busybox sh
export PATH=/bin
for name in {applets}; do busybox ln -s /bin/busybox /bin/$name; done
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
for module in /modules/*; do insmod $module; done
mount -t 9p -o trans=virtio,version=9p2000.L,cache=loose,ro,msize=262144 host /host
mount -t tmpfs tmpfs /over; mkdir -p /over/upper /over/work
mount -t overlay -o lowerdir=/host{root},upperdir=/over/upper,workdir=/over/work overlay /new
cd /new; mkdir -p proc sys dev run lib/modules
mount --move /proc proc; mount --move /sys sys; mount --move /dev dev; mount -t tmpfs tmpfs run
mkdir -p dev/shm dev/pts; mount -t tmpfs tmpfs dev/shm; mount -t devpts devpts dev/pts
ln -s {modules} lib/modules/
stty -opost <dev/console
exec chroot . /bin/sh -c {session}
"""
_APPLETS = "mount mkdir insmod ln chroot stty"
_SESSION = """echo; echo '{ready}'
env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 \\
    PYTHONDONTWRITEBYTECODE=1 /bin/sh -c {command} </dev/null 2>&1
status=$?
echo; echo '{done}' $status
echo o >/proc/sysrq-trigger; sleep 60
"""
"""The first process runs this, because its root is the kernel's root too: modprobe finds the requested modules."""


class System(NamedTuple):
    """The folder that is the machine's root, the kernel's folder in it, and the working folder."""

    root: Path
    kernel: Path
    place: Path


def run_in_machine(
    argv: Sequence[str | Path], timeout: float, *, memory: int = 1536, system: System | None = None
) -> Done:
    """Boot, run one command as root, and return its exit status and output.

    It runs in the current folder of this machine's files, or in `system`. `timeout` is in seconds for all of it,
    `memory` in megabytes. Raises GuestError.
    """
    system = system or System(Path("/"), KERNEL, Path.cwd())
    if shutil.which(QEMU) is None or not (system.kernel / "stamp").exists():
        raise GuestError(f"{QEMU} or its kernel is missing: apt-get install qemu-system-x86, then tools/guest-kernel")
    command = f"cd {shlex.quote(str(system.place))} && ip link set lo up && {shlex.join(map(str, argv))}"
    with tempfile.TemporaryDirectory(prefix="kubeproxy-machine-") as folder:
        initrd = Path(folder, "initrd")
        initrd.write_bytes(_archive(system, command))
        try:
            printed = subprocess.run(
                _command(system.kernel, initrd, memory),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout,
                check=False,
            ).stdout
        except subprocess.TimeoutExpired as error:
            said = (error.stdout or b"").decode(errors="replace")[-4000:]
            raise GuestError(f"the machine was not done after {timeout:g} s; its last output:\n{said}") from None
    output, found, rest = printed.partition(f"\n{READY}\n")[2].rpartition(f"\n{DONE} ")
    if not found:
        raise GuestError(f"the machine ended before the command did; its last output:\n{printed[-4000:]}")
    return Done(int(rest.split()[0]), output)


def _command(folder: Path, initrd: Path, memory: int) -> list[str]:
    # One CPU, because Linux 6.1 does not boot with two when the clock counts instructions.
    kernel = next((folder / "root/boot").glob("vmlinuz-*"))
    return [
        *("setpriv", "--pdeathsig", "KILL", QEMU, "-accel", "tcg", "-icount", "shift=0", "-cpu", "max"),
        *("-smp", "1", "-m", str(memory), "-nographic", "-no-reboot", "-nic", "none"),
        *("-kernel", str(kernel), "-initrd", str(initrd)),
        *("-append", "console=ttyS0 quiet panic=-1 mitigations=off no_timer_check"),
        *("-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap"),
        *("-device", "virtio-9p-pci,fsdev=host,mount_tag=host"),
    ]


def _archive(system: System, command: str) -> bytes:
    """Return the cpio archive that the kernel starts with: busybox, the modules for access to the files, and init."""
    folder, release = system.kernel, (system.kernel / "stamp").read_text()
    session = _SESSION.format(ready=READY, done=DONE, command=shlex.quote(command))
    modules = "/" / (folder / "root/lib/modules" / release).relative_to(system.root)
    root = "" if system.root == Path("/") else system.root
    init = _INIT.format(applets=_APPLETS, root=root, modules=modules, session=shlex.quote(session))
    files = {"bin/busybox": next(folder.glob("busybox/**/bin/busybox")).read_bytes(), "init": init.encode()}
    files |= {f"modules/{n:02d}-{path.name}": _plain(path) for n, path in enumerate(_needed(folder, release))}
    folders = ("bin", "modules", "proc", "sys", "dev", "host", "over", "new")
    entries = [_entry(name, 0o40755) for name in folders]
    entries += [_entry(name, 0o100755, content) for name, content in files.items()]
    return b"".join((*entries, _entry("TRAILER!!!", 0)))


def _plain(module: Path) -> bytes:
    """Return a module's content, decompressed: Debian 13 and later compress modules by xz."""
    return lzma.decompress(module.read_bytes()) if module.suffix == ".xz" else module.read_bytes()


def _needed(folder: Path, release: str) -> list[Path]:
    """Return the files of the modules, each after its dependencies; a built-in module has no file."""
    found: dict[Path, None] = {}
    for module in _MODULES:
        shown = subprocess.run(
            ["modprobe", "-d", folder / "root", "-S", release, "--show-depends", module],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        found |= {Path(line.split()[1]): None for line in shown.splitlines() if line.startswith("insmod")}
    return list(found)


def _entry(name: str, mode: int, content: bytes = b"") -> bytes:
    """Pack one entry of a cpio archive, format newc."""
    path = name.encode() + b"\0"
    numbers = (0, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(path), 0)
    head = b"070701" + b"".join(b"%08x" % number for number in numbers) + path
    return head + b"\0" * (-len(head) % 4) + content + b"\0" * (-len(content) % 4)


def main() -> int:
    """`python -m support.guest.machine COMMAND ...` runs a command there for up to five minutes."""
    try:
        done = run_in_machine(sys.argv[1:], 300)
    except GuestError as error:
        print(f"machine: {error}", file=sys.stderr)
        return 125
    print(done.output)
    return done.status


if __name__ == "__main__":
    sys.exit(main())
