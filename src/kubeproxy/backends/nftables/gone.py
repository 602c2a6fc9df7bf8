"""The set of gone endpoints: a client that still sends to such an endpoint through a Service gets an immediate reset.
The set's elements time out in the kernel, so comparisons of elements ignore this set. This module tracks the set's
content, to remove an address before a new endpoint uses it. See docs/beyond.md "Resets"."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final

from kubeproxy.backends.nftables.layout import TABLE, Layout, service_key
from kubeproxy.kernel.nftables.elements import Element, element_messages, plain_element, timed_element
from kubeproxy.kernel.nftables.nfnetlink import DELETE_ELEMENT, NEW_ELEMENT
from kubeproxy.kernel.nftables.tables import TIMEOUT, SetSpec
from kubeproxy.model.addresses import Family, destination_text
from kubeproxy.model.gone import MOST, SECONDS, Departed

log = logging.getLogger("kubeproxy.nftables")

GONE: Final = "gone-endpoints"

_NAMED: Final = 3


def declaration(layout: Layout) -> SetSpec:
    """Return the declaration of the set."""
    key = (f"{layout.ip} daddr", "meta l4proto", "th dport")
    return SetSpec(GONE, key, flags=TIMEOUT, timeout=SECONDS * 1000)


def rules(layout: Layout) -> dict[str, tuple[str, ...]]:
    """Return the chains that look up a connection's endpoint in the set and reset the connection. The chains run before
    address translation, so the source of the reset is the Service's address, also on a bridge, where the kernel does
    not translate the reset. There is a rule for each protocol, because nft accepts a port of connection tracking only
    after the protocol."""
    endpoint = f"ct reply {layout.ip} saddr . meta l4proto . ct reply proto-src @{GONE}"
    return {
        "gone-endpoints-check": tuple(
            f"meta l4proto {protocol} {endpoint} goto reset-gone" for protocol in ("tcp", "udp", "sctp")
        ),
        "reset-gone": ("meta l4proto tcp reject with tcp reset", "reject"),
    }


CHECK: Final = "ct direction original ct status dnat jump gone-endpoints-check"
"""Rule of the base chains: only packets from clients of Services reach the lookup."""


class GoneEndpoints:
    """Found and desired content of one family's set. All times are seconds of one clock; keys are as in Departed."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._ports: dict[bytes, dict[bytes, float]] = {}
        """The keys of each address with their expiry times. Addresses are sorted by the latest expiry of their keys."""
        self._new: set[bytes] = set()  # keys in _ports that are not written yet
        self._taken: set[bytes] = set()  # keys to remove

    def note(self, departed: Departed, now: float) -> bool:
        """Record endpoints that are deleted or used again; return whether the set must change."""
        while self._ports and max(next(iter(self._ports.values())).values()) <= now:
            self._new.difference_update(self._ports.pop(next(iter(self._ports))))
        for key in departed.gone:
            if len(key) - 3 == self._family.address_size:
                self._ports[key[:-3]] = self._ports.pop(key[:-3], {}) | {key: now + SECONDS}
                self._new.add(key)
                self._taken.discard(key)
        for address in self._ports.keys() & departed.taken:
            self._let_go(address)
        while len(self._ports) > MOST:
            self._let_go(next(iter(self._ports)))
        return bool(self._new or self._taken)

    def found(self, elements: Iterable[Element], in_use: Callable[[bytes], bool], now: float) -> None:
        """Replace the recorded content with the set's content in the kernel, for example after a restart; keep elements
        that are not written yet."""
        there = {endpoint_key(element.key): now + element.expires / 1000 for element in elements}
        wanted = {key: until for keys in self._ports.values() for key, until in keys.items() if until > now} | there
        self._ports, self._new, self._taken = {}, wanted.keys() - there.keys(), set()
        for key, until in sorted(wanted.items(), key=lambda item: item[1]):
            self._ports[key[:-3]] = self._ports.pop(key[:-3], {}) | {key: until}
        for address in [address for address in self._ports if in_use(address)]:
            self._let_go(address)

    def _let_go(self, address: bytes) -> None:
        keys = self._ports.pop(address).keys()
        self._taken |= keys - self._new
        self._new -= keys

    def spare(self, commit: Callable[[list[bytes]], None]) -> None:
        """Remove reused addresses from the set; call this before a Service uses these addresses. An element may expire
        at any moment, and before Linux 6.3 the kernel refuses to remove a missing element. Therefore each element is
        added first, which has no effect on an existing element."""
        if keys := [service_key(key) for key in self._taken]:
            added = [timed_element(key, 0, SECONDS * 1000) for key in keys]
            removed = map(plain_element, keys)
            commit([*self._messages(NEW_ELEMENT, added), *self._messages(DELETE_ELEMENT, removed)])
            self._taken.clear()

    def reset(self, now: float, commit: Callable[[list[bytes]], None]) -> None:
        """Add deleted endpoints to the set, and log these endpoints."""
        left = [(key, int((self._ports[key[:-3]][key] - now) * 1000)) for key in sorted(self._new)]
        if not (added := [timed_element(service_key(key), 0, ms) for key, ms in left if ms > 0]):
            return
        commit(self._messages(NEW_ELEMENT, added))
        named = ", ".join(destination_text(key[:-3] + key[-2:]) for key, _ in left[:_NAMED])
        more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
        log.info("Connections to deleted endpoints are reset family=%s endpoints=%s%s", self._family.label, named, more)
        self._new.clear()

    def _messages(self, kind: int, elements: Iterable[bytes]) -> list[bytes]:
        return element_messages(kind, self._family, TABLE, GONE, list(elements))


def endpoint_key(element: bytes) -> bytes:
    """Return packed address, protocol and port from an element's key: the inverse of layout.service_key."""
    return element[:-8] + element[-8:-7] + element[-4:-2]
