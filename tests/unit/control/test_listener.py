"""The commands' socket: private; it replaces the socket of an ended process, never one that is in use."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from select import select

import pytest

from kubeproxy.control.listener import connect, discard, listen

WAITING = 17
"""Number of connections that a socket with a backlog of 16 queues before accept (unix_recvq_full)."""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "run" / "control.sock")


def test_file_and_folder_are_the_owners_alone(path: str) -> None:
    before = os.umask(0o022)
    os.umask(before)
    with listen(path), connect(path, 1.0):
        assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
        assert stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o700
    after = os.umask(before)
    assert after == before


def test_the_socket_of_an_ended_process_is_replaced(path: str) -> None:
    listen(path).close()
    assert Path(path).exists()
    with listen(path), connect(path, 1.0):
        pass


def test_the_process_that_already_serves_is_named(path: str) -> None:
    with listen(path):
        with pytest.raises(OSError, match=f"process {os.getpid()} already listens on this socket"):
            listen(path)
        discard(path)
        assert Path(path).exists()
    discard(path)
    assert not Path(path).exists()
    discard(path)


def test_another_file_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    file.write_text("mine")
    with pytest.raises(OSError, match="exists and is not a socket"):
        listen(str(file))
    discard(str(file))
    assert file.read_text() == "mine"


def test_a_path_may_be_longer_than_an_address(tmp_path: Path) -> None:
    path = str(tmp_path / ("a" * 100) / "control.sock")
    assert len(path) > 107
    with listen(path) as server, connect(path, 1.0) as client:
        server.setblocking(True)
        accepted, _ = server.accept()
        with accepted:
            client.send(b"x")
            assert accepted.recv(1) == b"x"
    with pytest.raises(ConnectionRefusedError):
        connect(path, 1.0)


def test_connections_that_cannot_be_accepted_wait_in_the_backlog(path: str) -> None:
    with listen(path) as server, ExitStack() as opened:
        for _ in range(WAITING):
            opened.enter_context(connect(path, 5.0))
        with pytest.raises(TimeoutError, match=r"the connection was not accepted within 0\.01 s"):
            connect(path, 0.01)
        with ThreadPoolExecutor(1) as pool:
            last = pool.submit(connect, path, 30.0)
            for _ in range(WAITING + 1):
                select([server], [], [], 30.0)
                server.accept()[0].close()
            last.result().close()


def test_a_folder_that_other_users_can_write_to_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    path, link = str(shared / "control.sock"), tmp_path / "link"
    link.symlink_to(shared)
    with listen(path):
        shared.chmod(0o1777)
        for asked in (path, str(link / "control.sock")):
            with pytest.raises(OSError, match="every user may create a socket in"):
                connect(asked, 1.0)
    with pytest.raises(OSError, match="use a folder that only its owner can write to"):
        listen(path)


def test_a_start_does_not_wait_for_a_process_that_accepts_no_connection(path: str) -> None:
    with listen(path), ExitStack() as opened:
        for _ in range(WAITING):
            opened.enter_context(connect(path, 5.0))
        with pytest.raises(TimeoutError, match="the connection was not accepted within 0 s"):
            listen(path)
