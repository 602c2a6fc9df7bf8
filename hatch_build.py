"""Writes the identity of the build into the wheel: see src/kubeproxy/release.py."""

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BuildHook(BuildHookInterface[Any]):
    """A custom hook of hatchling, as pyproject.toml names it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add kubeproxy/BUILD to a wheel; an editable installation asks git. Raises ValueError without a commit."""
        if version == "editable":
            return
        build = runpy.run_path(str(Path(self.root, "src/kubeproxy/release.py")))["build"]()
        if not build.commit:
            raise ValueError(
                "the commit is unknown: build in a git checkout, or set KUBE_PROXY_BUILD to 'VERSION COMMIT clean'"
            )
        written = Path(self.directory, "BUILD")
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(" ".join(build) + "\n", encoding="ascii")
        build_data["force_include"][str(written)] = "kubeproxy/BUILD"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove the file that was written."""
        Path(self.directory, "BUILD").unlink(missing_ok=True)
