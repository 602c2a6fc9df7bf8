"""Checks of the Dockerfile that need no build, and of the lock files that it installs from."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from kubeproxy.release import NUMBER
from support.places import ROOT

DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()


def instructions() -> list[tuple[str, str]]:
    """Return (instruction, arguments), with joined lines and without comments."""
    lines = [line for line in DOCKERFILE.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    pairs = (line.partition(" ") for line in joined.splitlines() if line.strip())
    return [(word, rest.strip()) for word, _, rest in pairs]


def sublock():
    spec = importlib.util.spec_from_file_location("sublock", ROOT / "deploy/sublock.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def project() -> dict[str, list[str]]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        found = tomllib.load(file)
    run, build = found["project"]["dependencies"], found["build-system"]["requires"]
    demo = [*run, *found["project"]["optional-dependencies"]["lab"]]
    return {"deploy/run.lock": run, "deploy/build.lock": build, "tools/demo.lock": demo}


@pytest.mark.parametrize("name", ["deploy/run.lock", "deploy/build.lock", "tools/demo.lock"])
def test_locks_are_cut_from_the_lock(name: str) -> None:
    """They must be made again after a change of requirements.lock, as described in deploy/sublock.py."""
    names = [re.split(r"[<>=!~\[; ]", requirement)[0] for requirement in project()[name]]
    expected = sublock().cut(names, (ROOT / "requirements.lock").read_text())
    assert (ROOT / name).read_text() == expected
    assert all(line.count("==") == 1 or "--hash=sha256:" in line for line in expected.splitlines())


def test_the_last_stage_begins_empty_and_only_known_instructions() -> None:
    words = [word for word, _ in instructions()]
    bases = [rest for word, rest in instructions() if word == "FROM"]
    assert bases == ["${BASE} AS base", "base AS build", "base AS files", "scratch"]
    assert set(words) <= {"FROM", "RUN", "WORKDIR", "COPY", "ARG", "LABEL", "ENV", "STOPSIGNAL", "ENTRYPOINT"}


SOURCES = """\
Types: deb
# http://archive.example/archive/debian/20260824T000000Z
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main

Types: deb
# http://archive.example/archive/debian-security/20260824T000000Z
URIs: http://mirror.example/debian-security
Suites: bookworm-security
"""
"""Return the list of sources in Debian's images: each has a comment with its archive at the image's time."""


def prepared(folder: Path, sources: str, snapshot: str) -> tuple[int, str, bool]:
    """Return the exit code of the command that sets the archive's time, the list, and whether old lists are valid."""
    (command,) = (rest for word, rest in instructions() if word == "RUN" and "SNAPSHOT" in rest)
    (folder / "sources.list.d").mkdir()
    (folder / "apt.conf.d").mkdir()
    path = folder / "sources.list.d/debian.sources"
    path.write_text(sources)
    command = command.replace("/etc/apt", str(folder))
    done = subprocess.run(["sh", "-c", command], env={"PATH": os.environ["PATH"], "SNAPSHOT": snapshot}, check=False)
    return done.returncode, path.read_text(), (folder / "apt.conf.d/snapshot").exists()


def test_base_and_debian_packages_are_pinned_by_build_arguments(tmp_path: Path) -> None:
    arguments = dict(rest.split("=", 1) for word, rest in instructions() if word == "ARG" and "=" in rest)
    assert re.fullmatch(r"debian:12-slim@sha256:[0-9a-f]{64}", arguments["BASE"])
    assert re.fullmatch(r"20\d{6}T\d{6}Z", arguments["SNAPSHOT"])
    code, text, old = prepared(tmp_path, SOURCES, "20261001T000000Z")
    assert (code, old) == (0, True)
    assert re.findall("^URIs: (.*)$", text, re.M) == [
        "http://archive.example/archive/debian/20261001T000000Z",
        "http://archive.example/archive/debian-security/20261001T000000Z",
    ]


def test_without_a_time_debian_packages_are_those_of_today(tmp_path: Path) -> None:
    assert prepared(tmp_path, SOURCES, "") == (0, SOURCES, False)


def test_a_base_image_without_an_archive_in_its_sources_ends_the_build(tmp_path: Path) -> None:
    code, _, _ = prepared(tmp_path, SOURCES.replace("# http", "# see http").replace("Z\n", "\n"), "20261001T000000Z")
    assert code != 0


def test_nothing_needs_a_shell_at_run_time() -> None:
    entry = [json.loads(rest) for word, rest in instructions() if word == "ENTRYPOINT"]
    assert entry == [["/usr/local/bin/kube-proxy"]]
    for word, rest in instructions():
        if word == "RUN" and rest.startswith("["):
            assert all(isinstance(part, str) for part in json.loads(rest))
    final = instructions()[max(i for i, (word, _) in enumerate(instructions()) if word == "FROM") :]
    assert all(rest.startswith("[") for word, rest in final if word == "RUN"), "the image has no shell"


def test_everything_that_is_installed_is_locked() -> None:
    installs = [rest for word, rest in instructions() if word == "RUN" and '"install"' in rest]
    assert len(installs) == 3
    for rest in installs:
        assert "--require-hashes" in rest or ("--no-index" in rest and "--no-deps" in rest)


def test_copied_files_exist_and_are_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ignored[0] == "*"
    kept = [line[1:] for line in ignored if line.startswith("!")]
    for word, rest in instructions():
        if word == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert any(fnmatch(source, pattern) for pattern in kept), source


def test_labels() -> None:
    (text,) = (rest for word, rest in instructions() if word == "LABEL")
    labels = dict(re.findall(r'(\S+?)="(.*?)"', text))
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.version"] == "${VERSION}"
    assert ("ARG", f"VERSION={NUMBER}") in instructions()


def test_no_processor_is_named() -> None:
    """One recipe for amd64 and arm64: no paths, hashes or packages of one of them."""
    assert not re.search(r"amd64|arm64|x86_64|aarch64|linux-gnu", DOCKERFILE)
    # Debian has /lib64 only on some processors.
    assert "cp -a /bin /sbin /lib /lib64" not in DOCKERFILE


def test_the_bill_of_materials_is_made_from_the_contents_of_the_image() -> None:
    (made,) = (rest for word, rest in instructions() if word == "RUN" and "sbom.py" in rest)
    assert "/image/var/lib/dpkg/status" in made
    assert "/image/opt/kube-proxy/lib" in made
