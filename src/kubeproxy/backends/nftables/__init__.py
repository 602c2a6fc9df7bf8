"""nftables mode: static rules; Services and endpoints are elements of sets and maps, written over netlink."""

from typing import Final

from kubeproxy.backends.mode import Metric, Mode
from kubeproxy.config.modes import MODES

TABLE: Final = "kube-proxy"
"""Name of our table. The Go kube-proxy uses the same name, so each program can take over the table of the other."""

MODE = Mode(
    MODES["nftables"],
    __name__,
    table=TABLE,
    comparable=True,
    refusals=Metric(
        "kubeproxy_sync_proxy_rules_nftables_sync_failures_total", "[ALPHA] Cumulative proxy nftables sync failures"
    ),
)
