"""Text of flags to values and back."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubeproxy.config import values
from kubeproxy.config.durations import Duration

ACCEPTED = [
    (values.parse_bool, "t", True),
    (values.parse_bool, "TRUE", True),
    (values.parse_bool, "0", False),
    (values.parse_bool, "False", False),
    (values.parse_int32, "0", 0),
    (values.parse_int32, "-999", -999),
    (values.parse_int32, "+7", 7),
    (values.parse_int32, "0x10", 16),
    (values.parse_int32, "0X1f", 31),
    (values.parse_int32, "0b101", 5),
    (values.parse_int32, "010", 8),
    (values.parse_int32, "0o17", 15),
    (values.parse_int32, "0_7", 7),
    (values.parse_int32, "00", 0),
    (values.parse_int32, "1_000", 1000),
    (values.parse_int32, "2147483647", 2147483647),
    (values.parse_int32, "-2147483648", -2147483648),
    (values.parse_level, "0", 0),
    (values.parse_level, "010", 10),
    (values.parse_level, "2147483647", 2147483647),
    (values.parse_float, "5", 5.0),
    (values.parse_float, "-1", -1.0),
    (values.parse_float, ".5e1", 5.0),
    (values.parse_quantity, "0", 0),
    (values.parse_quantity, "512", 512),
    (values.parse_quantity, "1K", 1000),
    (values.parse_quantity, "1k", 1000),
    (values.parse_quantity, "2Ki", 2048),
    (values.parse_quantity, "3M", 3_000_000),
    (values.parse_quantity, "1.5Gi", 1_610_612_736),
    (values.parse_quantity, "1.", 1),
    (values.parse_list, "", ()),
    (values.parse_list, "a", ("a",)),
    (values.parse_list, "a,b", ("a", "b")),
    (values.parse_list, "a,,b", ("a", "", "b")),
    (values.parse_list, '"a,b",c', ("a,b", "c")),
    (values.parse_list, '"say ""so""",c', ('say "so"', "c")),
    (values.parse_bool_map, "", {}),
    (values.parse_bool_map, "A=true,B=false", {"A": True, "B": False}),
    (values.parse_bool_map, " A = 1 ,,B=f,", {"A": True, "B": False}),
    (values.parse_patterns, "", ()),
    (values.parse_patterns, "engine=4,net*=2,", (("engine", 4), ("net*", 2))),
]


@pytest.mark.parametrize(("parse", "text", "value"), ACCEPTED)
def test_accepted(parse, text, value):
    assert parse(text) == value


REFUSED = [
    (values.parse_bool, "yes", 'strconv.ParseBool: parsing "yes": invalid syntax'),
    (values.parse_bool, "", 'strconv.ParseBool: parsing "": invalid syntax'),
    (values.parse_int32, "", 'strconv.ParseInt: parsing "": invalid syntax'),
    (values.parse_int32, "1.5", 'strconv.ParseInt: parsing "1.5": invalid syntax'),
    (values.parse_int32, "089", 'strconv.ParseInt: parsing "089": invalid syntax'),
    (values.parse_int32, "0o", 'strconv.ParseInt: parsing "0o": invalid syntax'),
    (values.parse_int32, "1_", 'strconv.ParseInt: parsing "1_": invalid syntax'),
    (values.parse_int32, "1__0", 'strconv.ParseInt: parsing "1__0": invalid syntax'),
    (values.parse_int32, "\u0661", 'strconv.ParseInt: parsing "\u0661": invalid syntax'),
    (values.parse_int32, "2147483648", 'strconv.ParseInt: parsing "2147483648": value out of range'),
    (values.parse_level, "-1", 'strconv.ParseUint: parsing "-1": invalid syntax'),
    (values.parse_level, "2147483648", 'strconv.ParseUint: parsing "2147483648": value out of range'),
    (values.parse_float, "nan(1)", 'strconv.ParseFloat: parsing "nan(1)": invalid syntax'),
    (values.parse_float, "1,5", 'strconv.ParseFloat: parsing "1,5": invalid syntax'),
    (values.parse_quantity, "-1", '"-1" is no quantity of bytes; write a number with an optional suffix like Ki or M'),
    (values.parse_quantity, "1Q", '"1Q" is no quantity of bytes; write a number with an optional suffix like Ki or M'),
    (values.parse_quantity, "1.5", '"1.5" is no whole number of bytes within 63 bits'),
    (values.parse_quantity, "8Ei", '"8Ei" is no whole number of bytes within 63 bits'),
    (values.parse_bool_map, "A", 'malformed pair "A", expect string=bool'),
    (
        values.parse_bool_map,
        "A=maybe",
        'invalid value of A: maybe, err: strconv.ParseBool: parsing "maybe": invalid syntax',
    ),
    (values.parse_patterns, "engine", '"engine" does not have the pattern=N format'),
    (values.parse_patterns, "a=1=2", '"a=1=2" does not have the pattern=N format'),
    (
        values.parse_patterns,
        "a=x",
        'parsing verbosity in "a=x": strconv.ParseUint: parsing "x": invalid syntax',
    ),
]


@pytest.mark.parametrize(("parse", "text", "message"), REFUSED)
def test_refused(parse, text, message):
    with pytest.raises(ValueError) as caught:
        parse(text)
    assert str(caught.value) == message


@pytest.mark.parametrize("parse", [values.parse_int32, values.parse_level, values.parse_quantity, Duration.parse])
def test_numbers_longer_than_python_reads_are_refused_in_our_words(parse):
    with pytest.raises(ValueError, match=r"range|63 bits|invalid duration"):
        parse("9" * 5000 + ("s" if parse == Duration.parse else ""))


def test_a_stray_quote_in_a_list_is_refused():
    with pytest.raises(ValueError, match="double quote"):
        values.parse_list('"a,b')


@given(st.dictionaries(st.from_regex(r"[A-Za-z]{1,8}", fullmatch=True), st.booleans()))
def test_maps_read_back(pairs):
    assert values.parse_bool_map(values.show_bool_map(pairs)) == pairs


@given(st.lists(st.tuples(st.from_regex(r"[a-z*]{1,8}", fullmatch=True), st.integers(0, 20))))
def test_patterns_read_back(items):
    assert values.parse_patterns(values.show_patterns(items)) == tuple(items)


@given(st.text(max_size=20))
def test_any_text_is_a_value_or_a_value_error(text):
    for parse in {parse for parse, _, _ in ACCEPTED}:
        with contextlib.suppress(ValueError):
            parse(text)
