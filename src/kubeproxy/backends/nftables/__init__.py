"""nftables mode: a fixed ruleset; Services and endpoints are elements of its sets and maps, written over netlink."""

from typing import Final

from kubeproxy.backends.mode import Metric, Mode
from kubeproxy.config.modes import MODES

TABLE: Final = "kube-proxy"
"""As the Go kube-proxy's, so that either takes over from the other."""

MODE = Mode(
    MODES["nftables"],
    __name__,
    table=TABLE,
    comparable=True,
    refusals=Metric(
        "kubeproxy_sync_proxy_rules_nftables_sync_failures_total",
        "[ALPHA] Cumulative proxy nftables sync failures",
    ),
)
