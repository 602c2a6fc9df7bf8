"""A table of our name that is another program's."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from lab.netns import run_in


@contextmanager
def owned_table(namespace: str) -> Iterator[None]:
    """A table of our name that belongs to another program for as long as that lives (flags owner)."""

    def run() -> subprocess.Popen[bytes]:
        return subprocess.Popen(["nft", "-i"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

    with run_in(namespace, run) as owner:
        assert owner.stdin is not None
        owner.stdin.write(b"delete table ip kube-proxy\nadd table ip kube-proxy { flags owner ; }\n")
        owner.stdin.flush()
        yield
