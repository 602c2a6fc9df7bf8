"""A child process that opens sockets in another namespace: how it ended, if it did not answer."""

import json
import subprocess
import sys
from functools import cache

import pytest

# A process of its own, because it forks: it prints the error of each way in which the child process ends.
_PROGRAM = """
import errno, json, os, signal, socket, sys, time
from kubeproxy.errors import KubeProxyError
from kubeproxy.kernel.proc import namespaces

ADDRESS = socket.inet_aton("192.0.2.1")
search, fork, found = namespaces._enter, os.fork, {}

def fail(error):
    raise error

def error_of(what):
    try:
        what()
    except KubeProxyError as error:
        return type(error).__name__, str(error)

def enter(instead):
    namespaces._enter = instead
    return namespaces.SocketsElsewhere.enter(ADDRESS)

def ends(way, instead):
    found[way] = error_of(lambda: enter(instead))

def here(path):
    namespaces._files = lambda: iter([namespaces.Path(path)])
    return search

ends("killed", lambda _: os.kill(os.getpid(), signal.SIGKILL))
ends("exits at once", lambda _: os._exit(7))
ends("exits", lambda _: sys.exit(3))
ends("interrupted", lambda _: fail(KeyboardInterrupt))
ends("fails", lambda _: fail(ValueError("\\udcff" + 2000 * "ü")))
ends("not a namespace", here("/dev/null"))
ends("namespace has ended", here("/proc/self/no-such-file"))
with enter(lambda _: None) as entered:
    found["address is gone"] = error_of(lambda: entered.open(socket.SOCK_STREAM))
    os.waitid(os.P_PID, entered._child, os.WEXITED | os.WNOWAIT)
    found["has failed before"] = error_of(lambda: entered.open(socket.SOCK_STREAM))
with enter(lambda _: None) as entered:
    os.kill(entered._child, signal.SIGSTOP)
    os.waitid(os.P_PID, entered._child, os.WSTOPPED)
    entered._channel.send(b"x")  # it ends with an unread request
    os.kill(entered._child, signal.SIGTERM)
    os.kill(entered._child, signal.SIGCONT)
    found["ends with a request"] = error_of(lambda: entered.open(socket.SOCK_STREAM))
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
ends("ignored", lambda _: os._exit(7))
os.fork = lambda: fail(OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)))
ends("no process", search)
found["descriptors"] = os.listdir("/proc/self/fd")
print(json.dumps(found))
"""


@cache
def endings() -> dict[str, list[str]]:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("way", "text"),
    [
        ("killed", "the process that enters the namespace ended by signal 9 (Killed)"),
        ("exits at once", "the process that enters the namespace ended with exit status 7"),
        ("exits", "SystemExit(3)"),
        ("interrupted", "KeyboardInterrupt()"),
        ("fails", "ValueError('\\udcff" + "ü" * 502 + "�"),
        ("namespace has ended", "none of the 1 other network namespaces that are visible here has this address"),
        ("address is gone", "[Errno 99] Cannot assign requested address"),
        ("has failed before", "the process that enters the namespace ended with exit status 0"),
        ("ends with a request", "the process that enters the namespace ended by signal 15 (Terminated)"),
        ("ignored", "the process that enters the namespace ended for an unknown reason"),
        ("no process", "cannot start a process: Resource temporarily unavailable"),
    ],
)
def test_the_end_of_the_process_is_reported(way: str, text: str) -> None:
    kind, said = endings()[way]
    assert (kind, said) == ("NoAnswerError", text)


def test_a_namespace_that_cannot_be_entered_needs_a_right() -> None:
    kind, text = endings()["not a namespace"]
    assert kind == "Unsupported"
    assert text.endswith("1 of 1 network namespaces here cannot be entered")


def test_no_descriptor_stays_open() -> None:
    assert len(endings()["descriptors"]) == len({"0", "1", "2", "of the list itself"})
