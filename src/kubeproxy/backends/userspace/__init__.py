"""userspace mode: the proxy carries the bytes itself, and nftables brings connections to its listeners."""

from kubeproxy.backends.mode import FlowsEnd, Mode
from kubeproxy.config.modes import userspace

MODE = Mode(userspace.MODE, __name__, flows_end=FlowsEnd.PROXY)
