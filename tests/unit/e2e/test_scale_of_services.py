"""Thousands of Services on a real API server: the objects that are created, and the table of docs/capacity.md."""

from __future__ import annotations

import msgspec
import pytest

from e2e import scale
from e2e.errors import E2EError
from kubeproxy.api.decode import decode_page

FOUND = [scale.Measured("ours nftables: start", 10_000, 3.25, 2.5, 76, 80, 31.5, 1.25)]


def test_each_service_has_a_slice_of_ten_endpoints_that_the_proxy_decodes():
    made = list(scale.objects(3))
    assert [path.rpartition("/")[2] for path, _ in made] == ["services", "endpointslices"] * 3
    listed = {
        "kind": "EndpointSliceList",
        "metadata": {"resourceVersion": "1"},
        "items": [body for _, body in made[1::2]],
    }
    page = decode_page("endpointslices", msgspec.json.encode(listed))
    assert not page.rejected
    assert len(page.objects) == 3
    assert len({name["metadata"]["name"] for _, name in made}) == 6


def test_the_table_replaces_what_stood_between_the_marks():
    page = f"# Capacity\n\n{scale.BEGIN}\nold\n{scale.END}\nrest\n"
    written = scale.into(page, FOUND)
    assert "| ours nftables: start | 10,000 | 3.25 | 2.5 | 76 | 80 | 31.5 | 1.25 |" in written
    assert "old" not in written
    assert written.endswith(f"{scale.END}\nrest\n")
    assert scale.into(written, FOUND) == written


def test_a_page_without_marks_is_named():
    with pytest.raises(E2EError, match=r"capacity\.md has no mark"):
        scale.into("# Capacity\n", FOUND)
