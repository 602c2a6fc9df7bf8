"""Runs `kubectl kubeproxy`. This file is the entry point of the archive kubectl-kubeproxy.

Compiled modules cannot be loaded from an archive, so the archive is unpacked once into a folder in the user's cache, to
which no other user can write. Under the name kubectl_complete-kubeproxy the archive completes command lines for
kubectl. Standard library alone."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import platform
import stat
import sys
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path


def unpacked(archive: zipfile.ZipFile) -> Path:
    """Return the folder with the unpacked packages of this archive. Raises SystemExit if this Python cannot use
    them."""
    if sys.version_info < (3, 11):  # noqa: UP036 - an older Python may run this file
        raise SystemExit(f"Python {platform.python_version()} is older than 3.11: use a newer Python")
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}-{platform.machine()}"
    compiled = f"wheels/{tag}/" if platform.libc_ver()[0] == "glibc" else "none"
    wheels = [name for name in sorted(archive.namelist()) if name.startswith(("wheels/any/", compiled))]
    if len(wheels) < 2 and importlib.util.find_spec("msgspec") is None:
        raise SystemExit(f"this archive has no wheel for {tag}: python3 -m pip install msgspec")
    contents = [archive.read(name) for name in wheels]
    base = cache()
    folder = base / hashlib.sha256(b"".join(contents)).hexdigest()[:16]
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=base) as fresh:
            for content in contents:
                zipfile.ZipFile(io.BytesIO(content)).extractall(Path(fresh, "new"))
            with suppress(FileExistsError):  # another process was faster
                Path(fresh, "new").rename(folder)
    return folder


def cache() -> Path:
    """Return the folder in the user's cache. Raises SystemExit if another user could write to it."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "kubectl-kubeproxy")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise SystemExit(f"{folder} must be a folder to which only you can write: remove it")
    return folder


def main() -> int:
    """Run the plugin, or its completion; return the exit code."""
    with zipfile.ZipFile(Path(__file__).parent) as archive:
        sys.path.insert(0, str(unpacked(archive)))
    from kubeproxy.cluster import completion  # noqa: PLC0415 - it must be on the path first
    from kubeproxy.cluster import main as plugin  # noqa: PLC0415

    completes = Path(sys.argv[0]).name.startswith("kubectl_complete")
    return completion.main() if completes else plugin.main()


if __name__ == "__main__":
    sys.exit(main())
