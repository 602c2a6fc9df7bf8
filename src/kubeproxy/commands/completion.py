"""kube-proxy completion: what makes a shell complete this command line, to be read by it.

SHELL is bash, zsh or fish. An installed kube-proxy has its files where the shells look for them; for this shell alone:

  . <(kube-proxy completion bash)
  kube-proxy completion fish | source

With the word names it prints the Services that begin with the next word, for these scripts: by asking the running
proxy, and nothing at all when none answers.
"""

from __future__ import annotations

import argparse
import re
import sys

from kubeproxy.commands import YES
from kubeproxy.config.flags import BY_NAME
from kubeproxy.control.listener import connect

PATIENCE = 1.0
"""Seconds that somebody who pressed Tab waits for a proxy."""
_NAME = re.compile(r"[\w.-]+/[\w.-]+(:\w+(/(udp|sctp))?)?", re.ASCII)
"""What is shown of the answer: a shell gets nothing that means more to it than letters."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "fish", "names"), help="bash, zsh or fish")
    parser.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help="for names: what they begin with")


def run(given: argparse.Namespace) -> int:
    """Answer; return the exit code."""
    if given.shell == "names":
        for name in names(given.prefix, BY_NAME["control-socket"].default):
            sys.stdout.write(name + "\n")
        return YES
    from kubeproxy.commands import shells  # noqa: PLC0415 - names are asked for while somebody waits

    sys.stdout.write(shells.SCRIPTS[given.shell]())
    return YES


def names(prefix: str, path: str) -> list[str]:
    """Return the Services, as NAMESPACE/NAME, that the proxy at `path` has and that begin with `prefix`.

    With a colon in it: the ports of that Service, as NAMESPACE/NAME:80. Nothing when nobody answers.
    """
    from urllib.parse import quote  # noqa: PLC0415

    try:
        with connect(path, PATIENCE) as sock:
            sock.sendall(
                f"GET /names?prefix={quote(prefix)} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
            )
            with sock.makefile("rb") as answer:
                head, _, body = answer.read().partition(b"\r\n\r\n")
    except OSError:
        return []
    if not head.startswith(b"HTTP/1.1 200 "):
        return []
    return [line for line in body.decode(errors="replace").splitlines() if _NAME.fullmatch(line)]
