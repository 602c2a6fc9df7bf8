"""Writes the commit into the wheel: the one of KUBE_PROXY_COMMIT, else that of the checkout."""

import os
import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface[Any]):
    """A custom hook of hatchling, as pyproject.toml names it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add kubeproxy/COMMIT to a wheel; an editable installation reads its checkout."""
        root = Path(self.root)
        release = runpy.run_path(str(root / "src" / "kubeproxy" / "release.py"))
        commit = os.environ.get("KUBE_PROXY_COMMIT") or release["commit"]()
        if commit and version != "editable":
            written = Path(self.directory) / "COMMIT"
            written.parent.mkdir(parents=True, exist_ok=True)
            written.write_text(f"{commit}\n", encoding="ascii")
            build_data["force_include"][str(written)] = "kubeproxy/COMMIT"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove the file that was written."""
        (Path(self.directory) / "COMMIT").unlink(missing_ok=True)
