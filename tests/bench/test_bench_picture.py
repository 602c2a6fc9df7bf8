"""The README's charts: drawn from the last figures of several sizes, and only from complete figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.picture import CHANGE, SYNC, Point, draw, points, words
from bench.worker import BenchmarkFailed


def figures(path: Path, *sizes: str) -> Path:
    one = {"median": 110.0, "low": 100.0, "high": 120.0, "runs": 3}
    two = {"median": 4.0, "low": 3.0, "high": 5.0, "runs": 3}
    rows = [
        {"case": f"{size} {case}", "figures": {"p50": one, "limit_p50": two}}
        for size in sizes
        for case in ("endpoint replaced", "Service added")
    ]
    rows += [{"case": size, "figures": {"ours": one, "limit": two}} for size in (*sizes, "5kx50")]
    about = {"command": "python -m bench", "machine": "M", "cpus": 2, "kernel": "6.1-a", "started": "2026-11-22T10"}
    path.write_text(json.dumps({"rows": rows, "circumstances": about}))
    return path


def test_the_points_are_those_of_one_case(tmp_path: Path) -> None:
    here, kernel = points(CHANGE, figures(tmp_path / "change.json", "1kx10", "10kx10", "44kx10"))
    assert here == [Point(n, 110e-6, 100e-6, 120e-6) for n in (1000, 10000, 44000)]
    assert kernel == [Point(n, 4e-6, 3e-6, 5e-6) for n in (1000, 10000, 44000)]


def test_without_all_sizes_there_is_no_chart(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkFailed, match="make bench WHAT=change first"):
        points(CHANGE, tmp_path / "change.json")
    with pytest.raises(BenchmarkFailed, match="have too few sizes"):
        points(CHANGE, figures(tmp_path / "change.json", "10kx10"))


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (59, "59 s"),
        (1003, "17 min"),
        (4.34, "4.3 s"),
        (0.193, "193 ms"),
        (0.0014, "1.4 ms"),
        (0.000173, "173 µs"),
        (9e-6, "9 µs"),
    ],
)
def test_durations_are_printed_in_readable_units(seconds: float, said: str) -> None:
    assert words(seconds) == said


def test_the_same_figures_give_the_same_file(tmp_path: Path) -> None:
    path = figures(tmp_path / "change.json", "1kx10", "10kx10", "44kx10")
    first, second = draw(CHANGE, tmp_path / "a", path.parent), draw(CHANGE, tmp_path / "b", path.parent)
    assert first.read_bytes() == second.read_bytes()


def test_a_full_sync_is_drawn_of_the_sizes_with_ten_endpoints(tmp_path: Path) -> None:
    path = figures(tmp_path / "sync.json", "100x10", "1kx10", "100kx10")
    here, _ = points(SYNC, path)
    assert [(point.services, round(point.middle, 3)) for point in here] == [(100, 0.11), (1000, 0.11), (100_000, 0.11)]
    assert draw(SYNC, tmp_path, tmp_path).read_text().startswith("<?xml")
