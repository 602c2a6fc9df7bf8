"""Network namespaces for tests: created with unique names, entered by separate threads, deleted at the end."""

from __future__ import annotations

import ctypes
import os
import secrets
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000


@contextmanager
def namespace() -> Iterator[str]:
    """Create a network namespace with loopback up, and delete it afterwards."""
    name = f"kpt-{os.getpid()}-{secrets.token_hex(3)}"
    run("ip", "netns", "add", name)
    try:
        run("ip", "-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        run("ip", "netns", "del", name)


def run(*command: str, text: str = "") -> str:
    """Run a command and return its output; fail with its errors."""
    done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def inside(name: str, work: Callable[[], T]) -> T:
    """Call `work` in a thread inside the namespace; any thread can use the sockets that it returns."""
    results: list[T] = []
    errors: list[BaseException] = []

    def enter() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        fd = os.open(f"/run/netns/{name}", os.O_RDONLY)
        try:
            assert libc.setns(fd, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
            results.append(work())
        except BaseException as error:
            errors.append(error)
        finally:
            os.close(fd)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
