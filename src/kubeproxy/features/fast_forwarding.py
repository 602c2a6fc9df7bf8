"""Fast forwarding: long connections bypass all rules by a flowtable (backends/nftables/forwarding.py).

See docs/beyond.md "Fast forwarding".
"""

from __future__ import annotations

from collections.abc import Mapping
from socket import IPPROTO_TCP, IPPROTO_UDP
from typing import Any, Final, NamedTuple

from kubeproxy.features.feature import Feature, negative


class Forwarding(NamedTuple):
    """Connections of Services that bypass all rules: of these protocols, after so many packets of the client.

    Without protocols there are none.
    """

    after: int = 0
    protocols: tuple[int, ...] = ()


def _mistake(after: int, flags: Mapping[str, Any]) -> str:
    if after and flags.get("reset-gone-endpoints"):
        return "cannot be used with --reset-gone-endpoints: connections that are fast forwarded bypass its rules"
    return negative(after, flags)


FAST_FORWARDING: Final = Feature[Forwarding](
    flag="fast-forward-after",
    kind="int32",
    default="0",
    usage="Let connections of Services bypass all rules after so many packets of the client, by a flowtable of the"
    " kernel; nftables mode only. 0 for never. (Not in the Go kube-proxy.)",
    off=Forwarding(),
    unset=Forwarding(),
    modes=frozenset({"nftables"}),
    mistake=_mistake,
    read=lambda after: Forwarding(after, (IPPROTO_TCP, IPPROTO_UDP)) if after else Forwarding(),
)
