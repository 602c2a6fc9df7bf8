"""Log lines about a failure of the API: their text and their frequency."""

from kubeproxy.api.source import Trouble


def test_a_failure_is_logged_when_it_changes_and_once_a_minute():
    said, now = [], 0.0
    trouble = Trouble(said.append, lambda: now)
    for moment in (0.0, 1.0, 30.0, 59.0, 60.0, 61.0, 119.0, 120.0):
        now = moment
        trouble.met("refused")
    assert said == ["refused", "refused (for 60 s now)", "refused (for 120 s now)"]
    now = 130.0
    trouble.met("forbidden")
    assert (said[3:], trouble.text) == (["forbidden"], "forbidden")
    assert trouble.over()
    assert not trouble.over()
    now = 131.0
    trouble.met("forbidden")
    assert said[4:] == ["forbidden"]
