"""The identity of a build: from the wheel, else from KUBE_PROXY_BUILD, else from the git checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kubeproxy.release import NUMBER, Build, build, of_checkout
from support.places import ROOT

HASH = "6956588" + "0" * 33


def git(checkout: Path, *words: str) -> str:
    command = ["git", "-c", f"safe.directory={checkout}", "-c", "user.name=x", "-c", "user.email=x@example.com"]
    done = subprocess.run([*command, "-C", str(checkout), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "code").write_text("1\n")
    (root / ".gitignore").write_text("ignored\n")
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "first")
    return root


def test_a_development_tree_names_its_commit(checkout: Path) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    expected = Build(f"{NUMBER}.dev0+g{commit[:12]}", commit, "clean")
    assert of_checkout(checkout) == expected
    (checkout / "ignored").write_text("")
    git(checkout, "tag", "v0.0.9")
    assert of_checkout(checkout) == expected
    assert expected.name == expected.version


@pytest.mark.parametrize("kind", ["light", "annotated"])
def test_a_clean_tree_at_the_tag_is_the_release(checkout: Path, kind: str) -> None:
    git(checkout, "tag", *(["--annotate", "--message", "x"] if kind == "annotated" else []), f"v{NUMBER}")
    commit = git(checkout, "rev-parse", "HEAD")
    assert of_checkout(checkout) == Build(NUMBER, commit, "clean")
    assert of_checkout(checkout).name == f"{NUMBER}+g{commit[:12]}"
    git(checkout, "commit", "--quiet", "--allow-empty", "--message", "second")
    assert of_checkout(checkout).version == f"{NUMBER}.dev0+g{git(checkout, 'rev-parse', 'HEAD')[:12]}"


@pytest.mark.parametrize("name", ["code", "untracked"])
def test_a_changed_tree_is_dirty_also_at_the_tag(checkout: Path, name: str) -> None:
    git(checkout, "tag", f"v{NUMBER}")
    (checkout / name).write_text("2\n")
    commit = git(checkout, "rev-parse", "HEAD")
    assert of_checkout(checkout) == Build(f"{NUMBER}.dev0+g{commit[:12]}.dirty", commit, "dirty")


def test_builds_of_two_commits_have_two_names_even_when_the_tag_was_moved(checkout: Path) -> None:
    names = []
    for number in range(2):
        git(checkout, "commit", "--quiet", "--allow-empty", "--message", f"commit {number}")
        git(checkout, "tag", "--force", f"v{NUMBER}")
        names.append(of_checkout(checkout).name)
    assert len(set(names)) == 2


def test_without_git_the_commit_is_unknown(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = Build(f"{NUMBER}.dev0+unknown")
    below = checkout / "below"
    below.mkdir()
    assert of_checkout(below) == unknown, "the commit of a folder above is not that of the program"
    (below / ".git").write_text("gitdir: elsewhere\n")
    assert of_checkout(below) == unknown
    monkeypatch.setenv("PATH", str(below))
    assert of_checkout(checkout) == unknown


def test_the_wheel_comes_first_then_the_environment_then_git(
    tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "BUILD"
    written.write_text(f"1.0 {HASH} clean\n")
    monkeypatch.setenv("KUBE_PROXY_BUILD", f"2.0 {HASH} dirty")
    assert build(written, checkout) == Build("1.0", HASH, "clean")
    assert build(tmp_path / "none", checkout) == Build("2.0", HASH, "dirty")
    monkeypatch.delenv("KUBE_PROXY_BUILD")
    assert build(tmp_path / "missing", checkout) == of_checkout(checkout)


def test_an_upgrade_below_a_running_program_changes_nothing(tmp_path: Path) -> None:
    written = tmp_path / "BUILD"
    written.write_text(f"1.0 {HASH} clean\n")
    assert build(written).version == "1.0"
    written.write_text(f"2.0 {HASH} clean\n")
    assert build(written).version == "1.0"


def test_the_file_runs_where_the_package_is_not_installed_yet() -> None:
    command = [sys.executable, "-I", "-S", str(ROOT / "src/kubeproxy/release.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split()[1] == git(ROOT, "rev-parse", "HEAD")
