"""iptables mode: writes the chains and rules of the Go kube-proxy with iptables-restore."""

from kubeproxy.backends.mode import Mode
from kubeproxy.config.modes import MODES
from kubeproxy.model.plan import FrontendKind, Habits

MODE = Mode(
    MODES["iptables"],
    __name__,
    comparable=True,
    habits=Habits(
        refuses_ports=(),
        drops_unowned=False,
        refuses_at_input=(FrontendKind.EXTERNAL, FrontendKind.LOADBALANCER, FrontendKind.NODEPORT),
        refuses_node=False,
        ranges_first=False,
        resets_tcp=(),
        closes_everywhere=True,
        hairpins="all",
    ),
)
