"""The commit that this program was built from."""

from __future__ import annotations

from pathlib import Path

_BUILT = Path(__file__).with_name("COMMIT")
_CHECKOUT = Path(__file__).parents[2] / ".git"


def commit(built: Path = _BUILT, git: Path = _CHECKOUT) -> str:
    """Return the commit's hash: as written into the wheel (hatch_build.py), else of the checkout; '' if unknown."""
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
