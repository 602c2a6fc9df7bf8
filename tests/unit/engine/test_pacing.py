"""Delays that double, and tokens that are refilled."""

from kubeproxy.engine.pacing import Backoff, TokenBucket


def delays(backoff, count):
    return [backoff.failed() for _ in range(count)]


def test_delays_double_up_to_the_maximum_and_restart_after_a_success():
    backoff = Backoff(0.05, 10.0, jitter=lambda: 0.5)
    assert delays(backoff, 9) == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0]
    backoff.succeeded()
    assert delays(backoff, 1) == [0.05]


def test_delays_are_spread_to_both_sides():
    assert delays(Backoff(1.0, 10.0, spread=0.25, jitter=lambda: 0.0), 1) == [0.75]
    assert delays(Backoff(1.0, 10.0, spread=0.5, jitter=lambda: 1.0), 1) == [1.5]


def test_a_time_without_failures_counts_as_a_success():
    now = [0.0]
    backoff = Backoff(1.0, 30.0, healthy=60.0, clock=lambda: now[0], jitter=lambda: 0.5)
    assert delays(backoff, 2) == [1.0, 2.0]
    now[0] = 62.0  # the second delay was over at 2.0
    assert delays(backoff, 1) == [4.0]
    now[0] += 64.1
    assert delays(backoff, 1) == [1.0]


def test_a_million_failures_are_no_overflow():
    backoff = Backoff(0.05, 10.0, jitter=lambda: 0.5)
    backoff.failures = 1_000_000
    assert backoff.failed() == 10.0


def test_a_bucket_gives_its_burst_and_then_one_at_a_time():
    now = [0.0]
    bucket = TokenBucket(0.5, 2, lambda: now[0])
    assert [bucket.take() for _ in range(3)] == [True, True, False]
    now[0] = 2.0
    assert [bucket.take() for _ in range(2)] == [True, False]
    now[0] = 100.0
    assert [bucket.take() for _ in range(3)] == [True, True, False]


def test_tokens_that_are_not_there_yet_can_be_reserved():
    now = [0.0]
    bucket = TokenBucket(2.0, 1, lambda: now[0])
    assert [bucket.reserve() for _ in range(3)] == [0.0, 0.5, 1.0]
    now[0] = 1.0
    assert bucket.reserve() == 0.5
