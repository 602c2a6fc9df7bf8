"""iptables mode: the chains and rules of the Go kube-proxy, by iptables-restore."""

from kubeproxy.backends.mode import Mode
from kubeproxy.config.modes import iptables

MODE = Mode(iptables.MODE, __name__)
