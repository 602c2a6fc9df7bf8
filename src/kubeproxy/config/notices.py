"""What to tell those whose configuration is valid, at the start: what will change, and what has no effect here."""

from __future__ import annotations

from collections.abc import Iterator

from kubeproxy.config import modes
from kubeproxy.config.gates import gate_warnings
from kubeproxy.config.types import KubeProxyConfiguration


def notices(config: KubeProxyConfiguration) -> Iterator[str]:
    """Each thing in a sentence.

    The Go kube-proxy warns from 1.37 on of a mode that is not set, as its default becomes nftables in 1.40 (KEP-5343).
    Here it is that already, and another one than there until then.
    """
    yield from gate_warnings(config.feature_gates)
    if not config.mode:
        yield (
            f"mode is not set: that means {modes.DEFAULT.name} here, and iptables in the Go kube-proxy before 1.40. "
            "Set it, so that it means the same in both"
        )
