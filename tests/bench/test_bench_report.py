"""Tables and charts agree with the figures."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import charts, report
from bench.charts import Chart, Panel, Series
from bench.figures import Spread


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Spread(1234.56, 1200.0, 1300.0, 3), "1,234.6 (1,200.0..1,300.0)"),
        (Spread(2.0, 2.0, 2.0, 1), "2.0"),
        (3, "3.0"),
        ("ms", "ms"),
        (None, "-"),
    ],
)
def test_figures_as_text(value, expected):
    assert report.shown(value, 1) == expected


def test_the_spread_can_be_left_out():
    assert report.shown(Spread(2.0, 1.0, 3.0, 3), 0, with_spread=False) == "2"


@given(st.integers(1, 8), st.integers(1, 6))
def test_bars_stand_in_order_within_their_category_and_never_on_each_other(categories, series):
    at = charts.places(categories, series)
    assert [len(row) for row in at] == [categories] * series
    flat = sorted(x for row in at for x in row)
    gaps = [b - a for a, b in itertools.pairwise(flat)]
    assert all(gap >= 0.8 / series - 1e-9 for gap in gaps)
    assert all(abs(row[c] - c) <= 0.4 for row in at for c in range(categories))


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.0, "0"), (0.0123, "0.012"), (0.5, "0.5"), (2.5, "2.5"), (3.0, "3"), (12.34, "12.3"), (98765.4, "98,765")],
)
def test_labels_of_bars_are_short(value, expected):
    assert charts.label(value) == expected


def test_a_chart_names_its_axes_units_and_series(tmp_path):
    value = Spread(2.0, 1.0, 3.0, 3)
    grouped = Panel("Latency", "ms", "Services", ["1k", "10k"], [Series("ours", [value, None])], goal=5.0)
    stacked = Panel(
        "Share", "%", "Services", ["1k"], [Series("decode", [value]), Series("commit", [value])], stacked=True
    )
    path = tmp_path / "chart.svg"
    charts.draw(Chart("A chart", [grouped, stacked]), path, "this machine")
    text = path.read_text()
    assert ET.fromstring(text).tag.endswith("svg")
    for word in ("A chart", "Latency", "Services", "ours", "goal", "decode"):
        assert f"<!-- {word} -->" in text, word
    assert "this machine -->" in text
