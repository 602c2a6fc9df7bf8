"""The nft command, which tests ask as another program and as a witness."""

from __future__ import annotations

import subprocess

from kubeproxy.errors import ApplyError


def run(text: str) -> None:
    """Load ruleset text in one transaction. Raises ApplyError with nft's complaint."""
    done = subprocess.run(["nft", "-f", "-"], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ApplyError(f"nft -f -: {done.stderr.strip()}")
