"""Which build of the program this is: its version, and the commit that it was built from."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

SAME_BUILD: Final = "restart the proxy, or ask by the command of its own container"
"""What mends a command and a proxy of two builds."""

_BUILT = Path(__file__).with_name("COMMIT")
_CHECKOUT = Path(__file__).parents[2] / ".git"


@cache
def commit(built: Path = _BUILT, git: Path = _CHECKOUT) -> str:
    """Return the commit's hash: as written into the wheel (hatch_build.py), else of the checkout; '' if unknown.

    It is read once, which a proxy does as it starts (kubernetes_build_info): an upgrade may replace the files.
    """
    try:
        return built.read_text(encoding="ascii").strip()
    except OSError:
        pass
    try:
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        name = head.removeprefix("ref: ")
        if name == head:
            return head
        if (git / name).exists():
            return (git / name).read_text(encoding="ascii").strip()
        packed = (line.split() for line in (git / "packed-refs").read_text(encoding="utf-8").splitlines())
        return next((words[0] for words in packed if words[1:] == [name]), "")
    except (OSError, UnicodeDecodeError):
        return ""


def build() -> str:
    """Return the version with its commit, as 0.1.0+1a2b3c4d5e6f: two builds of a version are not the same."""
    from kubeproxy import __version__  # noqa: PLC0415 - hatch_build.py runs this file before the package is installed

    return "+".join(filter(None, (__version__, commit()[:12])))
