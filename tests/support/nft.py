"""Runs the nft command, which tests use as another program and as an independent reader."""

from __future__ import annotations

import subprocess

from kubeproxy.errors import ApplyError


def run(text: str) -> None:
    """Load ruleset text in one transaction. Raises ApplyError with nft's message."""
    done = subprocess.run(["nft", "-f", "-"], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ApplyError(f"nft -f -: {done.stderr.strip()}")
