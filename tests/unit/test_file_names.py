"""Files of tests have names of their own: pytest imports them by that alone, and refuses the second of a name."""

from collections import Counter

from support.places import ROOT


def test_no_two_files_of_tests_have_one_name():
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
