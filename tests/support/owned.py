"""Makes a table with the proxy's name that another program owns."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from lab.netns import run_in


@contextmanager
def owned_table(namespace: str) -> Iterator[None]:
    """Make a table with the proxy's name that another program owns while it runs (flags owner)."""

    def run() -> subprocess.Popen[bytes]:
        return subprocess.Popen(["nft", "-i"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

    with run_in(namespace, run) as owner:
        assert owner.stdin is not None
        owner.stdin.write(b"delete table ip kube-proxy\nadd table ip kube-proxy { flags owner ; }\n")
        owner.stdin.flush()
        yield
