"""Makes the files of dist/ from this checkout and a folder of wheels: `tools/dist` fetches the wheels and calls it.

python deploy/release.py WHEELS OUT            # the wheel, kube-proxy.pyz, kubectl-kubeproxy
python deploy/release.py WHEELS OUT --all      # also image recipe, chart, bill of materials, SHA256SUMS

The same commit and the same wheels give the same bytes with the same Python and zlib: archives are sorted, have fixed
modes and owners, and the time of the commit (or of SOURCE_DATE_EPOCH). It needs git and hatchling.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import sbom
from node.bundle import bundle, plugin

ROOT = Path(__file__).resolve().parent.parent

PRODUCTS = ("kubeproxy-*", "kube-proxy.pyz", "kubectl-kubeproxy")
SUMS = "SHA256SUMS"


class RefusedError(Exception):
    """The files cannot be made; the message names the reason and the remedy."""


def git(*words: str) -> str:
    """Return what a git command of this checkout prints. Raises RefusedError."""
    command = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        raise RefusedError(
            f"git {words[0]} failed: {reason.strip()}; without git, set KUBE_PROXY_BUILD and SOURCE_DATE_EPOCH, from "
            "which the wheel and kube-proxy.pyz can be made"
        ) from None


def tracked(*paths: str) -> dict[str, bytes]:
    """Return the files that git tracks below these paths, by their path in the repository."""
    names = git("ls-files", "-z", "--", *paths).split("\0")
    return {name: (ROOT / name).read_bytes() for name in names if name}


def pack(out: Path, files: Mapping[str, bytes], epoch: int) -> None:
    """Write a tar.gz whose bytes depend only on names, contents and the time."""
    with (
        out.open("wb") as opened,
        gzip.GzipFile(filename="", fileobj=opened, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive,
    ):
        for name, content in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime, entry.mode = len(content), epoch, 0o644
            archive.addfile(entry, io.BytesIO(content))


def replaced(text: bytes, values: Mapping[str, str]) -> bytes:
    """Return a text in which, for each key, the line that begins with the key ends with the key's value. Raises
    RefusedError without one."""
    for start, value in values.items():
        text, count = re.subn(rb"^%s.*$" % re.escape(start.encode()), f"{start}{value}".encode(), text, flags=re.M)
        if not count:
            raise RefusedError(f"no line begins with {start!r}")
    return text


def image_tag(version: str) -> str:
    """Return a version as an image tag, in which no plus sign is allowed."""
    return version.replace("+", "-")


def image_recipe(build: tuple[str, str, str], epoch: int) -> dict[str, bytes]:
    """Return the files that `docker build - <` needs: the Dockerfile, with this build's arguments, and its context."""
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    arguments = {
        "ARG BUILD=": json.dumps(" ".join(build)),
        "ARG VERSION=": image_tag(build[0]),
        "ARG SOURCE_DATE_EPOCH=": str(epoch),
    }
    recipe = replaced((ROOT / "deploy/Dockerfile").read_bytes(), arguments)
    return tracked(*kept) | {"Dockerfile": recipe}


def chart(version: str) -> dict[str, bytes]:
    """Return the files of the chart; its version has the form of semantic versions, which Helm demands."""
    files = {f"kubeproxy/{name.removeprefix('deploy/chart/')}": text for name, text in tracked("deploy/chart").items()}
    about = {"version: ": re.sub(r"\.(dev)", r"-\1.", version), "appVersion: ": image_tag(version)}
    return files | {"kubeproxy/Chart.yaml": replaced(files["kubeproxy/Chart.yaml"], about)}


def bill(wheel: Path, wheels: Path, epoch: int) -> str:
    """Return the bill of materials of the wheel and kube-proxy.pyz. Raises ValueError for a wheel not in the lock."""
    hashes: dict[str, set[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for path in (wheel, *sorted(wheels.glob("*/*.whl"))):
            with zipfile.ZipFile(path) as archive:
                (about,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
                archive.extract(about, folder)
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            hashes.setdefault(sbom.normal(path.name.partition("-")[0]), set()).add(digest)
        run = sbom.locked((ROOT / "deploy/run.lock").read_text())
        parts = [part._replace(hashes=tuple(sorted(hashes[part.name]))) for part in sbom.of_pypi(Path(folder), run)]
    tools = [sbom.pinned(*pin) for pin in sbom.locked((ROOT / "deploy/build.lock").read_text()).items()]
    return json.dumps(sbom.document(parts, epoch, tools), indent=1) + "\n"


def release(wheels: Path, out: Path, *, everything: bool, tag: str) -> None:
    """Make the files; the files of an earlier call are removed. Raises RefusedError, ValueError, OSError."""
    build = runpy.run_path(str(ROOT / "src/kubeproxy/release.py"))["build"]()
    if tag and tag != f"v{build.version}":
        raise RefusedError(
            f"this tree is {build.name}, not the release {tag}: tag a clean tree whose src/kubeproxy/release.py "
            "has that NUMBER"
        )
    out.mkdir(parents=True, exist_ok=True)
    for old in (each for pattern in (*PRODUCTS, SUMS) for each in out.glob(pattern)):
        old.unlink()
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or git("show", "--no-patch", "--format=%ct"))
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(epoch), "KUBE_PROXY_BUILD": " ".join(build)}
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out.resolve())]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = out.glob("kubeproxy-*.whl")
    bundle(wheel, wheels, out / "kube-proxy.pyz")
    plugin(wheel, wheels, out / "kubectl-kubeproxy")
    if not everything:
        return
    pack(out / f"kubeproxy-{build.version}-image.tar.gz", image_recipe(build, epoch), epoch)
    pack(out / f"kubeproxy-{build.version}.tgz", chart(build.version), epoch)
    (out / f"kubeproxy-{build.version}.spdx.json").write_text(bill(wheel, wheels, epoch))
    made = sorted(each for pattern in PRODUCTS for each in out.glob(pattern))
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in made]
    (out / SUMS).write_text("".join(lines))


def main() -> int:
    """Read the command line; return the exit code."""
    parser = argparse.ArgumentParser(description="Make the files of dist/.")
    parser.add_argument("wheels", type=Path, help="one folder of wheels for each Python and processor: cp311-x86_64")
    parser.add_argument("out", type=Path, help="the folder to write to")
    parser.add_argument("--all", action="store_true", help="also image recipe, chart, bill of materials, SHA256SUMS")
    parser.add_argument("--tag", default="", help="refuse a tree that is not the release of this tag, as v0.1.0")
    given = parser.parse_args()
    try:
        release(given.wheels, given.out, everything=given.all, tag=given.tag)
    except (RefusedError, ValueError, OSError, subprocess.CalledProcessError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
