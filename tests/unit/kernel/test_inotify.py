"""Notifications about files and directories."""

import pytest

from kubeproxy.kernel.proc.inotify import IN_CLOSE_WRITE, IN_CREATE, IN_DELETE_SELF, IN_IGNORED, IN_OPEN, Inotify


@pytest.fixture
def inotify():
    made = Inotify.open()
    yield made
    made.close()


def test_all_events_are_one_mask_and_reported_once(inotify, tmp_path):
    assert inotify.watch(tmp_path, IN_CREATE | IN_CLOSE_WRITE)
    assert inotify.happened() == 0
    for name in ("a", "a much longer name than the other one"):
        (tmp_path / name).write_text("")
    assert inotify.happened() == IN_CREATE | IN_CLOSE_WRITE
    assert inotify.happened() == 0


def test_a_file_that_goes_ends_its_watch(inotify, tmp_path):
    path = tmp_path / "lock"
    path.touch()
    assert inotify.watch(path, IN_OPEN | IN_DELETE_SELF)
    path.unlink()
    assert inotify.happened() & IN_IGNORED


def test_an_unwatchable_resource_is_reported(inotify, tmp_path):
    assert not inotify.watch(tmp_path / "missing", IN_OPEN)


@pytest.mark.parametrize("none", [Inotify(-1), None], ids=["system gives none", "closed"])
def test_a_missing_descriptor_has_no_events(inotify, tmp_path, none):
    if none is None:
        inotify.close()
    silent = none or inotify
    assert not silent.watch(tmp_path, IN_CREATE)
    assert silent.happened() == 0
    silent.close()
