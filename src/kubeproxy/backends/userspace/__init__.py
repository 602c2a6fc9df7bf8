"""userspace mode: the proxy carries the bytes itself, and nftables brings connections to its listeners."""

from typing import Final

from kubeproxy.backends.mode import FlowsEnd, Mode
from kubeproxy.config.modes import userspace

TABLE: Final = "kube-proxy-userspace"

MODE = Mode(userspace.MODE, __name__, table=TABLE, flows_end=FlowsEnd.PROXY)
