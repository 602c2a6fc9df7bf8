"""userspace mode in the configuration: it has no block, but two fields that no other mode reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from kubeproxy.config.fields import ConfigurationFields
from kubeproxy.config.messages import Mistake
from kubeproxy.config.modes import iptables
from kubeproxy.config.modes.description import ModeConfig


class UserspaceMode(ModeConfig, frozen=True, kw_only=True):
    """portRange and udpIdleTimeout are checked only when it is the mode to run: the Go kube-proxy checks neither."""

    def mistakes(self, config: ConfigurationFields) -> Iterator[Mistake]:
        """A range that is none, and a timeout that is not positive."""
        if parse_port_range(config.port_range) is None:
            yield Mistake("portRange", f'expected ports like 300-2000, 300+1700 or 300, got "{config.port_range}"')
        if config.udp_idle_timeout <= 0:
            yield Mistake("udpIdleTimeout", f"must be greater than 0, got {config.udp_idle_timeout}")


def parse_port_range(text: str) -> range | None:
    """The ports of "low-high", "low+count" or "port"; an empty range for "" and "0" (any port), None when invalid."""
    match = re.fullmatch(r"([0-9]{1,5})(?:([-+])([0-9]{1,5}))?", text.strip())
    if not text.strip() or text.strip() in ("0", "0-0"):
        return range(0)
    if match is None:
        return None
    low = int(match[1])
    high = {"-": int(match[3] or 0), "+": low + int(match[3] or 0), None: low}[match[2]]
    return range(low, high + 1) if 0 < low <= high <= 65535 else None


MODE: Final = UserspaceMode(name="userspace", syncs="iptables", masquerades="iptables", flags=iptables.FLAGS)
