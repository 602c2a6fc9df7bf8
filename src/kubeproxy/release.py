"""The identity of this build: its version, the git commit, and whether the source tree had uncommitted changes."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

NUMBER: Final = "0.1.0"
"""The number of the next release. Only a clean tree at the tag v0.1.0 is version 0.1.0; any other tree is a development
version."""

SAME_BUILD: Final = "restart the proxy, or run the command in the proxy's container"
"""The advice if the command and the proxy are different builds."""

_WRITTEN = Path(__file__).with_name("BUILD")
_CHECKOUT = Path(__file__).parents[2]


class Build(NamedTuple):
    """PEP 440 version, commit (40 hexadecimal digits) and git's tree state: clean or dirty; '' stands for unknown."""

    version: str
    commit: str = ""
    tree: str = ""

    @property
    def name(self) -> str:
        """The version with the commit, such as 0.1.0+g1a2b3c4d5e6f, because a tag can be moved to another commit."""
        return self.version if "+" in self.version else f"{self.version}+g{self.commit[:12]}"


@cache
def build(written: Path = _WRITTEN, checkout: Path = _CHECKOUT) -> Build:
    """Return the build's identity from the wheel (hatch_build.py), else from KUBE_PROXY_BUILD, else from git. The wheel
    and KUBE_PROXY_BUILD contain the fields, separated by spaces. The result is cached, because an upgrade may replace
    the files of a running proxy, and a checkout may change its commit."""
    try:
        text = written.read_text(encoding="ascii")
    except OSError:
        text = os.environ.get("KUBE_PROXY_BUILD", "")
    return Build(*text.split()) if text else of_checkout(checkout)


def different(running: str) -> str:
    """Return the message that the proxy and this command have different versions, with the fix."""
    return f"the proxy runs version {running}, this command is {build().name}: {SAME_BUILD}"


def of_checkout(root: Path) -> Build:
    """Return the identity of a git checkout; the version ends with +unknown if git does not answer."""
    import subprocess  # noqa: PLC0415 - an installed proxy does not load it

    git = ("git", "-c", f"safe.directory={root}", "--no-optional-locks", "-C", str(root))

    def ask(*words: str) -> str:
        return subprocess.run([*git, *words], capture_output=True, text=True, check=True).stdout

    try:
        if not (root / ".git").exists():  # git would search the parent folders
            raise FileNotFoundError(root / ".git")
        status = ask("status", "--porcelain=v2", "--branch")
        tree = "dirty" if any(not line.startswith("#") for line in status.splitlines()) else "clean"
        released = tree == "clean" and ask("tag", "--points-at", "HEAD", "--list", f"v{NUMBER}")
    except (OSError, subprocess.CalledProcessError):
        return Build(f"{NUMBER}.dev0+unknown")
    commit = status.split()[2]
    if released:
        return Build(NUMBER, commit, tree)
    return Build(f"{NUMBER}.dev0+g{commit[:12]}" + (".dirty" if tree == "dirty" else ""), commit, tree)


def architecture() -> str:
    """Return Go's name for the architecture of this machine, such as amd64."""
    machine = os.uname().machine
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)


if __name__ == "__main__":
    print(*build())
