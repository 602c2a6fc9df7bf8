"""The supported versions in docs/support.md are those that the code checks and the files declare."""

from __future__ import annotations

import re
import tomllib

import yaml

from kubeproxy.backends.iptables.mode import OLDEST
from kubeproxy.backends.nftables.mode import KERNEL as NFTABLES
from kubeproxy.backends.userspace.mode import KERNEL as USERSPACE
from kubeproxy.cli import KUBERNETES_VERSION
from support.documents import document
from support.places import ROOT

SUPPORTED = {row[0]: row[1] for row in document("docs/support.md").table("Versions")}
TESTED = {row[0]: row[2] for row in document("docs/support.md").table("Versions")}


def dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def test_minimal_versions_are_those_that_the_modes_check() -> None:
    assert SUPPORTED["Linux, mode nftables"].startswith(f"{dotted(NFTABLES)} or later")
    assert SUPPORTED["Linux, mode userspace"].startswith(f"{dotted(USERSPACE)} or later")
    assert f"Linux, mode iptables, iptables {dotted(OLDEST)} or later" in SUPPORTED


def test_pythons_are_those_of_the_package_and_its_bundle() -> None:
    bundled = re.findall(
        r"\bcp3(\d+)", (ROOT / "tools/dist").read_text(encoding="utf-8").partition("for version in")[2]
    )
    assert SUPPORTED["Python"] == f"CPython 3.{bundled[0]} to 3.{bundled[-1]}"
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert tomllib.load(file)["project"]["requires-python"] == f">=3.{bundled[0]}"


def test_kubernetes_is_the_one_that_is_implemented_and_three_more() -> None:
    minor = int(KUBERNETES_VERSION.removeprefix("v1."))
    assert SUPPORTED["Kubernetes API server"].startswith(f"1.{minor} to 1.{minor + 3} ")
    chart = yaml.safe_load((ROOT / "deploy/chart/Chart.yaml").read_text(encoding="utf-8"))
    (oldest,) = re.findall(r"Kubernetes (1\.\d+) or later", SUPPORTED["Helm chart"])
    assert chart["kubeVersion"] == f">={oldest}.0-0"


def test_tested_versions_are_recorded() -> None:
    results = (ROOT / "docs/conformance.md").read_text(encoding="utf-8")
    version = re.match(r"[\d.]+", TESTED["Kubernetes API server"])
    assert version is not None
    assert f"kubernetes {version[0]} " in results
    tool = (ROOT / "tools/test-nft").read_text(encoding="utf-8")
    for nft in re.findall(r"\d+\.\d+\.\d+", TESTED["nft"]):
        assert nft in tool, nft
