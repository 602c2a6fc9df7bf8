"""Container images as archives for `ctr images import`, built from this machine's programs, without a registry."""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from e2e.errors import E2EError

SHELL_PROGRAMS: Final = ("bash", "curl", "ip", "dig", "nslookup", "iperf", "wget")
FIREWALL_PROGRAMS: Final = ("conntrack", "iptables-nft")
_ENVIRONMENT: Final = "PATH=/usr/bin:/bin:/usr/sbin:/sbin:/"


class Image(NamedTuple):
    """An image: the name's last part in upstream's list of images, its root folder and its entry point."""

    names: tuple[str, ...]
    root: str
    entry: Sequence[str]


PAUSE: Final = Image(("pause",), "pause", ("/agnhost", "pause"))
IMAGES: Final = (
    Image(("agnhost", "busybox"), "shell", ("/agnhost",)),
    PAUSE,
    Image(("regression-issue-74839",), "regression", ("/regression-issue-74839",)),
    Image(("distroless-iptables",), "firewall", ()),
)


def upstream_names(e2e_test: Path) -> list[str]:
    """Return the images that a test binary uses, with registry and tag. Raises E2EError."""
    done = subprocess.run([str(e2e_test), "--list-images"], capture_output=True, text=True, check=False)
    names = re.findall(r"^\S+/\S+:\S+$", done.stdout, re.MULTILINE)
    if not names:
        raise E2EError(f"{e2e_test} --list-images names no image: {done.stderr.strip()[-300:]}")
    return names


def tags(image: Image, upstream: Iterable[str]) -> list[str]:
    """Return the full names under which tests request an image."""
    return [name for name in upstream if name.rpartition("/")[2].partition(":")[0] in image.names]


def make_images(programs: Path, folder: Path) -> dict[str, list[str]]:
    """Write an archive for each of IMAGES into a folder; return its file's stem and its tags."""
    upstream = upstream_names(programs / "e2e.test")
    _make_roots(programs, folder)
    made = {}
    for image in IMAGES:
        made[image.root] = tags(image, upstream)
        write_image(folder / f"{image.root}.tar", folder / image.root, made[image.root], image.entry)
    return made


def write_image(archive: Path, root: Path, names: Sequence[str], entry: Sequence[str]) -> None:
    """Write a docker archive of one layer: the files of a folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(root, arcname=".")
    layer = buffer.getvalue()
    digest = hashlib.sha256(layer).hexdigest()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": list(entry) or None, "Env": [_ENVIRONMENT]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        "history": [{"created": "2026-01-01T00:00:00Z"}],
    }
    text = json.dumps(config).encode()
    config_name = f"{hashlib.sha256(text).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": list(names), "Layers": [f"{digest}/layer.tar"]}]
    with tarfile.open(archive, "w") as tar:
        for name, content in (
            (config_name, text),
            (f"{digest}/layer.tar", layer),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def _make_roots(programs: Path, folder: Path) -> None:
    shell = folder / "shell"
    _make_shell(shell)
    firewall = folder / "firewall"
    shutil.copytree(shell, firewall, symlinks=True)
    for program in FIREWALL_PROGRAMS:
        _add_program(firewall, program)
    _copy(programs / "agnhost", shell / "agnhost")
    (shell / "usr/bin/pause").symlink_to("/agnhost")
    _copy(programs / "agnhost", folder / "pause/agnhost")
    _copy(programs / "regression-issue-74839", folder / "regression/regression-issue-74839")


def _make_shell(root: Path) -> None:
    """Fill a folder with busybox, and the GNU programs whose behaviour upstream's tests require."""
    for name in ("bin", "usr/bin", "usr/sbin", "etc/ssl", "tmp", "proc", "sys", "dev", "run", "var/run", "uploads"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    busybox = _program("busybox")
    _copy(busybox, root / "bin/busybox")
    listed = subprocess.run([str(busybox), "--list"], capture_output=True, text=True, check=True).stdout.split()
    for applet in set(listed) - {"busybox", "sh", "nc"}:
        (root / "bin" / applet).symlink_to("busybox")
    for program in SHELL_PROGRAMS:
        _add_program(root, program)
    _add_program(root, "nc.openbsd", "nc")
    # The tests use bash's /dev/tcp in scripts of /bin/sh, and expect wget to fail without retries.
    for name in ("sh", "bash"):
        (root / "bin" / name).unlink(missing_ok=True)
        (root / "bin" / name).symlink_to("../usr/bin/bash")
    (root / "etc/wgetrc").write_text("tries = 1\n")
    (root / "etc/passwd").write_text("root:x:0:0:root:/:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    (root / "etc/nsswitch.conf").write_text("hosts: files dns\n")
    for library in ("libnss_dns.so.2", "libnss_files.so.2", "libresolv.so.2"):
        for found in Path("/lib").glob(f"*-linux-gnu/{library}"):
            _copy(found, root / found.relative_to("/"))


def _add_program(root: Path, program: str, name: str = "") -> None:
    """Copy a program and its shared libraries."""
    source = _program(program)
    target = root / "usr/bin" / (name or program)
    (root / "bin" / target.name).unlink(missing_ok=True)
    _copy(source, target)
    listed = subprocess.run(["ldd", str(source)], capture_output=True, text=True, check=False).stdout
    for library in re.findall(r"(/\S+)", listed):
        _copy(Path(library), root / library.lstrip("/"))


def _program(name: str) -> Path:
    found = shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin:/usr/local/bin")
    if found is None:
        raise E2EError(f"{name} is not installed")
    return Path(found).resolve()


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        shutil.copy2(source, target)
