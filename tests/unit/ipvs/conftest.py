"""Makes the builders of the model's tests, and the random plans of nftables mode's, importable here."""

import sys
from pathlib import Path

for folder in ("model", "nftables"):
    sys.path.append(str(Path(__file__).parents[1] / folder))
