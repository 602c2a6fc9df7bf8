"""Workflow files of the hosted CI: pinned actions, least permissions, and commands that this repository has."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from support.places import ROOT

Json = dict[str, Any]
FOLDER = ROOT / ".github/workflows"
NAMES = sorted(path.name for path in FOLDER.iterdir())
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split())  # type: ignore[index]


def workflow(name: str) -> Json:
    """Return a workflow; YAML 1.1 reads its key `on` as true."""
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def jobs() -> Iterator[tuple[str, Json]]:
    for name in NAMES:
        for job, content in workflow(name)["jobs"].items():
            yield f"{name}: {job}", content


def commands() -> list[tuple[str, str]]:
    return [(place, step["run"]) for place, job in jobs() for step in job.get("steps", ()) if "run" in step]


def test_the_files_are_those_of_this_test() -> None:
    assert NAMES == ["checks.yml", "release.yml"]
    assert workflow("checks.yml")[True] == {"push": {"branches": ["main"]}, "pull_request": None, "workflow_call": None}
    assert workflow("release.yml")[True] == {"push": {"tags": ["v*"]}}


@pytest.mark.parametrize("name", NAMES)
def test_actions_are_pinned_by_commit_and_name_their_release(name: str) -> None:
    used = re.findall(r"\buses: (.*)$", (FOLDER / name).read_text(encoding="utf-8"), re.MULTILINE)
    assert used
    for text in used:
        if text.startswith("./"):
            assert (ROOT / text).is_file(), text
        else:
            assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", text), text


def test_an_action_is_pinned_alike_everywhere() -> None:
    texts = "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in NAMES)
    pins: dict[str, set[str]] = {}
    for action, pin in re.findall(r"\buses: ([\w/-]+)@(.*)$", texts, re.MULTILINE):
        pins.setdefault(action, set()).add(pin)
    assert {action: len(found) for action, found in pins.items()} == dict.fromkeys(pins, 1)


def test_permissions_are_the_least() -> None:
    assert workflow("checks.yml")["permissions"] == {"contents": "read"}
    assert workflow("release.yml")["permissions"] == {}
    writing = []
    for place, job in jobs():
        if "write" in job.get("permissions", {}).values():
            writing.append(place)
            assert job["permissions"] == {"contents": "write", "id-token": "write", "attestations": "write"}
            uses = [step.get("uses", "") for step in job["steps"]]
            assert not any(text.startswith("actions/checkout") for text in uses), "it runs no file of the repository"
            assert not any(re.search(r"\bmake\b|tools/|\.ci/", step.get("run", "")) for step in job["steps"])
        for step in job.get("steps", ()):
            if step.get("uses", "").startswith("actions/checkout"):
                assert step["with"] == {"persist-credentials": False}, place
    assert writing == ["release.yml: publish"]


def test_every_job_has_a_limit_of_time() -> None:
    for place, job in jobs():
        assert "uses" in job or 0 < job["timeout-minutes"] <= 120, place


def test_commands_exist() -> None:
    """Targets and variables of make, and files of the repository, exist."""
    lines = [(place, line.split()) for place, text in commands() for line in re.split(r"&&|\n", text)]
    found = set()
    for place, words in lines:
        if words[:1] == ["make"]:
            target, *variables = words[3:] if words[1] == "-C" else words[1:]
            found.add(target)
            assert target in TARGETS, place
            for word in variables:
                assert f"$(if $({word.partition('=')[0]})" in MAKEFILE, f"{place}: {word}"
    assert found == {"unit", "release"}
    files = [(place, word) for place, text in commands() for word in re.findall(r"(?:^|\s)((?:\.ci|tools)/\w+)", text)]
    assert [word for _, word in files] == [".ci/run"]
    for place, word in files:
        assert os.access(ROOT / word, os.X_OK), f"{place}: {word}"


def test_commands_contain_no_text_of_an_event() -> None:
    """The name of a branch or a tag reaches a shell as a variable, never as a part of the script."""
    assert len(commands()) > 6
    for place, text in commands():
        assert "${{" not in text, place


def test_the_release_waits_for_the_checks() -> None:
    release = workflow("release.yml")["jobs"]
    assert release["checks"]["uses"] == "./.github/workflows/checks.yml"
    assert (release["build"]["needs"], release["publish"]["needs"]) == ("checks", "build")


def test_every_supported_python_runs_the_unit_tests() -> None:
    matrix = workflow("checks.yml")["jobs"]["unit"]["strategy"]["matrix"]["python"]
    assert matrix == [f"3.{minor}" for minor in range(11, 15)]
    assert f"Python {matrix[0]} to {matrix[-1]}" in (ROOT / "README.md").read_text(encoding="utf-8")
    bundled = re.search(r"for version in (.*); do", (ROOT / "tools/dist").read_text(encoding="utf-8"))
    assert bundled is not None
    assert bundled[1].split() == [f"cp{version.replace('.', '')}" for version in matrix]
    assert f'requires-python = ">={matrix[0]}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_containers_are_the_base_of_the_image() -> None:
    (base,) = re.findall("^ARG BASE=(.*)$", (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    texts = "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in NAMES)
    assert set(re.findall(r"\b(?:image|container): (\S+)$", texts, re.MULTILINE)) == {base}
