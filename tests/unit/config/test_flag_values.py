"""Conversion of flags' text to values and back."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.config import pflag
from kubeproxy.config.durations import Duration

ACCEPTED = [
    (pflag.parse_bool, "t", True),
    (pflag.parse_bool, "TRUE", True),
    (pflag.parse_bool, "0", False),
    (pflag.parse_bool, "False", False),
    (pflag.parse_int32, "0", 0),
    (pflag.parse_int32, "-999", -999),
    (pflag.parse_int32, "+7", 7),
    (pflag.parse_int32, "0x10", 16),
    (pflag.parse_int32, "0X1f", 31),
    (pflag.parse_int32, "0b101", 5),
    (pflag.parse_int32, "010", 8),
    (pflag.parse_int32, "0o17", 15),
    (pflag.parse_int32, "0_7", 7),
    (pflag.parse_int32, "00", 0),
    (pflag.parse_int32, "1_000", 1000),
    (pflag.parse_int32, "2147483647", 2147483647),
    (pflag.parse_int32, "-2147483648", -2147483648),
    (pflag.parse_level, "0", 0),
    (pflag.parse_level, "010", 10),
    (pflag.parse_level, "2147483647", 2147483647),
    (pflag.parse_float, "5", 5.0),
    (pflag.parse_float, "-1", -1.0),
    (pflag.parse_float, ".5e1", 5.0),
    (pflag.parse_quantity, "0", 0),
    (pflag.parse_quantity, "512", 512),
    (pflag.parse_quantity, "1K", 1000),
    (pflag.parse_quantity, "1k", 1000),
    (pflag.parse_quantity, "2Ki", 2048),
    (pflag.parse_quantity, "3M", 3_000_000),
    (pflag.parse_quantity, "1.5Gi", 1_610_612_736),
    (pflag.parse_quantity, "1.", 1),
    (pflag.parse_list, "", ()),
    (pflag.parse_list, "a", ("a",)),
    (pflag.parse_list, "a,b", ("a", "b")),
    (pflag.parse_list, "a,,b", ("a", "", "b")),
    (pflag.parse_list, '"a,b",c', ("a,b", "c")),
    (pflag.parse_list, '"say ""so""",c', ('say "so"', "c")),
    (pflag.parse_bool_map, "", {}),
    (pflag.parse_bool_map, "A=true,B=false", {"A": True, "B": False}),
    (pflag.parse_bool_map, " A = 1 ,,B=f,", {"A": True, "B": False}),
    (pflag.parse_patterns, "", ()),
    (pflag.parse_patterns, "engine=4,net*=2,", (("engine", 4), ("net*", 2))),
]


@pytest.mark.parametrize(("parse", "text", "value"), ACCEPTED)
def test_accepted(parse, text, value):
    assert parse(text) == value


REFUSED = [
    (pflag.parse_bool, "yes", 'strconv.ParseBool: parsing "yes": invalid syntax'),
    (pflag.parse_bool, "", 'strconv.ParseBool: parsing "": invalid syntax'),
    (pflag.parse_int32, "", 'strconv.ParseInt: parsing "": invalid syntax'),
    (pflag.parse_int32, "1.5", 'strconv.ParseInt: parsing "1.5": invalid syntax'),
    (pflag.parse_int32, "089", 'strconv.ParseInt: parsing "089": invalid syntax'),
    (pflag.parse_int32, "0o", 'strconv.ParseInt: parsing "0o": invalid syntax'),
    (pflag.parse_int32, "1_", 'strconv.ParseInt: parsing "1_": invalid syntax'),
    (pflag.parse_int32, "1__0", 'strconv.ParseInt: parsing "1__0": invalid syntax'),
    (pflag.parse_int32, "\u0661", 'strconv.ParseInt: parsing "\u0661": invalid syntax'),
    (pflag.parse_int32, "2147483648", 'strconv.ParseInt: parsing "2147483648": value out of range'),
    (pflag.parse_level, "-1", 'strconv.ParseUint: parsing "-1": invalid syntax'),
    (pflag.parse_level, "2147483648", 'strconv.ParseUint: parsing "2147483648": value out of range'),
    (pflag.parse_float, "nan(1)", 'strconv.ParseFloat: parsing "nan(1)": invalid syntax'),
    (pflag.parse_float, "1,5", 'strconv.ParseFloat: parsing "1,5": invalid syntax'),
    (pflag.parse_quantity, "-1", '"-1" is no quantity of bytes; write a number with an optional suffix like Ki or M'),
    (pflag.parse_quantity, "1Q", '"1Q" is no quantity of bytes; write a number with an optional suffix like Ki or M'),
    (pflag.parse_quantity, "1.5", '"1.5" is no whole number of bytes within 63 bits'),
    (pflag.parse_quantity, "8Ei", '"8Ei" is no whole number of bytes within 63 bits'),
    (pflag.parse_bool_map, "A", 'malformed pair "A", expect string=bool'),
    (
        pflag.parse_bool_map,
        "A=maybe",
        'invalid value of A: maybe, err: strconv.ParseBool: parsing "maybe": invalid syntax',
    ),
    (pflag.parse_patterns, "engine", '"engine" does not have the pattern=N format'),
    (pflag.parse_patterns, "a=1=2", '"a=1=2" does not have the pattern=N format'),
    (
        pflag.parse_patterns,
        "a=x",
        'parsing verbosity in "a=x": strconv.ParseUint: parsing "x": invalid syntax',
    ),
]


@pytest.mark.parametrize(("parse", "text", "message"), REFUSED)
def test_refused(parse, text, message):
    with pytest.raises(ValueError) as caught:
        parse(text)
    assert str(caught.value) == message


@pytest.mark.parametrize("parse", [pflag.parse_int32, pflag.parse_level, pflag.parse_quantity, Duration.parse])
def test_numbers_longer_than_python_reads_are_refused_in_our_words(parse):
    with pytest.raises(ValueError, match=r"range|63 bits|invalid duration"):
        parse("9" * 5000 + ("s" if parse == Duration.parse else ""))


def test_a_stray_quote_in_a_list_is_refused():
    with pytest.raises(ValueError, match="double quote"):
        pflag.parse_list('"a,b')


@given(st.dictionaries(st.from_regex(r"[A-Za-z]{1,8}", fullmatch=True), st.booleans()))
def test_maps_read_back(pairs):
    assert pflag.parse_bool_map(pflag.show_bool_map(pairs)) == pairs


@given(st.lists(st.tuples(st.from_regex(r"[a-z*]{1,8}", fullmatch=True), st.integers(0, 20))))
def test_patterns_read_back(items):
    assert pflag.parse_patterns(pflag.show_patterns(items)) == tuple(items)


@given(st.text(max_size=20))
def test_any_text_is_a_value_or_a_value_error(text):
    for parse in {parse for parse, _, _ in ACCEPTED}:
        with contextlib.suppress(ValueError):
            parse(text)
