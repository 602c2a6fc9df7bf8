"""The available kernel modules, from modprobe's files, and the message when one is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from kubeproxy.errors import Unsupported
from kubeproxy.kernel.proc.modules import ModuleFiles, ipvs_modules, kernel_version, load, present, release, require

RELEASE = "5.15.0-91-generic"


def files(tmp_path: Path, loaded: str | None = "", built_in: str | None = "", config: str = "") -> ModuleFiles:
    (tmp_path / "osrelease").write_text(f"{RELEASE}\n")
    if loaded is not None:
        (tmp_path / "modules").write_text(loaded)
    if built_in is not None:
        (tmp_path / "lib" / RELEASE).mkdir(parents=True)
        (tmp_path / "lib" / RELEASE / "modules.builtin").write_text(built_in)
    (tmp_path / f"config-{RELEASE}").write_text(config)
    (tmp_path / "live").mkdir()
    names = {"release": "osrelease", "loaded": "modules", "live": "live", "folder": "lib"}
    return ModuleFiles(**{field: tmp_path / name for field, name in names.items()}, boot=tmp_path)


def modprobe(tmp_path: Path, script: str) -> str:
    path = tmp_path / "modprobe"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("6.1.0-18-amd64", (6, 1)),
        ("4.19", (4, 19)),
        ("3.10.0-957.1.3.el7.x86_64", (3, 10)),
        ("odd", (0, 0)),
        ("", (0, 0)),
    ],
)
def test_versions(text: str, version: tuple[int, int]) -> None:
    assert kernel_version(text) == version


@pytest.mark.parametrize(
    ("kernel", "last"),
    [
        ("6.1.0", "nf_conntrack"),
        ("4.19.0", "nf_conntrack"),
        ("4.18.20", "nf_conntrack_ipv4"),
        ("3.10.0-957.el7", "nf_conntrack_ipv4"),
    ],
)
def test_modules_that_ipvs_needs(kernel: str, last: str) -> None:
    assert ipvs_modules(kernel) == ["ip_vs", "ip_vs_rr", "ip_vs_wrr", "ip_vs_sh", last]


def test_loaded_and_built_in_modules_are_present(tmp_path: Path) -> None:
    found = files(
        tmp_path,
        loaded="ip_vs 176128 0 - Live 0x0\nip_vs_rr 16384 1 ip_vs, Live 0x0\n",
        built_in="kernel/net/netfilter/nf_conntrack.ko\nkernel/net/netfilter/xt-dashed.ko\n",
    )
    (tmp_path / "live" / "dummy").mkdir()
    wanted = ["ip_vs", "ip_vs_rr", "ip_vs_sh", "nf_conntrack", "xt_dashed", "dummy", "ip"]
    assert present(wanted, found) == set(wanted) - {"ip_vs_sh", "ip"}


def test_a_kernel_without_loadable_modules_is_asked_by_its_configuration(tmp_path: Path) -> None:
    config = (
        "CONFIG_IP_VS=y\nCONFIG_IP_VS_RR=m\n# CONFIG_IP_VS_SH is not set\nCONFIG_NF_CONNTRACK=y\nXCONFIG_IP_VS_WRR=y\n"
    )
    found = files(tmp_path, loaded=None, config=config)
    assert present(ipvs_modules(RELEASE), found) == {"ip_vs", "nf_conntrack"}


def test_unreadable_files_name_nothing(tmp_path: Path) -> None:
    found = files(tmp_path, loaded="ip_vs 1 0 - Live 0x0\n", built_in=None)
    assert present(["ip_vs", "dummy"], found) == {"ip_vs"}
    (tmp_path / "osrelease").unlink()
    with pytest.raises(Unsupported, match="mount /proc"):
        release(found)


def test_only_missing_modules_are_loaded_by_name(tmp_path: Path) -> None:
    found = files(tmp_path, loaded="ip_vs 1 0 - Live 0x0\n")
    require(["ip_vs", "ip_vs_rr", "-r"], "ipvs mode", found, modprobe(tmp_path, f'echo "$@" >>{tmp_path}/calls'))
    assert (tmp_path / "calls").read_text() == "-- ip_vs_rr\n-- -r\n"


def test_a_module_that_cannot_be_loaded_is_named_with_the_fix(tmp_path: Path) -> None:
    found = files(tmp_path)
    failing = modprobe(tmp_path, f"echo 'warning' >&2; echo 'FATAL: {'$2'} not found' >&2; exit 1")
    with pytest.raises(Unsupported) as caught:
        require(["ip_vs", "ip_vs_mh"], "ipvs mode", found, failing)
    for part in ("ipvs mode", "ip_vs, ip_vs_mh", RELEASE, "modprobe -a ip_vs ip_vs_mh", "FATAL: "):
        assert part in str(caught.value)


def test_a_missing_modprobe_is_reported(tmp_path: Path) -> None:
    assert "No such file" in load(["ip_vs"], str(tmp_path / "nothing"))["ip_vs"]
    with pytest.raises(Unsupported, match="the kernel module ip_vs,"):
        require(["ip_vs"], "ipvs mode", files(tmp_path), str(tmp_path / "nothing"))
