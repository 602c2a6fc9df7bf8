"""What a node needs is said alike wherever it is said: docs/capacity.md has the figures."""

from __future__ import annotations

import re

import yaml

from support.documents import document
from support.places import ROOT

ROWS = {(row[0], row[1]): row[2:] for row in document("docs/capacity.md").table("Memory")}
PROXY = ROOT / "deploy/kustomize/base/daemonset.yaml"
VALUES = ROOT / "deploy/chart/values.yaml"


def mebibytes(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", text).groups()
    return int(number) * (1024 if unit == "Gi" else 1)


def test_readme_and_manifests_have_the_figure_of_the_page() -> None:
    resident = ROWS["nftables", "10,000"][0]
    readme = (ROOT / "README.md").read_text()
    assert re.search(rf"^\| resident memory, 10,000 Services .*\| {resident} MB \|", readme, re.MULTILINE)
    for path in (PROXY, VALUES):
        assert re.findall(r"(\d+) MB", path.read_text()) == [resident], path


def test_the_request_of_the_manifests_is_that_of_ten_thousand_services() -> None:
    request = ROWS["nftables", "10,000"][6]
    (proxy,) = yaml.safe_load(PROXY.read_text())["spec"]["template"]["spec"]["containers"]
    values = yaml.safe_load(VALUES.read_text())
    assert request == proxy["resources"]["requests"]["memory"] == values["resources"]["requests"]["memory"]


def test_requests_hold_what_a_container_has_and_limits_what_it_has_at_most() -> None:
    for case, (_, _, _, process, container, most, request, limit) in ROWS.items():
        have, peak = (float(text.replace(",", "")) for text in (container, most))
        assert have <= mebibytes(request), case
        assert max(peak, float(process)) * 1.2 <= mebibytes(limit), case
