"""Bridges of this network namespace, and whether forwarded packets pass iptables and nftables. Reads only.

Source: Documentation/networking/bridge.rst, net/bridge/br_netfilter_hooks.c of Linux 6.18.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from kubeproxy.model.addresses import Family

SYS: Final = Path("/sys/class/net")
SYSCTLS: Final = Path("/proc/sys/net/bridge")

_NAMES: Final = {Family.IPV4: "iptables", Family.IPV6: "ip6tables"}
SYSCTL: Final = {family: f"net.bridge.bridge-nf-call-{word}" for family, word in _NAMES.items()}
"""The sysctl by which all bridges of a network namespace filter, by family."""


class Bridge(NamedTuple):
    """A bridge, and the families whose forwarded packets pass the rules."""

    name: str
    filtered: tuple[Family, ...]


def bridges(sys: Path = SYS, sysctls: Path = SYSCTLS) -> list[Bridge]:
    """Return all bridges. Without the module br_netfilter, none filters."""
    found = [entry.name for entry in sorted(sys.iterdir()) if (entry / "bridge").is_dir()] if sys.is_dir() else []
    if not sysctls.is_dir():
        return [Bridge(name, ()) for name in found]
    everywhere = {family for family, word in _NAMES.items() if _is_on(sysctls / f"bridge-nf-call-{word}")}
    return [
        Bridge(
            name,
            tuple(
                family
                for family, word in _NAMES.items()
                if family in everywhere or _is_on(sys / name / "bridge" / f"nf_call_{word}")
            ),
        )
        for name in found
    ]


def hairpin_ports(bridge: str, sys: Path = SYS) -> dict[str, bool]:
    """Return the ports of a bridge, each with whether it sends a frame back by the port of its arrival."""
    try:
        return {entry.name: _is_on(entry / "hairpin_mode") for entry in sorted((sys / bridge / "brif").iterdir())}
    except OSError:
        return {}


def _is_on(path: Path) -> bool:
    try:
        return path.read_text(encoding="ascii").strip() == "1"
    except OSError:
        return False
