"""Paths of the repository's root, the recordings and the conformance cases."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORDINGS = ROOT / "tests" / "recordings"
CASES = ROOT / "tests" / "conformance" / "cases"
