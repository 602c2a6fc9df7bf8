"""Finds loaded and built-in kernel modules, lists the modules that IPVS needs, and loads missing modules. Source of the
names of files and modules: kube-proxy's pkg/proxy/ipvs/proxier_linux.go and pkg/util/ipvs of v1.26."""

from __future__ import annotations

import logging
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from kubeproxy.errors import Unsupported

_log = logging.getLogger("kubeproxy.kernel")

_TIMEOUT: Final = 30.0
_IPVS: Final = ("ip_vs", "ip_vs_rr", "ip_vs_wrr", "ip_vs_sh")
# Linux 4.19 merged the module for IPv4 into nf_conntrack (commit a0ae2562c6c4).
_MERGED_CONNTRACK: Final = (4, 19)
_CONFIG_NAMES: Final = {"nf_conntrack_ipv4": "NF_CONNTRACK_IPV4", "xt_set": "NETFILTER_XT_SET", "dummy": "DUMMY"}


class ModuleFiles(Struct, frozen=True):
    """The files in which a kernel lists its modules."""

    release: Path = Path("/proc/sys/kernel/osrelease")
    loaded: Path = Path("/proc/modules")
    live: Path = Path("/sys/module")
    folder: Path = Path("/lib/modules")
    boot: Path = Path("/boot")


_FILES: Final = ModuleFiles()


def kernel_version(release: str) -> tuple[int, int]:
    """Return the first two numbers of a release: (5, 15) for 5.15.0-91-generic; (0, 0) if there are none."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def ipvs_modules(release: str) -> list[str]:
    """Return the modules that ipvs mode needs on a kernel of this release, independent of the scheduler."""
    conntrack = "nf_conntrack_ipv4" if kernel_version(release) < _MERGED_CONNTRACK else "nf_conntrack"
    return [*_IPVS, conntrack]


def release(files: ModuleFiles = _FILES) -> str:
    """Return the running kernel's release. Raises Unsupported without /proc."""
    path = files.release
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise Unsupported(f"cannot read the kernel's release from {path}: {error.strerror}; mount /proc") from error


def present(wanted: Sequence[str], files: ModuleFiles = _FILES) -> set[str]:
    """Return those wanted modules that are loaded or built in. An unreadable file counts as empty."""
    version = release(files)
    if not files.loaded.exists():
        # In a kernel without loadable modules only the configuration lists built-in modules.
        config = _read(files.boot / f"config-{version}")
        return {name for name in wanted if _configured(name, config)}
    have = {line.split(" ", 1)[0] for line in _read(files.loaded).splitlines()}
    built_in = _read(files.folder / version / "modules.builtin").splitlines()
    have |= {Path(line.strip()).name.removesuffix(".ko").replace("-", "_") for line in built_in}
    # In a container without /lib/modules, only this folder lists built-in modules, and only modules with parameters.
    return {name for name in wanted if name in have or (files.live / name).is_dir()}


def load(names: Sequence[str], modprobe: str = "modprobe") -> dict[str, str]:
    """Load modules; return the errors of the modules that could not be loaded. Raises nothing."""
    failed = {}
    for name in names:
        try:
            done = subprocess.run(
                [modprobe, "--", name], capture_output=True, text=True, check=False, timeout=_TIMEOUT, errors="replace"
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            failed[name] = f"{modprobe}: {error}"
            continue
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            failed[name] = lines[-1]
    for name, why in failed.items():
        _log.info("Cannot load the kernel module %s: %s", name, why)
    return failed


def require(names: Sequence[str], purpose: str, files: ModuleFiles = _FILES, modprobe: str = "modprobe") -> None:
    """Load those modules that are missing. Raises Unsupported, with the names and the fix, if a module is still
    missing. `purpose` names the feature that needs the modules, such as 'ipvs mode'."""
    missing = [name for name in names if name not in present(names, files)]
    failed = load(missing, modprobe)
    # Modules that modprobe has loaded are not looked up again, because /proc/modules may be unreadable.
    still = [name for name in failed if name not in present(list(failed), files)]
    if not still:
        return
    version = release(files)
    words = "the kernel modules" if len(still) > 1 else "the kernel module"
    raise Unsupported(
        f"{purpose} needs {words} {', '.join(still)}, which this kernel ({version}) does not have: "
        f"run `modprobe -a {' '.join(still)}` on the node, or install its package of modules; in a container, mount "
        f"/lib/modules. modprobe says: {failed[still[0]]}"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        _log.info("Cannot read %s: %s", path, error.strerror)
        return ""


def _configured(name: str, config: str) -> bool:
    option = _CONFIG_NAMES.get(name, name.upper())
    return re.search(rf"^CONFIG_{re.escape(option)}=y$", config, re.MULTILINE) is not None
