"""Thousands of Services on a real API server: the objects that are created, and the table of docs/capacity.md."""

from __future__ import annotations

import msgspec
import pytest

from e2e import scale
from e2e.errors import E2EError
from kubeproxy.api.decode import decode_page

ROWS = [scale.Measured("ours: start", 3.25, 2.5, 76, 80, 31.5, 1.25), scale.Measured("Go: start", 300, 9, 80, 90, 5, 1)]
FOUND = [
    scale.Record(mode, count, "2026-11-26", "abc", {"kubernetes": "1.36"}, "2 to 5 on 2 processors", 60.04, 15.96, ROWS)
    for mode, count in (("nftables", 5_000), ("nftables", 10_000), ("iptables", 1_000))
]


def test_each_service_has_a_slice_of_ten_endpoints_that_the_proxy_decodes():
    bodies = [msgspec.json.encode(place.body) for place in scale.first()]
    listed = [scale.copied(bodies[1], "uid-00000", n) for n in range(3)]
    page = b'{"kind": "EndpointSliceList", "metadata": {"resourceVersion": "1"}, "items": [%s]}' % b",".join(listed)
    decoded = decode_page("endpointslices", page)
    assert not decoded.rejected
    assert len(decoded.objects) == 3


def test_copies_of_a_service_differ_in_name_address_and_uid_but_not_in_length():
    service = b"\x0dservice-00000 app=service-00000 1234-abcde 10.96.100.100 10.244.100.100"
    copies = {scale.copied(service, "1234-abcde", n) for n in range(10_000)}
    assert len(copies) == 10_000
    assert {len(each) for each in copies} == {len(service)}
    assert b"\x0dservice-00151 app=service-00151 1234-00151 10.96.101.101 10.244.110.101" in copies


def test_the_tables_of_all_runs_replace_the_text_between_the_marks():
    page = f"# Capacity\n\n{scale.BEGIN}\nold\n{scale.END}\nrest\n"
    written = scale.into(page, FOUND)
    assert "| ours: start | 3.25 | 2.5 | 76 | 80 | 31.5 | 1.25 |" in written
    assert "| Go: start | not in 300 | 9 | 80 | 90 | 5 | 1 |" in written
    assert written.index("nftables mode, 10,000") > written.index(
        "nftables mode, 5,000 Services (2026-11-26, commit abc"
    )
    assert "load 2 to 5 on 2 processors" in written
    assert "60.0 MB of JSON, 16.0 MB of it managedFields" in written
    assert "old" not in written
    assert written.endswith(f"{scale.END}\nrest\n")
    assert scale.into(written, FOUND) == written


def test_the_page_is_that_of_the_recorded_results():
    page = scale.PAGE.read_text()
    assert page == scale.into(page, scale.read()), "python -m e2e page"


def test_runs_are_kept_side_by_side_and_read_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(scale, "FOLDER_OF_RUNS", tmp_path)
    for each in reversed(FOUND):
        scale.write(each)
    assert scale.read() == FOUND


def test_the_bytes_of_managed_fields_are_the_bytes_that_a_list_without_them_lacks():
    entry = {"manager": "kubectl", "operation": "Apply", "fieldsV1": {"f:spec": {}}}
    items = [{"metadata": {"name": "a", "managedFields": [entry, entry]}}, {"metadata": {"name": "b"}}]
    listed = msgspec.json.encode({"items": items})
    del items[0]["metadata"]["managedFields"]
    assert scale.managed_fields(listed) == len(listed) - len(msgspec.json.encode({"items": items}))


def test_a_page_without_marks_is_named():
    with pytest.raises(E2EError, match=r"capacity\.md has no mark"):
        scale.into("# Capacity\n", FOUND)
