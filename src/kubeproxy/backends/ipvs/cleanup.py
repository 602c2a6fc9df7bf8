"""Removes the objects of ipvs mode, of this program or of the Go kube-proxy: after a change of mode, and for --cleanup.
This module removes only objects of ipvs mode; leftovers.py removes the chains that iptables mode uses too
(KUBE-SERVICES, ...). Virtual servers of other programs are not removed. Virtual servers are ours if they use an address
of kube-ipvs0 or a port in our NodePort sets."""

from __future__ import annotations

import errno
import logging
from collections.abc import Collection
from contextlib import suppress
from typing import Final

from kubeproxy.backends.ipvs import INTERFACE
from kubeproxy.backends.ipvs.desired import NODE_PORTS
from kubeproxy.backends.ipvs.layout import IpsetId
from kubeproxy.backends.leftovers import IPVS_CHAINS, chain_traces, decision, remove_iptables_rules
from kubeproxy.backends.mode import Keeps, Owns, Sight, Trace, keeps_nothing
from kubeproxy.errors import ApplyError, Unsupported
from kubeproxy.kernel import ipvs, route
from kubeproxy.kernel.ipset import Ipsets
from kubeproxy.kernel.netlink.protocol import NetlinkError
from kubeproxy.model.addresses import Family, family_of
from kubeproxy.model.answer import Packet

__all__ = ["cleanup", "decision", "traces"]

log = logging.getLogger("kubeproxy.ipvs")

_SETS: Final = frozenset(set_id.named(family) for set_id in IpsetId for family in Family)


def cleanup(keeps: Keeps = keeps_nothing) -> list[str]:  # noqa: ARG001 - no other mode has these chains
    """Remove all objects of ipvs mode; return the failures."""
    failures: list[str] = []
    for step in (_remove_servers, _remove_interface, _remove_rules, _remove_sets):
        try:
            failures += step()
        except ApplyError as error:
            failures.append(str(error))
    return failures


def traces(sight: Sight, owns: Owns) -> list[Trace]:
    """Return the interface and the chains in the kernel; virtual servers are removed with the interface."""
    interface = [Trace(f"interface {INTERFACE}", None, _catches)] if route.link_index(INTERFACE) is not None else []
    chains = (c for c in sight.xtables if c.name in IPVS_CHAINS and not owns(c.table, c.name))
    return [*interface, *chain_traces(chains)]


def _catches(packet: Packet, forwarded: bool) -> bool:
    return not forwarded and packet.destination in route.link_addresses(INTERFACE, family_of(packet.destination))


def _remove_servers() -> list[str]:
    if route.link_index(INTERFACE) is None:
        return []
    try:
        kernel = ipvs.Ipvs.open()
    except Unsupported:
        return []
    bound = {address for family in Family for address in route.link_addresses(INTERFACE, family)}
    ports = _node_ports()
    with kernel:
        ours = [server for server in kernel.servers() if server.key[:-3] in bound or server.key[-3:] in ports]
        kernel.apply([ipvs.ServerChange(ipvs.Verb.DELETE_SERVICE, server) for server in ours])
    if ours:
        log.info("Removed virtual servers count=%d", len(ours))
    return []


def _node_ports() -> set[bytes]:
    found: set[bytes] = set()
    with Ipsets.open() as sets:
        there = _names(sets)
        for family in Family:
            for protocol, (set_id, _) in NODE_PORTS.items():
                name = set_id.named(family)
                if name in there:
                    found |= {ipvs.server_key(b"", protocol, entry.port) for entry in sets.entries(name)}
    return found


def _remove_interface() -> list[str]:
    if route.delete_link(INTERFACE):
        log.info("Removed the interface name=%s", INTERFACE)
    return []


def _remove_rules() -> list[str]:
    there: Collection[str] = _SETS
    with Ipsets.open() as sets, suppress(NetlinkError):  # `_remove_sets` reports the error
        there = _SETS & _names(sets)
    return remove_iptables_rules(lambda _commands, _table, chain: chain not in IPVS_CHAINS, there)


def _remove_sets() -> list[str]:
    failures = []
    with Ipsets.open() as sets:
        for name in sorted(_SETS & _names(sets)):
            try:
                sets.destroy(name)
            except NetlinkError as error:
                failures.append(str(error))
    return failures


def _names(sets: Ipsets) -> set[str]:
    try:
        return set(sets.counts())
    except NetlinkError as error:
        if error.code == errno.EINVAL:  # a kernel without ip_set has no sets (nfnetlink_rcv_msg)
            return set()
        raise
