"""Makes the builders of the model's tests importable here: plans are made of the same objects."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
