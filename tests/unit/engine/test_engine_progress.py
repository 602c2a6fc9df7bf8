"""Progress reports of a long full sync, and no reports of other syncs."""

import time

import pytest

from kubeproxy.backends.mode import Abilities
from kubeproxy.engine import backlog
from kubeproxy.engine import engine as engine_module
from support.staged_engine import READY, FakeBackend, endpoints, play, service


class GradualBackend(FakeBackend):
    """A backend that reports its progress."""

    @property
    def abilities(self):
        return Abilities(programmed=lambda: len(self.state))


def told(caplog):
    return [record.message for record in caplog.records if record.message.startswith("Programming")]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (GradualBackend, [f"Programming {done} of 3 Services, IPv4" for done in range(4)]),
        (FakeBackend, ["Programming 3"]),
    ],
)
def test_a_long_full_sync_logs_its_progress(caplog, monkeypatch, kind, words):
    monkeypatch.setattr(engine_module, "PROGRESS_SECONDS", 0.001)
    caplog.set_level("INFO", logger="kubeproxy.engine")

    async def scene(stage):
        stage.backend.__class__ = kind
        seen = []

        def slow():
            seen.append(str(stage.engine.progress))
            time.sleep(0.05)  # the sync runs in a thread

        stage.backend.before_step = slow
        stage.tell(*READY, *(piece for n in (1, 2, 3) for piece in (service(f"s{n}", n), endpoints(f"s{n}", n))))
        await stage.settled()
        assert all(any(text.startswith(word) for word in words) for text in seen)
        assert len(set(seen)) == len(seen) if kind is GradualBackend else seen
        assert told(caplog)
        assert all(any(text.startswith(word) for word in words) for text in told(caplog))
        assert stage.engine.progress is None
        count = len(told(caplog))
        # A change is no full sync, and there are no reports about an ended sync.
        stage.tell(endpoints("s1", 9))
        await stage.settled()
        assert len(told(caplog)) == count

    play(scene)


def test_a_short_sync_logs_nothing(caplog):
    caplog.set_level("INFO", logger="kubeproxy.engine")

    async def scene(stage):
        stage.tell(*READY, service("a"), endpoints("a", 1))
        await stage.settled()
        assert told(caplog) == []

    play(scene)


def test_a_refused_one_is_over(caplog, monkeypatch):
    monkeypatch.setattr(engine_module, "PROGRESS_SECONDS", 0.001)
    monkeypatch.setattr(backlog, "FIRST_RETRY", 60.0)

    async def scene(stage):
        stage.backend.failures = [True]
        stage.tell(*READY, service("a"), endpoints("a", 1))
        await stage.until(lambda: stage.notes.of("refused"))
        assert stage.engine.progress is None

    play(scene)
