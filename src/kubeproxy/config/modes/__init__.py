"""The one list of proxy modes: a mode is a line here, a module beside it, and a folder of its name in backends."""

from __future__ import annotations

from typing import Final

from kubeproxy.config.modes import iptables, ipvs, nftables, userspace
from kubeproxy.config.modes.description import ModeConfig

_ALL: Final[tuple[ModeConfig, ...]] = (
    nftables.MODE,
    iptables.MODE,
    ipvs.MODE,
    userspace.MODE,
)
DEFAULT: Final = _ALL[0]
"""What an empty `mode` means."""
FALLBACK: Final = _ALL[1]
"""What an empty `mode` means on a node that cannot run the default one."""
MODES: Final[dict[str, ModeConfig]] = {mode.name: mode for mode in _ALL}
"""All modes by name."""


def named(name: str) -> ModeConfig:
    """The mode of this name; the default one for "" and for a name that there is not, as mistakes are read on."""
    return MODES.get(name, DEFAULT)
