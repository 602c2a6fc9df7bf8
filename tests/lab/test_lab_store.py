"""The store: versions, history, order and listeners."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.apiserver.status import ApiError
from lab.apiserver.store import Change, Store


def service(name: str, namespace: str = "default", **extra: object) -> dict[str, object]:
    return {"metadata": {"name": name, "namespace": namespace}, "spec": extra}


def names(records: object) -> list[str]:
    assert isinstance(records, list)
    return [f"{r.key[0]}/{r.key[1]}" for r in records]


def test_every_write_has_a_version_of_its_own() -> None:
    store = Store()
    first = store.put("services", service("a"))
    second = store.put("services", service("a", clusterIP="10.96.0.9"))
    gone = store.remove("services", ("default", "a"))
    assert first.revision < second.revision < gone.revision == store.revision
    assert gone.decode()["metadata"]["resourceVersion"] == str(gone.revision)
    assert store.get("services", ("default", "a")) is None


def test_decode_gives_a_copy() -> None:
    store = Store()
    store.put("services", service("a"))
    record = store.get("services", ("default", "a"))
    assert record is not None
    record.decode()["spec"]["clusterIP"] = "changed"
    assert record.decode()["spec"] == {}


def test_lists_are_in_order_and_by_namespace() -> None:
    store = Store()
    for namespace, name in (("b", "x"), ("a", "z"), ("a", "y"), ("ab", "w")):
        store.put("services", service(name, namespace))
    assert names(store.records("services")) == ["a/y", "a/z", "ab/w", "b/x"]
    assert names(store.records("services", "a")) == ["a/y", "a/z"]
    store.remove("services", ("a", "y"))
    store.put("services", service("a", "a"))
    assert names(store.records("services", "a")) == ["a/a", "a/z"]
    assert names(store.records("services", "none")) == []


def test_put_many_then_single_writes_keep_the_order() -> None:
    store = Store()
    store.put("services", service("m"))
    assert names(store.records("services")) == ["default/m"]
    assert store.put_many("services", (service(n) for n in "zax")) == 3
    store.put("services", service("b"))
    assert names(store.records("services")) == [f"default/{n}" for n in "abmxz"]


def test_history_is_bounded() -> None:
    store = Store(history=3)
    versions = [store.put("services", service(f"s{i}")).revision for i in range(5)]
    assert store.changes_since("services", versions[0]) is None
    changes = store.changes_since("services", versions[1])
    assert changes is not None
    assert [c.revision for c in changes] == versions[2:]
    assert store.changes_since("services", versions[4]) == []


def test_compact_forgets() -> None:
    store = Store()
    before = store.put("services", service("a")).revision
    store.put("services", service("b"))
    store.compact()
    assert store.changes_since("services", before) is None
    assert store.changes_since("services", store.revision) == []
    assert store.records_at("services", before) is None


def test_future_version_is_refused() -> None:
    store = Store()
    with pytest.raises(ApiError) as e:
        store.records_at("services", store.revision + 1)
    assert e.value.code == 504


def test_listeners_get_changes_during_the_write() -> None:
    store = Store()
    heard: list[Change] = []
    end = store.subscribe("services", heard.append)
    store.put("services", service("a"))
    store.put("services", service("a", x=1))
    store.remove("services", ("default", "a"))
    store.put("nodes", {"metadata": {"name": "n"}})
    end()
    end()
    store.put("services", service("b"))
    assert [(c.type, c.old is None) for c in heard] == [("ADDED", True), ("MODIFIED", False), ("DELETED", False)]


WRITES = st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=30)


@given(WRITES)
def test_any_past_version_can_be_listed_again(writes: list[tuple[str, bool]]) -> None:
    store = Store()
    snapshots: dict[int, list[bytes]] = {store.revision: []}
    for name, put in writes:
        if put:
            store.put("services", service(name, clusterIP=str(store.revision)))
        elif store.get("services", ("default", name)):
            store.remove("services", ("default", name))
        snapshots[store.revision] = [r.raw for r in store.records("services")]
    for revision, raws in snapshots.items():
        found = store.records_at("services", revision)
        assert found is not None
        assert [r.raw for r in found] == raws
