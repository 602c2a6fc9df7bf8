"""Selectors as tables."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.apiserver.selection import from_map, parse_fields, parse_labels
from lab.apiserver.status import ApiError

LABELS = {"app": "web", "tier": "front", "example.com/x": "1", "empty": "", "n": "5"}


@pytest.mark.parametrize(
    ("selector", "selected"),
    [
        ("", True),
        ("app=web", True),
        ("app==web", True),
        ("app = web", True),
        ("app=db", False),
        ("app!=db", True),
        ("app!=web", False),
        ("missing!=x", True),
        ("app", True),
        ("missing", False),
        ("!missing", True),
        ("! missing", True),
        ("!app", False),
        ("example.com/x=1", True),
        ("!example.com/x", False),
        ("app in (web)", True),
        ("app in (web, db)", True),
        ("app in (db,cache)", False),
        ("missing in (web)", False),
        ("app notin (db)", True),
        ("app notin (web,db)", False),
        ("missing notin (web)", True),
        ("empty=", True),
        ("app=", False),
        ("n>4", True),
        ("n<5", False),
        ("app>4", False),
        ("app=web,tier=front", True),
        ("app=web,tier=back", False),
        ("app in (web,db),!missing,tier!=back", True),
        ("!service.kubernetes.io/headless,!service.kubernetes.io/service-proxy-name", True),
    ],
)
def test_labels(selector: str, selected: bool) -> None:
    assert parse_labels(selector).matches(LABELS) is selected


@pytest.mark.parametrize(
    "selector", ["=x", "app in web", "app in (", "a b", "app=web,,x", "-bad", "!", "n>many", "a=%"]
)
def test_bad_labels(selector: str) -> None:
    with pytest.raises(ApiError) as e:
        parse_labels(selector)
    assert e.value.code == 400


@given(st.text(max_size=40))
def test_any_text_parses_or_is_refused(text: str) -> None:
    with contextlib.suppress(ApiError):
        parse_labels(text).matches(LABELS)


@given(
    st.dictionaries(st.sampled_from("abc"), st.sampled_from("xy")),
    st.dictionaries(st.sampled_from("abc"), st.sampled_from("xy")),
)
def test_map_selects_supersets(selector: dict[str, str], labels: dict[str, str]) -> None:
    assert from_map(selector).matches(labels) is (selector.items() <= labels.items())
    assert parse_labels(",".join(f"{k}={v}" for k, v in selector.items())).matches(labels) is (
        selector.items() <= labels.items()
    )


ALLOWED = ("metadata.name", "spec.clusterIP", "spec.type")
FIELDS = {"metadata.name": "web", "spec.clusterIP": "None", "spec.type": "ClusterIP"}


@pytest.mark.parametrize(
    ("selector", "selected"),
    [
        ("metadata.name=web", True),
        ("metadata.name==web", True),
        ("metadata.name=other", False),
        ("spec.clusterIP!=None", False),
        ("spec.type=ClusterIP,spec.clusterIP=None", True),
        ("spec.type=ClusterIP,spec.clusterIP=10.96.0.1", False),
        (r"metadata.name=we\,b", False),
    ],
)
def test_fields(selector: str, selected: bool) -> None:
    assert parse_fields(selector, ALLOWED, "/v1, Kind=Service").matches(FIELDS) is selected


@pytest.mark.parametrize("selector", ["spec.ports=80", "metadata.name", "=web", "x=1"])
def test_bad_fields(selector: str) -> None:
    with pytest.raises(ApiError) as e:
        parse_fields(selector, ALLOWED, "/v1, Kind=Service")
    assert e.value.code == 400
