"""The archive that installs a node: its files, a run of the program, the upgrade, and the removal without leftovers."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from kubeproxy.commands import COMMANDS
from kubeproxy.release import build
from support.places import ROOT

UNIT = ROOT / "deploy/systemd/kube-proxy.service"
TAG = f"cp{sys.version_info[0]}{sys.version_info[1]}-x86_64"


def repacked(name: str, folder: Path) -> None:
    """Return a wheel of the installed packages, so that no test needs a network."""
    package = metadata.distribution(name)
    with zipfile.ZipFile(folder / f"{name}-{package.version}-cp3-cp3-linux.whl", "w") as wheel:
        for file in package.files or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                wheel.write(str(file.locate()), str(file))


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    machine = subprocess.run(["uname", "-m"], capture_output=True, text=True, check=True).stdout.strip()
    needed = folder / "wheels" / f"{TAG.partition('-')[0]}-{machine}"
    needed.mkdir(parents=True)
    for name in ("msgspec", "PyYAML", "httptools"):
        repacked(name, needed)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("kubeproxy-*.whl")
    made = folder / "kube-proxy.pyz"
    command = [sys.executable, str(ROOT / "deploy/node/bundle.py"), str(wheel), str(folder / "wheels"), str(made)]
    subprocess.run(command, check=True)
    return made


def run(archive: Path, action: str, root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(archive), action, "--root", str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


def changed(archive: Path, folder: Path, **parts: bytes) -> Path:
    """Return the same archive with other files in it; names have double underscores for dots."""
    made = folder / "changed.pyz"
    wanted = {name.replace("__", "."): value for name, value in parts.items()}
    with zipfile.ZipFile(archive) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            new.writestr(name, wanted.get(name.rpartition("/")[2], old.read(name)))
    return made


def of_the_host(root: Path, *command: str) -> str:
    """Return the output of a command with the installed folder as /opt, as on a node."""
    script = 'mount --bind "$1/opt" /opt; shift; exec "$@"'
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", script, "sh", str(root), *command]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60, cwd="/")
    return done.stdout


def test_a_node_has_all_of_it_and_nothing_afterwards(archive: Path, tmp_path: Path) -> None:
    done = run(archive, "install", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    program = tmp_path / "usr/local/bin/kube-proxy"
    version = build().name.replace("+", ".")
    assert of_the_host(tmp_path, str(program), "--version") == f"Kubernetes v1.36.0+python.{version}\n"
    assert f"\ncommit: {build().commit}\ntree: {build().tree}\n" in of_the_host(tmp_path, str(program), "--version=raw")
    # A process of a release can start another process of the same release.
    own = "/opt/kube-proxy/current/bin/python"
    assert of_the_host(tmp_path, own, "-I", "-m", "kubeproxy.cli", "--version").startswith("Kubernetes v1.36")
    loaded = "import msgspec, yaml, httptools, kubeproxy.program.app as app; print(app.__file__)"
    assert of_the_host(tmp_path, own, "-I", "-c", loaded).startswith("/opt/kube-proxy/current/lib/")
    # A traceback and a profile name existing files.
    named = "import kubeproxy.program.app as app; print(app.run.__code__.co_filename)"
    assert Path(of_the_host(tmp_path, own, "-I", "-c", named).strip().replace("/opt", f"{tmp_path}/opt")).is_file()
    links = [path for path in tmp_path.rglob("*") if path.is_symlink() and not path.is_relative_to(tmp_path / "opt")]
    for path in links:
        assert (tmp_path / str(path.readlink())[1:]).is_file(), path
    pages = {path.name for path in links if path.suffix == ".8"}
    assert pages == {"kube-proxy.8"} | {f"kube-proxy-{name}.8" for name in COMMANDS}
    assert {path.name for path in links} >= {"kube-proxy", "_kube-proxy", "kube-proxy.fish"}
    assert (tmp_path / "usr/local/lib/systemd/system/kube-proxy.service").read_bytes() == UNIT.read_bytes()
    assert run(archive, "uninstall", tmp_path).returncode == 0
    assert [str(path) for path in tmp_path.rglob("*") if not path.is_dir()] == []
    assert "nothing is installed" in run(archive, "uninstall", tmp_path).stderr


@pytest.mark.slow("an installation of its own")
def test_a_newer_python_of_the_host_does_not_take_the_place_of_the_one_installed_for(
    archive: Path, tmp_path: Path
) -> None:
    """A distribution's python3 is a link, which an upgrade changes to a Python without these packages."""
    own = Path(sys.executable).resolve()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").symlink_to(own)
    command = [str(tmp_path / "bin/python3"), "-I", str(archive), "install", "--root", str(tmp_path / "root")]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    assert (tmp_path / "root/opt/kube-proxy/current/bin/python").readlink() == own


@pytest.mark.slow("an installation of its own")
def test_a_release_replaces_another_which_stays_for_its_running_process(archive: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    releases = []
    for number in range(3):
        unit = UNIT.read_bytes() + b"# %d\n" % number
        made = changed(archive, tmp_path, **{"kube-proxy__service": unit})
        assert run(made, "install", root).returncode == 0
        releases.append(str((root / "opt/kube-proxy/current").readlink()))
        assert (root / "usr/local/lib/systemd/system/kube-proxy.service").read_bytes() == unit
    assert len(set(releases)) == 3
    assert {path.name for path in (root / "opt/kube-proxy").iterdir()} == {"current", *releases[1:]}
    inode = (root / "opt/kube-proxy" / releases[2]).stat().st_ino
    assert run(made, "install", root).returncode == 0
    assert (root / "opt/kube-proxy" / releases[2]).stat().st_ino == inode, "the same once more makes nothing anew"


def test_foreign_files_are_kept(archive: Path, tmp_path: Path) -> None:
    program = tmp_path / "usr/local/bin/kube-proxy"
    program.parent.mkdir(parents=True)
    program.write_text("the Go kube-proxy")
    done = run(archive, "install", tmp_path)
    assert done.returncode == 1
    assert (
        done.stderr
        == f"Error: {program} is there and not of this installer: move it away first (it is what runs now?)\n"
    )
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [program]


def test_a_failed_installation_leaves_nothing(archive: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    with zipfile.ZipFile(archive) as opened:
        name = next(name for name in opened.namelist() if "httptools" in name).rpartition("/")[2]
    broken = tmp_path / "broken.whl"
    with zipfile.ZipFile(broken, "w") as wheel:
        wheel.writestr("a.data/scripts/a", "")
    made = changed(archive, tmp_path, **{name: broken.read_bytes()})
    done = run(made, "install", root)
    assert (done.returncode, done.stderr) == (
        1,
        "Error: a wheel has a.data/scripts/a, which this installer cannot install\n",
    )
    assert [path for path in root.rglob("*") if path.is_file()] == []


def test_the_unit_starts_the_installed_program() -> None:
    start = re.search(r"^ExecStart=(\S+)", UNIT.read_text(), re.M)
    assert start is not None
    text = (ROOT / "deploy/node/install.py").read_text()
    assert f'"{start[1][1:]}": "bin/kube-proxy"' in text
