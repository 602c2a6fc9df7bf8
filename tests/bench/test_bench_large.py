"""The proxy's part of the largest start, measured in one process, at a small size."""

from bench import large, worker


def test_the_proxys_part_is_measured_without_the_kernel() -> None:
    found = worker.measure(large.alone, size="10x2")
    assert found["cpu"] > 0
    assert found["peak"] >= found["rss"] > 10
