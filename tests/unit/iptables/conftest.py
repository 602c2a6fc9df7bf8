"""The builders of objects and of random plans, for the tests in this folder."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / room) for room in ("model", "nftables")]
