"""Installs kube-proxy on this node, or removes it. This file is the entry point of the archive kube-proxy.pyz.

    python3 kube-proxy.pyz install        # or uninstall; --root DIR for a system that is not this one's

Each release has its own folder below /opt/kube-proxy; outside of it there are only links and the systemd unit. So a
release is installed completely or not at all, and the previous release remains for processes that still run it. The
installation needs only Python's standard library, no pip and no network: the archive contains the wheels for each
Python version and processor. The wheels are unpacked, because compiled modules cannot be loaded from an archive."""

from __future__ import annotations

import argparse
import compileall
import hashlib
import io
import os
import platform
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path, PurePosixPath

PREFIX = "/opt/kube-proxy"
UNIT = "usr/local/lib/systemd/system/kube-proxy.service"
LINKS = {
    "usr/local/bin/kube-proxy": "bin/kube-proxy",
    "usr/local/share/bash-completion/completions/kube-proxy": "share/completion/kube-proxy.bash",
    "usr/local/share/zsh/site-functions/_kube-proxy": "share/completion/_kube-proxy",
    "usr/share/fish/vendor_completions.d/kube-proxy.fish": "share/completion/kube-proxy.fish",
}
"""The links, keyed by their path below the root; the values are their targets below the release's folder. links_of adds
the manual pages."""
LAUNCHER = """\
#!{python} -I
import sys

from kubeproxy.cli import main

sys.exit(main())
"""


class RefusedError(Exception):
    """The program cannot be installed or removed on this machine; the message states the reason and the fix."""


def platform_tag() -> str:
    """Return the folder in the archive with the wheels for this interpreter. Raises RefusedError if the archive has
    none."""
    if sys.version_info < (3, 11):  # noqa: UP036 - an older Python may run this file
        raise RefusedError(f"Python {platform.python_version()} is older than 3.11: use a newer Python")
    if sys.implementation.name != "cpython" or getattr(sys, "abiflags", ""):
        raise RefusedError(
            "only the default build of CPython is supported: no other implementation, no debug or free-threaded build"
        )
    if platform.libc_ver()[0] != "glibc":
        raise RefusedError("only systems with glibc are supported: with another C library use the image, or pip")
    return f"cp{sys.version_info[0]}{sys.version_info[1]}-{platform.machine()}"


def wheels_of(archive: zipfile.ZipFile, tag: str) -> list[str]:
    """Return the names of the wheels to install, ours first. Raises RefusedError if the archive has none for this
    machine."""
    names = sorted(name for name in archive.namelist() if name.endswith(".whl"))
    ours = [name for name in names if name.startswith("wheels/any/")]
    needed = [name for name in names if name.startswith(f"wheels/{tag}/")]
    if not needed:
        there = ", ".join(sorted({name.split("/")[1] for name in names} - {"any"}))
        raise RefusedError(
            f"this archive has nothing for {tag}, only for {there}: make one by `make dist` or `make node`"
        )
    return ours + needed


def release_of(archive: zipfile.ZipFile, wheels: list[str]) -> str:
    """Return the name of the release's folder: version, Python, and a hash of all that goes into it."""
    seen = hashlib.sha256()
    for name in [*wheels, "kube-proxy.service", "manual.py", "__main__.py"]:
        seen.update(name.encode() + b"\0" + hashlib.sha256(archive.read(name)).digest())
    version = PurePosixPath(wheels[0]).name.split("-")[1]
    return f"{version}-py{sys.version_info[0]}.{sys.version_info[1]}-{seen.hexdigest()[:12]}"


def unpack(wheel: bytes, packages: Path) -> None:
    """Unpack a wheel into site-packages. Raises RefusedError if only pip could install the wheel."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as opened:
        for name in opened.namelist():
            first = PurePosixPath(name).parts[0]
            if first.endswith(".data") or ".." in PurePosixPath(name).parts or name.startswith("/"):
                raise RefusedError(f"a wheel has {name}, which this installer cannot install")
        opened.extractall(packages)


def build(archive: zipfile.ZipFile, wheels: list[str], folder: Path, final: str) -> None:
    """Create a release in `folder`, which is later moved to the path `final`."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    for script in (folder / "bin").iterdir():
        if not script.is_symlink():  # scripts such as activate contain the folder's present name
            script.unlink()
    # The link leads to the running interpreter, not to python3: after an upgrade of the system python3 may be another
    # version, which would not find these packages.
    interpreter = folder / "bin/python"
    really = interpreter.resolve()
    interpreter.unlink()
    interpreter.symlink_to(really)
    packages = folder / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    for name in wheels:
        unpack(archive.read(name), packages)
    python = f"{final}/bin/python"
    launcher = folder / "bin/kube-proxy"
    launcher.write_text(LAUNCHER.format(python=python))
    launcher.chmod(0o755)
    (folder / "share").mkdir()
    (folder / "share/kube-proxy.service").write_bytes(archive.read("kube-proxy.service"))
    command = [folder / "bin/python", "-I", "-", folder / "share"]
    subprocess.run(command, input=archive.read("manual.py"), check=True)
    compileall.compile_dir(packages, quiet=1, stripdir=str(folder), prependdir=final)


def links_of(release: Path) -> dict[str, str]:
    """Return the links to a release: each link's path below the root, and its target below the release's folder."""
    pages = sorted((release / "share/man/man8").glob("*.8"))
    return LINKS | {f"usr/local/share/man/man8/{page.name}": f"share/man/man8/{page.name}" for page in pages}


def is_ours(path: Path) -> bool:
    """Return whether a path is a link into /opt/kube-proxy."""
    return path.is_symlink() and str(path.readlink()).startswith(PREFIX + "/")


def link(path: Path, target: str) -> None:
    """Create or replace a link atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(path)


def install(archive: zipfile.ZipFile, root: Path) -> str:
    """Install the archive's release below `root`; return its folder's name. Raises RefusedError."""
    wheels = wheels_of(archive, platform_tag())
    name = release_of(archive, wheels)
    prefix = root / PREFIX[1:]
    program = root / "usr/local/bin/kube-proxy"
    if os.path.lexists(program) and not is_ours(program):
        raise RefusedError(f"{program} is there and not of this installer: move it away first (it is what runs now?)")
    release = prefix / name
    prefix.mkdir(parents=True, exist_ok=True)
    if not release.exists():
        fresh = prefix / f"{name}.new"
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            build(archive, wheels, fresh, f"{PREFIX}/{name}")
            fresh.rename(release)
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
    before = (prefix / "current").readlink().name if (prefix / "current").is_symlink() else name
    link(prefix / "current", name)
    wanted = links_of(release)
    for place, of_release in wanted.items():
        link(root / place, f"{PREFIX}/current/{of_release}")
    unit = root / UNIT
    unit.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(release / "share/kube-proxy.service", unit)
    for old in prefix.iterdir():  # a running proxy still loads modules of the previous release
        if old.name not in {"current", name, before}:
            shutil.rmtree(old)
    return name


def uninstall(root: Path) -> None:
    """Remove everything that `install` created below `root`. Raises RefusedError if nothing is installed, or the proxy
    runs."""
    prefix = root / PREFIX[1:]
    if not prefix.is_dir():
        raise RefusedError(f"nothing is installed in {prefix}")
    if str(root) == "/" and shutil.which("systemctl"):
        state = subprocess.run(["systemctl", "is-active", "kube-proxy"], check=False, capture_output=True, text=True)
        if state.stdout.strip() in {"active", "activating", "reloading"}:
            raise RefusedError(
                "the proxy runs: systemctl disable --now kube-proxy; then kube-proxy --cleanup, to remove its rules too"
            )
    # Also the links of older releases, which may differ.
    places = {root / place for place in LINKS} | set((root / "usr/local/share/man/man8").glob("kube-proxy*.8"))
    for path in places:
        if is_ours(path):
            path.unlink()
    (root / UNIT).unlink(missing_ok=True)
    shutil.rmtree(prefix)


def advice(root: Path) -> list[str]:
    """Return the remaining steps, and the obstacles, on this node."""
    found = []
    python = Path(sys.executable).resolve()
    if python.is_relative_to("/root") or python.is_relative_to("/home"):
        found.append(f"{python} is in a home folder, which the unit may not see: install with the system's python3")
    elsewhere = root / "etc/systemd/system/kube-proxy.service"
    if elsewhere.exists():
        found.append(f"{elsewhere} outranks the unit installed here: remove it, or change its ExecStart by hand")
    return found


def main() -> int:
    """Read the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="kube-proxy.pyz", description="Install kube-proxy on this node, or remove it."
    )
    parser.add_argument("action", choices=("install", "uninstall"))
    parser.add_argument("--root", type=Path, default=Path("/"), help="the root of the system to install into (/)")
    given = parser.parse_args()
    root = given.root.resolve()
    try:
        if str(root) == "/" and os.geteuid() != 0:
            raise RefusedError("only root can install for all users: run the command with sudo")
        if given.action == "uninstall":
            uninstall(root)
            print(f"Removed {PREFIX}, its links and its unit. The rules remain in the kernel.")
            return 0
        with zipfile.ZipFile(Path(__file__).parent) as archive:
            name = install(archive, root)
    except (RefusedError, OSError, subprocess.CalledProcessError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    print(f"Installed {PREFIX}/{name}: /usr/local/bin/kube-proxy, manual pages, completion and the unit kube-proxy.")
    for line in advice(root):
        print(f"Note: {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
