"""nftables mode: a fixed ruleset; Services and endpoints are elements of its sets and maps, written over netlink."""

from kubeproxy.backends.mode import Metric, Mode
from kubeproxy.config.modes import nftables

MODE = Mode(
    nftables.MODE,
    __name__,
    refusals=Metric(
        "kubeproxy_sync_proxy_rules_nftables_sync_failures_total",
        "[ALPHA] Cumulative proxy nftables sync failures",
    ),
)
