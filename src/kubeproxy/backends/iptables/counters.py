"""The two packet counters that rules of iptables mode count into, and the metrics made of them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kubeproxy.backends.iptables.metrics import Metrics
from kubeproxy.backends.iptables.render import INVALID_COUNTER, LOCALHOST_COUNTER
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.xtables import nfacct

log = logging.getLogger("kubeproxy.iptables")


def ensure(metrics: Metrics) -> bool | None:
    """Make the counters, and have them asked for; return whether the kernel has them, None when it could not say."""
    try:
        there = nfacct.ensure(INVALID_COUNTER) and nfacct.ensure(LOCALHOST_COUNTER)
    except ApplyError as error:
        log.warning("No packet counters for now, the next full sync asks again error=%r", str(error))
        return None
    if there:
        metrics.follow_packets(_reader(INVALID_COUNTER), _reader(LOCALHOST_COUNTER))
    else:
        log.info("The kernel has no named packet counters (nfnetlink_acct): two metrics stay at 0")
    return there


def _reader(counter: str) -> Callable[[], float]:
    def read() -> float:
        try:
            return nfacct.packets(counter)
        except ApplyError:
            return 0.0

    return read
