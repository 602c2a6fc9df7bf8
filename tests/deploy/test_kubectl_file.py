"""dist/kubectl-kubeproxy: one file that runs as a plugin and as its completion, from a folder of an ordinary user."""

from __future__ import annotations

import os
import platform
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import pytest

from kubeproxy.release import build
from support.kubectl_stand_in import StandIn
from support.places import ROOT

TAG = f"cp{sys.version_info[0]}{sys.version_info[1]}-{platform.machine()}"


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file, built from wheels of the installed packages."""
    folder = tmp_path_factory.mktemp("plugin")
    ours, theirs = folder / "kubeproxy-1-py3-none-any.whl", folder / "wheels" / TAG / "msgspec-1.whl"
    theirs.parent.mkdir(parents=True)
    package = Path(msgspec.__file__).parent
    for wheel, root in ((ours, ROOT / "src/kubeproxy"), (theirs, package)):
        with zipfile.ZipFile(wheel, "w") as archive:
            for path in (path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
                archive.write(path, path.relative_to(root.parent))
            if wheel == ours:
                archive.writestr("kubeproxy/BUILD", "9.9.9 0123 clean")
    made = folder / "kubectl-kubeproxy"
    runpy.run_path(str(ROOT / "deploy/node/bundle.py"))["plugin"](ours, folder / "wheels", made)
    (folder / "kubectl_complete-kubeproxy").symlink_to(made)
    return made


def run(program: Path, *words: str, home: Path, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {"HOME": str(home), "PATH": path or os.environ["PATH"]}
    command = [sys.executable, "-S", str(program), *words]  # without the installed packages
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_it_runs_and_unpacks_once(plugin: Path, tmp_path: Path) -> None:
    for _ in range(2):
        done = run(plugin, "--version", home=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (0, "9.9.9+g0123\n", "")
    (folder,) = (tmp_path / ".cache/kubectl-kubeproxy").iterdir()
    assert {"kubeproxy", "msgspec"} <= {path.name for path in folder.iterdir()}
    assert folder.parent.stat().st_mode & 0o077 == 0
    assert build().name != "9.9.9+g0123"


def test_a_folder_that_others_can_write_to_is_refused(plugin: Path, tmp_path: Path) -> None:
    folder = tmp_path / ".cache/kubectl-kubeproxy"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    done = run(plugin, "--version", home=tmp_path)
    assert (done.returncode, list(folder.iterdir())) == (1, [])
    assert f"{folder} must be a folder to which only you can write" in done.stderr


def test_it_completes_as_kubectl_asks(plugin: Path, tmp_path: Path) -> None:
    cluster = StandIn(tmp_path)
    cluster.node("node-a")
    cluster.pod("client", "shop", "node-a", ["10.244.0.7"])
    cluster.objects["services"].append({"metadata": {"name": "web", "namespace": "shop"}})

    def following(*words: str) -> list[str]:
        name = plugin.with_name("kubectl_complete-kubeproxy")
        done = run(name, *words, home=tmp_path, path=cluster.install())
        assert done.stderr == ""
        *found, last = done.stdout.splitlines()
        assert last == ":4"
        return found

    assert following("") == ["why", "trace", "doctor", "verify", "services", "flows"]
    assert following("why", "-n", "shop", "")[-2:] == ["pod/client", "node/node-a"]
    assert following("why", "--namespace", "shop", "pod/client", "svc/") == ["svc/web"]
    assert following("doctor", "--node", "") == ["node-a"]
    assert following("doctor", "-o", "j") == ["json"]
    assert "--proxy-selector" in following("verify", "--")
    assert following("none", "") == []
