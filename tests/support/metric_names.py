"""The names of the metrics that the program registers: each mode registers its own, so no one registry has them all."""

import re

from support.places import ROOT


def metric_names() -> set[str]:
    """Return every name, as written in the source."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    return {name for text in texts for name in re.findall(r'"((?:kubeproxy|rest_client|kubernetes)_\w+)"', text)}
