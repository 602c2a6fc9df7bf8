"""Confirms the suspects that the kernel reports, by a connection from this node; ejects endpoints, and ends ejections.
It also removes the unanswered connections to failing endpoints from connection tracking, so that a client's next SYN
reaches another endpoint. See model/ejection.py and docs/failover.md.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Callable, Collection, Sequence
from typing import Final

from kubeproxy.engine.engine import Engine
from kubeproxy.engine.pacing import to_its_end
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.conntrack.unanswered import Unanswered
from kubeproxy.kernel.netlink.protocol import errno_text
from kubeproxy.model.addresses import Family, family_of, unpack

log = logging.getLogger("kubeproxy.ejection")

PERIOD: Final = 0.2  # seconds between two readings of the kernel's suspects
IDLE: Final = 1.0  # seconds between two checks whether a Service ejects endpoints
TIMEOUT: Final = 0.5  # seconds: an endpoint that does not accept a connection in this time fails
REMOVALS: Final = 1.0
"""Seconds between removals of connections to the same endpoints: the kernel reads its whole table for a removal. If
more than half of the endpoints fail, none is ejected, and a client's next SYN may reach an endpoint that answers.
"""
AT_ONCE: Final = 64  # maximum number of attempts at the same time

REFUSALS: Final = frozenset({errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.EHOSTDOWN})
"""Errors of an attempt that show a failing endpoint. All others, such as a lack of ports, are errors of this node."""

_RECEIVE_ERRORS: Final = {Family.IPV4: (socket.IPPROTO_IP, 11), Family.IPV6: (socket.IPPROTO_IPV6, 25)}
"""The options IP_RECVERR and IPV6_RECVERR, with which a UDP socket gets every ICMP error."""


class Ejector:
    """Ejects endpoints while a Service requests it. `readers` return the suspects of each family."""

    def __init__(self, engine: Engine, readers: Sequence[Callable[[], Collection[bytes]]]) -> None:
        self._engine = engine
        self._ejections = engine.planner.ejections
        self._readers = readers
        self._suspects: set[bytes] = set()
        self._trying: set[bytes] = set()
        self._removed: set[bytes] = set()
        self._removes_at = 0.0

    async def run(self) -> None:
        """Eject endpoints until cancelled."""
        with Unanswered() as unanswered:
            async with asyncio.TaskGroup() as attempts:
                while True:
                    await asyncio.sleep(PERIOD if self._ejections.in_use else IDLE)
                    if self._ejections.in_use and self._readers:
                        await self._look(unanswered, attempts)

    async def _look(self, unanswered: Unanswered, attempts: asyncio.TaskGroup) -> None:
        """Read the suspects once; begin attempts, and remove unanswered connections to endpoints that fail."""
        now = time.monotonic()
        try:
            self._suspects = await to_its_end(self._read)
            stuck = {key for key in self._suspects & self._ejections.failures.keys() if self._is_committed(key)}
            if stuck and (now >= self._removes_at or stuck - self._removed):
                self._removed, self._removes_at = stuck, now + REMOVALS
                await to_its_end(unanswered.remove, stuck)
        except ApplyError as error:
            log.debug("Cannot look for failing endpoints error=%r", str(error))
        for key in self._ejections.due(self._suspects, now):
            if key not in self._trying and len(self._trying) < AT_ONCE:
                self._trying.add(key)
                attempts.create_task(self._try(key))

    def _read(self) -> set[bytes]:
        return {key for read in self._readers for key in read()}

    def _is_committed(self, key: bytes) -> bool:
        """Return whether the kernel has the plans that follow from an endpoint's failure."""
        planner, queued = self._engine.planner, self._engine.queued
        return not any(planner.is_dirty(name) or name in queued for name in self._ejections.services(key))

    async def _try(self, key: bytes) -> None:
        """Connect to an endpoint, and record the result. A suspect that answered a client in the meantime is none."""
        reason = await attempt(key)
        self._trying.discard(key)
        now, is_failing = time.monotonic(), key in self._ejections.failures
        if reason and (is_failing or key in self._suspects):
            changed = self._ejections.failed(key, reason, now, time.time())
        else:
            changed = self._ejections.answered(key, now)
        if changed:
            self._engine.plan_again(changed)


async def attempt(key: bytes) -> str:
    """Connect to an endpoint; return the reason if it fails, '' otherwise.

    A UDP endpoint gets an empty datagram, and fails only if an ICMP error arrives: it need not answer.
    """
    address, is_udp = key[:-3], key[-3] == socket.IPPROTO_UDP
    family = family_of(address)
    loop = asyncio.get_running_loop()
    try:
        with socket.socket(family, socket.SOCK_DGRAM if is_udp else socket.SOCK_STREAM) as made:
            made.setblocking(False)
            async with asyncio.timeout(TIMEOUT):
                await loop.sock_connect(made, (unpack(address), int.from_bytes(key[-2:], "big")))
                if is_udp:
                    made.setsockopt(*_RECEIVE_ERRORS[family], 1)
                    made.send(b"")
                    await loop.sock_recv(made, 1)
    except TimeoutError:
        return "" if is_udp else f"no answer within {TIMEOUT} s"
    except OSError as error:
        return errno_text(error.errno or 0).lower() if error.errno in REFUSALS else ""
    return ""
