"""Renders the objects of deploy/kustomize with `kubectl kustomize`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from support.programs import output

Json = dict[str, Any]


def build(folder: Path) -> list[Json]:
    """Return the objects of a folder with a kustomization.yaml, as kubectl would apply them.

    Each caller gets separate copies.
    """
    return list(yaml.safe_load_all(_built(folder)))


@cache
def _built(folder: Path) -> str:
    return output("kubectl", "kustomize", str(folder))
