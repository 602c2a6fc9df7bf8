"""Where things are: the repository's root, recordings and conformance cases, of which all tests share one copy."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORDINGS = ROOT / "tests" / "recordings"
CASES = ROOT / "tests" / "conformance" / "cases"
