"""ipvs mode: virtual servers, their addresses on kube-ipvs0, ipsets, and fixed iptables rules that match the ipsets."""

from kubeproxy.backends.mode import Deprecation, Mode
from kubeproxy.config.modes import MODES
from kubeproxy.model.plan import Affinity, FrontendKind, Habits

INTERFACE = "kube-ipvs0"
"""Dummy interface with the addresses of Services. The kernel passes packets to IPVS only if their destination is
local."""

MODE = Mode(
    MODES["ipvs"],
    __name__,
    habits=Habits(
        refuses_ports=(FrontendKind.CLUSTER, FrontendKind.EXTERNAL, FrontendKind.LOADBALANCER),
        drops_unowned=False,
        refuses_at_input=tuple(FrontendKind),
        ranges_first=False,
        resets_tcp=(),
        one_pool=True,
        affinity=Affinity.ADDRESS,
        outlives_mode=False,
    ),
    interface=INTERFACE,
    tracked_as=0,  # IPVS changes the source of answers without a status bit in conntrack (ip_vs_update_conntrack)
    # The exact text of Kubernetes (pull request 134539), because operators search for it.
    deprecation=Deprecation(
        "IPVSDeprecation",
        "The ipvs proxier is now deprecated and may be removed in a future release. Please use 'nftables' instead.",
    ),
)
