"""Makes dist/kube-proxy.pyz of wheels (`python bundle.py WHEEL FOLDER OUT`), and dist/kubectl-kubeproxy. FOLDER has one
folder of wheels for each Python and processor, as cp311-x86_64. The same wheels give the same bytes.
"""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
LONG_AGO = (1980, 1, 1, 0, 0, 0)


def bundle(wheel: Path, folder: Path, out: Path) -> None:
    """Write kube-proxy.pyz: the installer as its entry point, the unit, the writer of manual pages, and all wheels."""
    files = {"__main__.py": HERE / "install.py", "manual.py": HERE / "manual.py"}
    files["kube-proxy.service"] = HERE.parent / "systemd/kube-proxy.service"
    _write(out, files | _wheels(wheel, folder, "*.whl"))


def plugin(wheel: Path, folder: Path, out: Path) -> None:
    """Write kubectl-kubeproxy: its entry point, our wheel, and the only package that it needs."""
    _write(out, {"__main__.py": HERE / "plugin.py"} | _wheels(wheel, folder, "msgspec-*.whl"))


def _wheels(wheel: Path, folder: Path, pattern: str) -> dict[str, Path]:
    others = {f"wheels/{one.parent.name}/{one.name}": one for one in sorted(folder.glob(f"*/{pattern}"))}
    return {f"wheels/any/{wheel.name}": wheel} | others


def _write(out: Path, files: Mapping[str, Path]) -> None:
    fresh = out.with_name(out.name + ".new")
    with fresh.open("wb") as opened:
        opened.write(b"#!/usr/bin/env python3\n")
        with zipfile.ZipFile(opened, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, path in files.items():
                entry = zipfile.ZipInfo(name, LONG_AGO)
                entry.external_attr = 0o644 << 16
                # Wheels are compressed already.
                entry.compress_type = zipfile.ZIP_STORED if name.endswith(".whl") else zipfile.ZIP_DEFLATED
                archive.writestr(entry, path.read_bytes())
    fresh.chmod(0o755)
    fresh.replace(out)


if __name__ == "__main__":
    bundle(*map(Path, sys.argv[1:]))
