"""Rule texts that several modes share: jumps to our chains, and the match for packets of pods. Pure."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from kubeproxy.errors import ConfigError
from kubeproxy.model.plan import Detector

_INTERFACE: Final = re.compile(r"[^\s\"'\\/!+-][^\s\"'\\/!+]*")


class Jump(NamedTuple):
    """A rule of a built-in iptables chain that jumps to one of our chains; `match` is '' or ends with a space."""

    table: str
    chain: str
    target: str
    comment: str = ""
    match: str = ""

    @property
    def rule(self) -> str:
        """Return the rule as iptables-save prints it after -A."""
        comment = f'-m comment --comment "{self.comment}" ' if self.comment else ""
        return f"{self.chain} {self.match}{comment}-j {self.target}"


def pods_in_nft(detector: Detector, ip: str, negation: str = "") -> str:
    """Return the nft match for packets of pods. The detector must be `implemented`; `negation` is '' or '!= '."""
    if detector.kind == "network":
        return f"{ip} saddr {negation}{detector.value}"
    wildcard = "*" if detector.kind == "prefix" else ""
    return f'iifname {negation}"{detector.value}{wildcard}"'


def pods_in_iptables(detector: Detector) -> str:
    """Return the iptables match for packets from pods, or '' if there is none. The prefix "! " negates the match.
    Raises ConfigError for an interface name that has another meaning in a rule."""
    if detector.kind == "none":
        return ""
    if detector.kind == "network":
        return f"-s {detector.value}"
    if not _INTERFACE.fullmatch(detector.value) or not detector.value.isprintable():
        raise ConfigError(f"detectLocal: {detector.value!r} cannot be matched in an iptables rule")
    return f"-i {detector.value}{'+' if detector.kind == 'prefix' else ''}"
