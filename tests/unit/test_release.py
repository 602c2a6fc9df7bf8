"""The commit that a build names: written into it, or that of the checkout."""

import subprocess
import sys

import pytest

from kubeproxy.release import commit
from support.places import ROOT

HASH = "6956588" + "0" * 33


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"COMMIT": f"{HASH}\n"}, HASH),
        ({".git/HEAD": f"{HASH}\n"}, HASH),
        ({".git/HEAD": "ref: refs/heads/main\n", ".git/refs/heads/main": f"{HASH}\n"}, HASH),
        ({".git/HEAD": "ref: refs/heads/main\n", ".git/packed-refs": f"# pack-refs\n{HASH} refs/heads/main\n"}, HASH),
        ({".git/HEAD": "ref: refs/heads/main\n"}, ""),
        ({".git": "gitdir: elsewhere\n"}, ""),
        ({}, ""),
    ],
)
def test_the_commit_is_read_from_the_build_or_the_checkout(tmp_path, files, expected):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert commit(tmp_path / "COMMIT", tmp_path / ".git") == expected


def test_an_upgrade_below_a_running_program_changes_nothing(tmp_path):
    checkout = tmp_path / "HEAD"
    checkout.write_text(f"{HASH}\n")
    assert commit(tmp_path / "COMMIT", tmp_path) == HASH
    checkout.write_text("0" * 40)
    assert commit(tmp_path / "COMMIT", tmp_path) == HASH


def test_a_checkout_names_its_commit():
    asked = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), "rev-parse", "HEAD"]
    assert commit() == subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def test_the_file_runs_where_the_package_is_not_installed_yet():
    script = f"import runpy; print(runpy.run_path({str(ROOT / 'src/kubeproxy/release.py')!r})['commit']())"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == commit()
