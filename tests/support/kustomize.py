"""The objects of deploy/kustomize, by `kubectl kustomize`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from support.programs import output

Json = dict[str, Any]


def build(folder: Path) -> list[Json]:
    """The objects of a folder with a kustomization.yaml, as they are applied. Each caller has its own."""
    return list(yaml.safe_load_all(_built(folder)))


@cache
def _built(folder: Path) -> str:
    return output("kubectl", "kustomize", str(folder))
