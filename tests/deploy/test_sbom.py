"""The image's bill of materials: all installed packages, with their versions, as SPDX 2.3 requires."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kubeproxy.release import NUMBER
from support.places import ROOT

STATUS = """\
Package: libc6
Status: install ok installed
Source: glibc
Version: 2.36-9+deb12u10
Architecture: arm64
Description: GNU C Library
 with more lines

Package: libstdc++6
Status: install ok installed
Source: gcc-12 (12.2.0-14)
Version: 1:12.2.0-14
Architecture: arm64
"""


@pytest.fixture
def image(tmp_path: Path) -> Path:
    (tmp_path / "status").write_text(STATUS)
    (tmp_path / "run.lock").write_text("PyYAML==6.0.3 \\\n    --hash=sha256:00\n")
    package(tmp_path, "kubeproxy", NUMBER, "License-Expression: Apache-2.0\n")
    package(tmp_path, "PyYAML", "6.0.3", "License: MIT\n")
    return tmp_path


def package(image: Path, name: str, version: str, more: str = "") -> None:
    folder = image / f"site/{name.lower()}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{more}\nText: none\n")


def made(image: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(ROOT / "deploy/sbom.py"), "run.lock", "status", "site"]
    environment = {"SOURCE_DATE_EPOCH": "1700000000"}
    return subprocess.run(command, cwd=image, env=environment, capture_output=True, text=True, check=False)


def test_every_package_is_in_it(image: Path) -> None:
    done = made(image)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == made(image).stdout, "the same image gives the same bytes"
    document = json.loads(done.stdout)
    assert document["creationInfo"]["created"] == "2023-11-14T22:13:20Z"
    packages = {one["name"]: one for one in document["packages"]}
    assert {name: one["versionInfo"] for name, one in packages.items()} == {
        "kubeproxy": NUMBER,
        "pyyaml": "6.0.3",
        "libc6": "2.36-9+deb12u10",
        "libstdc++6": "1:12.2.0-14",
    }
    assert [one["externalRefs"][0]["referenceLocator"] for one in packages.values()] == [
        f"pkg:pypi/kubeproxy@{NUMBER}",
        "pkg:pypi/pyyaml@6.0.3",
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u10?arch=arm64&distro=debian-12&upstream=glibc",
        "pkg:deb/debian/libstdc%2B%2B6@1%3A12.2.0-14?arch=arm64&distro=debian-12&upstream=gcc-12",
    ]
    assert packages["kubeproxy"]["licenseDeclared"] == "Apache-2.0"


def test_it_is_valid_spdx(image: Path) -> None:
    """The mandatory fields of chapters 6, 7 and 11 of SPDX 2.3; spdx-tools accepted the file too."""
    document = json.loads(made(image).stdout)
    assert (document["spdxVersion"], document["dataLicense"]) == ("SPDX-2.3", "CC0-1.0")
    assert document["SPDXID"] == "SPDXRef-DOCUMENT"
    assert re.fullmatch(r"[a-z]+:[^#]+", document["documentNamespace"])
    assert document["creationInfo"]["creators"]
    assert all(re.match("(Person|Organization|Tool): ", one) for one in document["creationInfo"]["creators"])
    ids = [one["SPDXID"] for one in document["packages"]]
    assert len(set(ids)) == len(ids)
    for one in document["packages"]:
        assert re.fullmatch(r"SPDXRef-[A-Za-z0-9.-]+", one["SPDXID"])
        assert one["name"]
        assert one["downloadLocation"] == "NOASSERTION"
        assert re.fullmatch("NOASSERTION|(Organization|Person): .+", one["supplier"])
    described = [one for one in document["relationships"] if one["relationshipType"] == "DESCRIBES"]
    assert len(described) == 1
    known = {"SPDXRef-DOCUMENT", *ids}
    for one in document["relationships"]:
        assert {one["spdxElementId"], one["relatedSpdxElement"]} <= known


@pytest.mark.parametrize(
    ("name", "version", "said"),
    [
        ("requests", "2.0", "requests 2.0 is installed, and the lock has none"),
        ("PyYaml", "6.0.2", "pyyaml 6.0.2 is installed, and the lock has 6.0.3"),
    ],
)
def test_a_package_outside_of_the_lock_ends_the_build(image: Path, name: str, version: str, said: str) -> None:
    package(image, name, version)
    done = made(image)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"sbom: {said}\n")


def test_an_image_without_the_proxy_is_none(image: Path) -> None:
    for path in (image / "site").glob("kubeproxy*/METADATA"):
        path.unlink()
    assert made(image).stderr == "sbom: 0 packages kubeproxy are installed, instead of one\n"
