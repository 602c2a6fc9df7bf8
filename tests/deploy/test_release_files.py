"""The files of a release: the same bytes in two folders, one version in all of them, and correct checksums."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import time
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from kubeproxy.release import NUMBER
from support import helm
from support.places import ROOT

PLATFORMS = ("cp311-x86_64", "cp312-aarch64")
SAFE = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=x", "-c", "user.email=x@example.com", "-C", str(folder), *words]
    return subprocess.run(command, env=os.environ | SAFE, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository whose only commit is this working tree, with the tag of the release."""
    folder = tmp_path_factory.mktemp("source")
    names = git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    kept = [name for name in names if name and not name.startswith(("tests/", "docs/")) and (ROOT / name).exists()]
    archive = subprocess.run(["tar", "-C", str(ROOT), "-c", *kept], capture_output=True, check=True).stdout
    subprocess.run(["tar", "-C", str(folder), "-x", "--no-same-owner"], input=archive, check=True)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "all")
    git(folder, "tag", f"v{NUMBER}")
    return folder


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Substitutes for the locked wheels, which need a network: their metadata, and a byte that differs by platform."""
    folder = tmp_path_factory.mktemp("wheels")
    for platform in PLATFORMS:
        (folder / platform).mkdir()
        for name in ("msgspec", "PyYAML", "httptools"):
            package = metadata.distribution(name)
            path = folder / platform / f"{name.lower()}-{package.version}-{platform}.whl"
            with zipfile.ZipFile(path, "w") as wheel:
                about = package.read_text("METADATA")
                assert about is not None
                wheel.writestr(f"{name}-{package.version}.dist-info/METADATA", about)
                wheel.writestr("platform", platform)
    return folder


def made(checkout: Path, wheels: Path, *words: str, umask: int = 0o022, **environment: str) -> Path:
    """Return the folder that deploy/release.py fills in a checkout. Raises CalledProcessError."""
    out = checkout / "dist"
    command = [sys.executable, str(checkout / "deploy/release.py"), str(wheels), str(out), *words]
    cleaned = {name: text for name, text in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    subprocess.run(command, env=cleaned | SAFE | environment, umask=umask, check=True, capture_output=True, text=True)
    return out


@pytest.fixture(scope="module")
def release(source: Path, wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkout = tmp_path_factory.mktemp("first") / "kubeproxy"
    git(source, "clone", "--quiet", str(source), str(checkout))
    return made(checkout, wheels, "--all", "--tag", f"v{NUMBER}")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_another_folder_gives_the_same_bytes(release: Path, source: Path, wheels: Path, tmp_path: Path) -> None:
    """With another path, umask, time zone, language and seed of hashes, and other file times."""
    checkout = tmp_path / "elsewhere" / "with a longer name"
    git(source, "clone", "--quiet", str(source), str(checkout))
    for path in (*checkout.glob("src/**/*.py"), *checkout.glob("deploy/**/*")):
        os.utime(path, (time.time() - 86_400, 1_000_000_000))
    (checkout / "dist").mkdir()
    (checkout / "dist/kubeproxy-0.0.1.tgz").write_text("of an earlier release")
    environment = {"TZ": "Asia/Tokyo", "LANG": "C", "LC_ALL": "C", "PYTHONHASHSEED": "7"}
    assert contents(made(checkout, wheels, "--all", umask=0o077, **environment)) == contents(release)


def test_the_files_and_their_checksums(release: Path) -> None:
    expected = [
        "kube-proxy.pyz",
        "kubectl-kubeproxy",
        f"kubeproxy-{NUMBER}-image.tar.gz",
        f"kubeproxy-{NUMBER}-py3-none-any.whl",
        f"kubeproxy-{NUMBER}.spdx.json",
        f"kubeproxy-{NUMBER}.tgz",
    ]
    assert sorted(contents(release)) == ["SHA256SUMS", *expected]
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=release, check=True)
    assert [line.split()[1] for line in (release / "SHA256SUMS").read_text().splitlines()] == expected


def test_the_wheel_has_the_version_and_the_commit(release: Path, source: Path) -> None:
    with zipfile.ZipFile(release / f"kubeproxy-{NUMBER}-py3-none-any.whl") as wheel:
        commit = git(source, "rev-parse", "HEAD").strip()
        assert wheel.read("kubeproxy/BUILD").decode() == f"{NUMBER} {commit} clean\n"
        assert f"\nVersion: {NUMBER}\n" in wheel.read(f"kubeproxy-{NUMBER}.dist-info/METADATA").decode()
    with zipfile.ZipFile(release / "kube-proxy.pyz") as archive:
        name = f"kubeproxy-{NUMBER}-py3-none-any.whl"
        assert archive.read(f"wheels/any/{name}") == (release / name).read_bytes()
        assert {part.split("/")[1] for part in archive.namelist() if part.startswith("wheels/")} == {"any", *PLATFORMS}


def test_the_image_recipe_builds_the_same_wheel(release: Path, tmp_path: Path) -> None:
    with tarfile.open(release / f"kubeproxy-{NUMBER}-image.tar.gz") as archive:
        assert {(entry.mode, entry.uid, entry.uname) for entry in archive} == {(0o644, 0, "")}
        subprocess.run(["tar", "-C", str(tmp_path), "-xzf", str(archive.name)], check=True)
    recipe = (tmp_path / "Dockerfile").read_text()
    arguments = dict(re.findall(r"^ARG (\w+)=(.*)$", recipe, re.M))
    assert arguments["VERSION"] == NUMBER
    for source in re.findall(r"^COPY (?!--)(.*) \S+$", recipe, re.M):
        assert all((tmp_path / name).exists() for name in source.split()), source
    environment = {
        "KUBE_PROXY_BUILD": json.loads(arguments["BUILD"]),
        "SOURCE_DATE_EPOCH": arguments["SOURCE_DATE_EPOCH"],
    }
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path / "dist")]
    subprocess.run(command, cwd=tmp_path, env=os.environ | environment, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.read_bytes() == (release / wheel.name).read_bytes()


def test_the_chart_installs_the_image_of_the_release(release: Path) -> None:
    chart = release / f"kubeproxy-{NUMBER}.tgz"
    values = {"apiServer": "https://api.cluster.example:6443"}
    (proxy,) = (o for o in helm.template(chart, values, "kube-system") if o["kind"] == "DaemonSet")
    assert proxy["spec"]["template"]["spec"]["containers"][0]["image"] == f"kubeproxy:{NUMBER}"
    with tarfile.open(chart) as archive:
        files = {name for name in archive.getnames() if not name.startswith("kubeproxy/")}
    assert not files


def test_the_bill_of_materials_lists_installed_packages_and_build_tools(release: Path, wheels: Path) -> None:
    document = json.loads((release / f"kubeproxy-{NUMBER}.spdx.json").read_text())
    packages = {one["name"]: one for one in document["packages"]}
    related = {(one["spdxElementId"], one["relationshipType"]) for one in document["relationships"]}
    for name in ("hatchling", "packaging"):
        assert (packages[name]["SPDXID"], "BUILD_DEPENDENCY_OF") in related
    hashes = {
        name: {sum_["checksumValue"] for sum_ in packages[name].get("checksums", ())}
        for name in ("kubeproxy", "msgspec")
    }
    wheel = release / f"kubeproxy-{NUMBER}-py3-none-any.whl"
    assert hashes["kubeproxy"] == {hashlib.sha256(wheel.read_bytes()).hexdigest()}
    expected = {hashlib.sha256(path.read_bytes()).hexdigest() for path in wheels.glob("*/msgspec-*.whl")}
    assert len(expected) == 2
    assert hashes["msgspec"] == expected
    assert packages["msgspec"]["versionInfo"] == metadata.version("msgspec")
    assert packages["kubeproxy"]["versionInfo"] == NUMBER


def test_a_tree_with_a_change_is_no_release_and_its_files_say_so(source: Path, wheels: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "dirty"
    git(source, "clone", "--quiet", str(source), str(checkout))
    (checkout / "README.md").write_text("changed")
    with pytest.raises(subprocess.CalledProcessError) as refused:
        made(checkout, wheels, "--all", "--tag", f"v{NUMBER}")
    assert f"not the release v{NUMBER}: tag a clean tree" in refused.value.stderr
    commit = git(source, "rev-parse", "HEAD")[:12]
    version = f"{NUMBER}.dev0+g{commit}.dirty"
    names = contents(made(checkout, wheels, "--all"))
    assert f"kubeproxy-{version}-py3-none-any.whl" in names
    with tarfile.open(fileobj=io.BytesIO(names[f"kubeproxy-{version}.tgz"])) as archive:
        about = archive.extractfile("kubeproxy/Chart.yaml")
        assert about is not None
        fields = yaml.safe_load(about)
    assert fields["version"] == f"{NUMBER}-dev.0+g{commit}.dirty"
    assert fields["appVersion"] == f"{NUMBER}.dev0-g{commit}.dirty"


def test_a_wheel_that_the_lock_lacks_ends_the_release(source: Path, wheels: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "other"
    git(source, "clone", "--quiet", str(source), str(checkout))
    (tmp_path / "wheels/any").mkdir(parents=True)
    with zipfile.ZipFile(tmp_path / "wheels/any/requests-2.0-any.whl", "w") as wheel:
        wheel.writestr("requests-2.0.dist-info/METADATA", "Name: requests\nVersion: 2.0\n")
    with pytest.raises(subprocess.CalledProcessError) as refused:
        made(checkout, tmp_path / "wheels", "--all")
    assert "requests 2.0 is installed, and the lock has none" in refused.value.stderr


def test_a_wheel_without_a_commit_is_refused(source: Path, tmp_path: Path) -> None:
    git(source, "archive", "--output", str(tmp_path / "source.tar"), "HEAD")
    subprocess.run(["tar", "-C", str(tmp_path), "-xf", str(tmp_path / "source.tar")], check=True)
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "the commit is unknown: build in a git checkout, or set KUBE_PROXY_BUILD" in done.stderr
