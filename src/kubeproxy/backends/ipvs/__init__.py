"""ipvs mode: virtual servers on kube-ipvs0, ipsets, and fixed iptables chains that match them."""

from kubeproxy.backends.mode import Mode
from kubeproxy.config.modes import ipvs

INTERFACE = "kube-ipvs0"
"""The dummy interface that carries the addresses of Services, so that their packets come in at all."""

MODE = Mode(ipvs.MODE, __name__, interface=INTERFACE)
