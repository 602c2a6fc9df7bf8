"""bench is no part of the distribution: it is found in the repository's root."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
