"""The lock of legacy iptables with many waiters, with a holder that never releases it, and without descriptors."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from kubeproxy.errors import ApplyError
from kubeproxy.kernel.xtables import xtables_lock
from kubeproxy.kernel.xtables.xtables_lock import Lock, Place
from support.lock_files import is_free

TIMEOUT = 30.0

BUSY = """
import fcntl, os, sys, time
file = os.open(sys.argv[1], os.O_RDONLY)
while True:
    fcntl.flock(file, fcntl.LOCK_EX)
    os.write(1, b".")
    time.sleep(0.05)
    fcntl.flock(file, fcntl.LOCK_UN)
"""
"""A process that takes the lock again right after each release, like CNI plugins that set up many pods together."""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "xtables.lock"


@contextmanager
def holding(path):
    """Another open file that holds the lock; the body may release it with `os.close`."""
    file = os.open(path, os.O_RDONLY | os.O_CREAT, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield file
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def until(holds) -> None:
    end = time.monotonic() + TIMEOUT
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)


def waiting() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "lock"]


def test_it_comes_in_its_turn_where_others_want_it_all_the_time(path):
    """The kernel serves waiters in order; a poller that only tests the lock would nearly always come too late."""
    lock = Lock.open(path)
    reading, writing = os.pipe()
    others = [subprocess.Popen([sys.executable, "-c", BUSY, str(path)], stdout=writing) for _ in range(4)]
    turns = 0
    try:
        for _ in others:
            os.read(reading, 1)
        for _ in range(5):
            os.set_blocking(reading, False)
            while True:
                try:
                    os.read(reading, 1 << 16)
                except BlockingIOError:
                    break
            with lock.held(TIMEOUT):
                os.set_blocking(reading, True)
                os.write(writing, b"!")
                turns += os.read(reading, 1 << 16).index(b"!")
    finally:
        for other in others:
            other.kill()
            other.wait()
        os.close(reading)
        os.close(writing)
    assert turns <= 5 * 10 * len(others)  # about 5 * len(others); a waiter that is late on a busy CPU loses a turn
    until(lambda: not waiting())


def test_a_timed_out_waiter_holds_no_lock_and_gets_it_later(path):
    lock = Lock.open(path)
    with holding(path):
        for _ in range(3):
            with pytest.raises(ApplyError, match="has held the iptables lock"), lock.held(0.01):
                pass
        assert len(waiting()) == 1, "it stays in the queue"
    until(lambda: not waiting())
    assert is_free(path)
    with lock.held(0.0):
        assert not is_free(path)
    assert is_free(path)


def test_a_returning_namespace_keeps_its_position(path):
    lock = Lock.open(path)
    with holding(path) as file:
        with pytest.raises(ApplyError), lock.held(0.01):
            pass
        threading.Timer(0.05, fcntl.flock, [file, fcntl.LOCK_UN]).start()
        with lock.held(TIMEOUT) as waited:
            assert not is_free(path)
            assert waited.seconds > 0
    assert is_free(path)


def test_a_file_that_is_replaced_while_it_is_waited_for_is_waited_for_no_more(path, monkeypatch):
    monkeypatch.setattr(xtables_lock, "_LOOK", 0.01)
    lock = Lock.open(path)
    with holding(path):
        threading.Timer(0.05, path.unlink).start()
        with lock.held(TIMEOUT):
            assert not is_free(path)
    until(lambda: not waiting())
    assert is_free(path)


def test_a_lock_that_is_granted_at_the_timeout_is_taken_or_released(path):
    for pause in range(20):
        with holding(path) as file:
            queued = os.open(path, os.O_RDONLY)
            place = Place.open(queued)
            threading.Timer(0.0002 * pause, fcntl.flock, [file, fcntl.LOCK_UN]).start()
            time.sleep(0.002)
            ours = place.leave()
            until(place._over.is_set)
            assert is_free(path) != ours
            os.close(queued)


class Clock:
    """A clock that advances during each sleep."""

    def __init__(self):
        self.now = 100.0
        self.slept = []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.slept.append(round(seconds, 3))


@pytest.mark.parametrize("wanted", [True, False])
def test_a_polling_waiter_gets_the_lock_despite_constant_changes(path, monkeypatch, wanted):
    """iptables before 1.8.8, kubelet (5 s) and CNI plugins (forever) wait like this: so long no pod would start."""
    clock = Clock()
    monkeypatch.setattr(xtables_lock, "time", clock)
    lock = Lock.open(path)
    for number in range(12):
        with lock.held(0.0), lock.held(0.0):
            if wanted and number in {1, 7}:
                lock.wanted()
            clock.now += 1.8
        clock.now += 0.02
    assert clock.slept == ([0.98, 0.98] if wanted else [])


@pytest.mark.parametrize("what", ["thread", "descriptor"])
def test_it_is_waited_for_where_there_is_no_room_for_a_place(path, monkeypatch, what):
    def refuse(*_):
        raise RuntimeError("can't start new thread") if what == "thread" else OSError(errno.EMFILE, "too many")

    lock = Lock.open(path)
    with holding(path) as file:
        monkeypatch.setattr(*((threading.Thread, "start") if what == "thread" else (os, "dup")), refuse)
        with pytest.raises(ApplyError, match="has held the iptables lock"), lock.held(0.05):
            pass
        fcntl.flock(file, fcntl.LOCK_UN)
        with lock.held(0.0):
            pass


def test_a_lock_that_the_system_has_no_room_for_is_an_error_and_no_end(path, monkeypatch):
    lock = Lock.open(path)

    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ApplyError, match=r"cannot take the iptables lock .*: No locks available"), lock.held(TIMEOUT):
        pass
