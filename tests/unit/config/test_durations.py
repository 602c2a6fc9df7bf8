"""Go's durations: the cases of Go's documentation, their limits, and that printed durations can be parsed again."""

import contextlib
import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.config.durations import Duration

MAX = (1 << 63) - 1

PARSED = [
    ("0", 0),
    ("0s", 0),
    ("-0", 0),
    ("5s", 5_000_000_000),
    ("+5s", 5_000_000_000),
    ("-5s", -5_000_000_000),
    ("30s", 30_000_000_000),
    ("1478s", 1_478_000_000_000),
    ("5.0s", 5_000_000_000),
    ("5.6s", 5_600_000_000),
    ("5.s", 5_000_000_000),
    (".5s", 500_000_000),
    ("1.004s", 1_004_000_000),
    ("1.0040s", 1_004_000_000),
    ("100.00100s", 100_001_000_000),
    ("10ns", 10),
    ("11us", 11_000),
    ("12\u00b5s", 12_000),
    ("12\u03bcs", 12_000),
    ("13ms", 13_000_000),
    ("14s", 14_000_000_000),
    ("15m", 900_000_000_000),
    ("16h", 57_600_000_000_000),
    ("3h30m", 12_600_000_000_000),
    ("2h22m", 8_520_000_000_000),
    ("10.5s4m", 250_500_000_000),
    ("-2m3.4s", -123_400_000_000),
    ("1h2m3s4ms5us6ns", 3_723_004_005_006),
    ("39h9m14.425s", 140_954_425_000_000),
    ("52763797000ns", 52_763_797_000),
    ("0.3333333333333333333h", 1_200_000_000_000),
    ("9007199254740993ns", 9_007_199_254_740_993),
    ("9223372036854775807ns", MAX),
    ("9223372036854775.807us", MAX),
    ("-9223372036854775808ns", -MAX - 1),
    ("-2562047h47m16.854775808s", -MAX - 1),
    ("0.100000000000000000000h", 360_000_000_000),
    ("0.830103483285477580700h", 2_988_372_539_827),
]


@pytest.mark.parametrize(("text", "nanoseconds"), PARSED)
def test_parses_as_go_does(text, nanoseconds):
    assert Duration.parse(text).nanoseconds == nanoseconds


REFUSED = [
    ("", 'time: invalid duration ""'),
    ("3", 'time: missing unit in duration "3"'),
    ("1.5", 'time: missing unit in duration "1.5"'),
    ("-", 'time: invalid duration "-"'),
    ("s", 'time: invalid duration "s"'),
    (".", 'time: invalid duration "."'),
    ("-.", 'time: invalid duration "-."'),
    (".s", 'time: invalid duration ".s"'),
    ("+.s", 'time: invalid duration "+.s"'),
    ("1d", 'time: unknown unit "d" in duration "1d"'),
    ("1 s", 'time: unknown unit " s" in duration "1 s"'),
    ("5S", 'time: unknown unit "S" in duration "5S"'),
    ("3000000h", 'time: invalid duration "3000000h"'),
    ("9223372036854775808ns", 'time: invalid duration "9223372036854775808ns"'),
    ("9223372036854775.808us", 'time: invalid duration "9223372036854775.808us"'),
    ("-9223372036854775809ns", 'time: invalid duration "-9223372036854775809ns"'),
    ("\u0663s", 'time: invalid duration "\u0663s"'),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_refuses_with_gos_message(text, message):
    with pytest.raises(ValueError) as caught:
        Duration.parse(text)
    assert str(caught.value) == message


PRINTED = [
    (0, "0s"),
    (1, "1ns"),
    (1_100, "1.1\u00b5s"),
    (2_200_000, "2.2ms"),
    (250_000_000, "250ms"),
    (3_300_000_000, "3.3s"),
    (30_000_000_000, "30s"),
    (60_000_000_000, "1m0s"),
    (245_000_000_000, "4m5s"),
    (245_001_000_000, "4m5.001s"),
    (18_367_001_000_000, "5h6m7.001s"),
    (480_000_000_001, "8m0.000000001s"),
    (86_400_000_000_000, "24h0m0s"),
    (-1_500_000_000, "-1.5s"),
    (MAX, "2562047h47m16.854775807s"),
    (-MAX - 1, "-2562047h47m16.854775808s"),
]


@pytest.mark.parametrize(("nanoseconds", "text"), PRINTED)
def test_prints_as_go_does(nanoseconds, text):
    assert str(Duration.from_nanoseconds(nanoseconds)) == text


@given(st.integers(-MAX - 1, MAX))
def test_a_printed_duration_is_parsed_unchanged(nanoseconds):
    duration = Duration.from_nanoseconds(nanoseconds)
    again = Duration.parse(str(duration))
    assert again.nanoseconds == nanoseconds
    assert again == duration


@given(st.text(alphabet="0123456789.+-nsumh\u00b5 ", max_size=12))
def test_any_text_is_a_duration_or_a_value_error(text):
    with contextlib.suppress(ValueError):
        duration = Duration.parse(text)
        assert Duration.parse(str(duration)) == duration


def test_is_a_float_of_seconds():
    assert Duration.parse("1m30s") == 90.0
    assert Duration(0.25).nanoseconds == 250_000_000
    assert Duration(30) * 2 == 60.0
    assert repr(Duration(90)) == "Duration.parse('1m30s')"


def test_is_limited_to_64_bits():
    with pytest.raises(ValueError, match="beyond 64 bits"):
        Duration.from_nanoseconds(MAX + 1)
    with pytest.raises(ValueError, match="beyond 64 bits"):
        Duration(1e300)


def test_copies_keep_the_nanoseconds():
    duration = Duration.from_nanoseconds(9_007_199_254_740_993)
    assert copy.deepcopy(duration).nanoseconds == duration.nanoseconds
    assert pickle.loads(pickle.dumps(duration)).nanoseconds == duration.nanoseconds
