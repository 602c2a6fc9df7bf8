"""The requirements of a node are the same in all places; docs/capacity.md contains the figures."""

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
    assert f"The process has {resident} MB of memory with 10,000 Services" in readme
    for path in (PROXY, VALUES):
        assert re.findall(r"(\d+) MB", path.read_text()) == [resident], path


def test_the_request_of_the_manifests_is_that_of_ten_thousand_services() -> None:
    request = ROWS["nftables", "10,000"][6]
    (proxy,) = yaml.safe_load(PROXY.read_text())["spec"]["template"]["spec"]["containers"]
    values = yaml.safe_load(VALUES.read_text())
    assert request == proxy["resources"]["requests"]["memory"] == values["resources"]["requests"]["memory"]


def test_requests_cover_a_containers_memory_and_limits_its_maximum() -> None:
    for case, (_, _, _, process, container, most, request, limit) in ROWS.items():
        have, peak = (float(text.replace(",", "")) for text in (container, most))
        assert have <= mebibytes(request), case
        assert max(peak, float(process)) * 1.2 <= mebibytes(limit), case


def seconds(cell: str) -> float:
    """Return the number of milliseconds in a cell such as `1,764.4 (1,752.2..1,816.6)`, in seconds."""
    return float(cell.partition(" ")[0].replace(",", "")) / 1000


def test_the_work_of_each_mode_is_that_of_the_benchmarks() -> None:
    work = {(row[0], row[1]): row[2:4] for row in document("docs/capacity.md").table("Processor")}
    performance, iptables = document("docs/performance.md"), document("docs/iptables.md")
    sync = {row[0]: row[1] for row in performance.table("Full sync: both lists in memory to committed")}
    for size, services in {"1kx10": "1,000", "10kx10": "10,000", "44kx10": "44,000", "100kx10": "100,000"}.items():
        assert float(work["nftables", services][0]) == round(seconds(sync[size]), 2), size
    writes = performance.table("API write to the first packet on the new endpoint")
    changes = {row[0].removesuffix(" kube-proxy"): row[6].partition(" ")[0] for row in writes}
    for size, services in {"1kx10": "1,000", "10kx10": "10,000"}.items():
        assert work["nftables", services][1] == changes[size]
    ours = {row[0]: row[1] for row in iptables.table("Figures")}
    for variant in ("nft", "legacy"):
        for services in ("1,000", "10,000"):
            everything, change = work[f"iptables ({variant})", services]
            assert float(everything) == round(seconds(ours[f"{variant}, {services} Services: everything"]), 2)
            assert change == ours.get(f"{variant}, {services} Services: one endpoint", "not measured")


def test_the_processor_request_of_the_manifests_is_that_of_the_page() -> None:
    page = {(row[0], row[1]): row[4] for row in document("docs/capacity.md").table("Processor")}
    (proxy,) = yaml.safe_load(PROXY.read_text())["spec"]["template"]["spec"]["containers"]
    values = yaml.safe_load(VALUES.read_text())
    requests = {proxy["resources"]["requests"]["cpu"], values["resources"]["requests"]["cpu"]}
    assert requests == {page["nftables", "10,000"]}
    assert f"The manifests request {page['nftables', '10,000']} and set no limit" in document(
        "docs/capacity.md"
    ).path.read_text(encoding="utf-8")
    assert "limits" not in proxy["resources"]
    assert "limits" not in values["resources"]
