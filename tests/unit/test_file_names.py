"""Test files have unique names: pytest imports them by name, and refuses a duplicate."""

from collections import Counter

from support.places import ROOT


def test_no_two_files_of_tests_have_one_name():
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
