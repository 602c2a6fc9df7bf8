"""The metrics of iptables mode: names and help texts of the Go kube-proxy, and one metric of our own. Safe to call from
any thread. Counters of failures exist with the value 0 from the start, because Prometheus' rate() would miss an
increase in a counter that first appears with 1."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from kubeproxy.backends.iptables.skeleton import INVALID_COUNTER, LOCALHOST_COUNTER
from kubeproxy.backends.mode import RESTORE_FAILURES
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.netlink.protocol import Netlink
from kubeproxy.kernel.xtables import xtables
from kubeproxy.model.addresses import Family
from kubeproxy.registry import MetricRegistry

log = logging.getLogger("kubeproxy.iptables")

FAMILY = "ip_family"


class Metrics:
    """Registers the metrics of these families."""

    def __init__(self, registry: MetricRegistry, families: Iterable[Family]) -> None:
        self._rules = registry.gauge(
            "kubeproxy_sync_proxy_rules_iptables_total",
            "[ALPHA] Total number of iptables rules owned by kube-proxy",
            "table",
            FAMILY,
        )
        self._rules_last = registry.gauge(
            "kubeproxy_sync_proxy_rules_iptables_last",
            "[ALPHA] Number of iptables rules written by kube-proxy in last sync",
            "table",
            FAMILY,
        )
        self._failures = registry.counter(RESTORE_FAILURES.name, RESTORE_FAILURES.text, FAMILY)
        self._partial_failures = registry.counter(
            "kubeproxy_sync_proxy_rules_iptables_partial_restore_failures_total",
            "[ALPHA] Cumulative proxy iptables partial restore failures",
            FAMILY,
        )
        for family in families:
            self._failures.labels(family.label)
            self._partial_failures.labels(family.label)
        self.invalid_dropped = registry.counter(
            "kubeproxy_iptables_ct_state_invalid_dropped_packets_total",
            "[ALPHA] packets dropped by iptables to work around conntrack problems",
        )
        self.localhost_accepted = registry.counter(
            "kubeproxy_iptables_localhost_nodeports_accepted_packets_total",
            "[ALPHA] Number of packets accepted on nodeports of loopback interface",
        )
        self._lock_wait = registry.counter(
            "kubeproxy_iptables_lock_wait_seconds_total",
            "Cumulative seconds that syncs waited for the iptables lock of other programs (not in the Go kube-proxy)",
            FAMILY,
        )

    def restore_failed(self, family: Family, *, partial: bool) -> None:
        """Count a sync that iptables-restore refused. A partial sync counts in two metrics, as in the Go kube-proxy."""
        self._failures.labels(family.label).inc()
        if partial:
            self._partial_failures.labels(family.label).inc()

    def rules(self, family: Family, table: str, total: int, last: int) -> None:
        """Set the number of rules in a table, and the number of rules that the last sync wrote."""
        self._rules.labels(table, family.label).set(total)
        self._rules_last.labels(table, family.label).set(last)

    def waited(self, family: Family, seconds: float) -> None:
        """Add the seconds that a sync waited for the iptables lock of another program."""
        self._lock_wait.labels(family.label).inc(seconds)


def make_counters(metrics: Metrics) -> bool | None:
    """Create the kernel's counters, and register the functions that read them. Return False if the kernel does not
    support such counters, and None if a request failed."""
    try:
        there = xtables.ensure_counter(INVALID_COUNTER) and xtables.ensure_counter(LOCALHOST_COUNTER)
        if there:
            # The socket stays open, because closing it waits for transactions (nft_rcv_nl_event).
            link = Netlink.open()
            metrics.invalid_dropped.labels().follow(_reader(INVALID_COUNTER, link))
            metrics.localhost_accepted.labels().follow(_reader(LOCALHOST_COUNTER, link))
    except ApplyError as error:
        log.warning("Cannot create packet counters, the next full sync tries again error=%r", str(error))
        return None
    if not there:
        log.info("The kernel has no named packet counters (nfnetlink_acct): two metrics stay at 0")
    return there


def _reader(counter: str, link: Netlink) -> Callable[[], float]:
    def read() -> float:
        try:
            return xtables.counted_packets(counter, link)
        except ApplyError:
            return 0.0

    return read
