"""Fast forwarding: the kernel forwards long connections of Services between interfaces without evaluating rules. A rule
adds a connection to a flowtable (nf_flowtable) after a number of packets. This module keeps the flowtable's list of
interfaces up to date. See docs/beyond.md "Fast forwarding"."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from socket import IPPROTO_TCP, IPPROTO_UDP
from typing import Final

from kubeproxy.backends.nftables.layout import TABLE
from kubeproxy.errors import ApplyError
from kubeproxy.features import FAST_FORWARDING, Forwarding
from kubeproxy.kernel.netlink.announcements import Announcements
from kubeproxy.kernel.nftables import compiling, messages, nfnetlink
from kubeproxy.kernel.nftables.messages import MOST_DEVICES, flowtable_message
from kubeproxy.kernel.nftables.tables import ChainContents, Definition, Hook
from kubeproxy.kernel.proc import modules
from kubeproxy.model.addresses import PROTOCOL_NAMES, Family
from kubeproxy.model.world import Settings

log = logging.getLogger("kubeproxy.nftables")

FLOWTABLE: Final = "fast"
CHAIN: Final = "fast-forward"

FORGETS_FORWARDED: Final = (6, 4)
"""First Linux version that can remove connection tracking entries that are in a flowtable (commit 9b7c68b3911a). On
older kernels UDP flows to a deleted endpoint could not be removed."""

_PROBE: Final = f"{TABLE}-probe"


def rules(forwarding: Forwarding) -> dict[str, tuple[str, ...]]:
    """Return the chain that adds a connection to the flowtable."""
    names = [PROTOCOL_NAMES[protocol].lower() for protocol in forwarding.protocols]
    return {CHAIN: tuple(f"meta l4proto {name} flow add @{FLOWTABLE}" for name in names)}


def jump(forwarding: Forwarding) -> str:
    """Return the rule that adds a connection of a Service to the flowtable after enough packets."""
    return f"ct status dnat ct original packets >= {forwarding.after} jump {CHAIN}"


def within(settings: Settings) -> Settings:
    """Return the settings without features that this kernel lacks; log each removed feature."""
    wanted = FAST_FORWARDING.value(settings)
    if not wanted.protocols:
        return settings
    try:
        _probe()
    except ApplyError as error:
        log.warning(
            "Connections are not fast forwarded: this kernel has no flowtables (CONFIG_NFT_FLOW_OFFLOAD) error=%r",
            str(error),
        )
        return FAST_FORWARDING.on(settings, Forwarding())
    if modules.kernel_version(modules.release()) < FORGETS_FORWARDED and IPPROTO_UDP in wanted.protocols:
        log.warning(
            "Only TCP is fast forwarded: before Linux %d.%d the kernel cannot remove UDP flows of a deleted endpoint",
            *FORGETS_FORWARDED,
        )
        return FAST_FORWARDING.on(settings, Forwarding(wanted.after, (IPPROTO_TCP,)))
    return settings


def _probe() -> None:
    """Create and remove a table with a flowtable. Raises NetlinkError if the kernel refuses the flowtable."""
    place = Family.IPV4, _PROBE
    rule = compiling.rule(f"meta l4proto tcp flow add @{FLOWTABLE}", "ip")
    probe = Definition((), {"probe": ChainContents(Hook("filter", 2, 0), (rule,))}, flowtables=(FLOWTABLE,))
    with closing(nfnetlink.Transactions.open()) as transactions:
        made = [messages.table_message(*place), *messages.objects(*place, probe)]
        transactions.commit([*made, *messages.rules(*place, probe.chains)])
        transactions.commit([messages.table_removal(*place)])


class Devices:
    """The interfaces of one family's flowtable."""

    def __init__(self, family: Family, monitor: Announcements, listed: Callable[[], Mapping[int, str]]) -> None:
        self._family = family
        self._monitor = monitor
        self._listed = listed
        self._known: dict[int, str] = {}
        self._look = True

    def close(self) -> None:
        """Close the sockets."""
        self._monitor.close()

    def forget(self) -> None:
        """Clear the record of added interfaces, so that all interfaces are added again, which is harmless."""
        self._known = {}
        self._look = True

    def upkeep(self, commit: Callable[[list[bytes]], None]) -> None:
        """Add new interfaces to the flowtable; the kernel removes deleted interfaces and their connections. Raises
        ApplyError if interfaces cannot be listed; an interface that was deleted in the meantime is skipped."""
        if self._monitor.changed():
            self._look = True
        if not self._look:
            return
        there = self._listed()
        self._known = {index: name for index, name in self._known.items() if there.get(index) == name}
        fresh = {index: name for index, name in there.items() if index not in self._known}
        self._look = False
        for some in _parts(fresh):
            self._known |= self._added(some, commit)

    def _added(self, fresh: Mapping[int, str], commit: Callable[[list[bytes]], None]) -> Mapping[int, str]:
        try:
            commit([flowtable_message(self._family, TABLE, FLOWTABLE, list(fresh.values()))])
        except ApplyError as error:
            if len(fresh) > 1:  # an interface may have been deleted in the meantime: add each interface alone
                each = [self._added({index: name}, commit) for index, name in fresh.items()]
                return {index: name for part in each for index, name in part.items()}
            self._look = True  # either the interface no longer exists, or the next attempt adds it
            log.debug("Cannot fast forward from an interface name=%s error=%r", *fresh.values(), str(error))
            return {}
        return fresh


def _parts(fresh: Mapping[int, str]) -> Iterator[Mapping[int, str]]:
    items = list(fresh.items())
    for start in range(0, len(items), MOST_DEVICES):
        yield dict(items[start : start + MOST_DEVICES])
