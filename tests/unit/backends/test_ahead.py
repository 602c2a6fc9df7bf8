"""Transactions that are prepared ahead: a refused piece of work leaves nothing behind."""

import gc
import weakref

import pytest

from kubeproxy.backends.ahead import Ahead
from kubeproxy.errors import ApplyError


class Work:
    """Data to commit: in a large cluster, megabytes."""


def refuse(work):
    raise ApplyError("no")


def attempt():
    work = Work()
    with Ahead(refuse) as ahead:
        list(ahead.commit(work))
        with pytest.raises(ApplyError):
            list(ahead.settled())
    return weakref.ref(work)


def test_refused_work_does_not_wait_for_the_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        assert [work for work in (attempt(), attempt()) if work() is not None] == []
    finally:
        gc.enable()
