"""userspace mode: the proxy relays connections itself, and nftables rules redirect them to its listeners."""

from typing import Final

from kubeproxy.backends.mode import FlowsEnd, Mode
from kubeproxy.config.modes import MODES
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import Affinity, Habits

TABLE: Final = "kube-proxy-userspace"

MODE = Mode(
    MODES["userspace"],
    __name__,
    table=TABLE,
    habits=Habits(
        refuses_ports=(),
        drops_unowned=False,
        refuses_at_input=(),
        resets_tcp=(),
        loopback=(Family.IPV4, Family.IPV6),
        carries=True,
        carries_sctp=False,
        affinity=Affinity.POLICY,
        outlives_mode=False,
    ),
    flows_end=FlowsEnd.PROXY,
)
