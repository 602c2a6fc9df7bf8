"""Where things are: the repository's root and the recordings, of which there is one copy for all tests."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORDINGS = ROOT / "tests" / "recordings"
