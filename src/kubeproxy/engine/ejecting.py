"""Connects from this node to the suspects that the kernel reports; ejects failing endpoints, and ends ejections.
The ejector also removes the unanswered connections to failing endpoints from connection tracking, so that a client's
next SYN reaches another endpoint. See model/ejection.py and docs/failover.md."""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import socket
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from typing import Final

from kubeproxy.engine.engine import Engine
from kubeproxy.engine.pacing import TokenBucket, to_its_end
from kubeproxy.errors import ApplyError
from kubeproxy.kernel.conntrack.unanswered import Unanswered
from kubeproxy.kernel.netlink.protocol import errno_text
from kubeproxy.model.addresses import Family, family_of, unpack

log = logging.getLogger("kubeproxy.ejection")

PERIOD: Final = 0.1  # seconds between two readings of the kernel's suspects
IDLE: Final = 1.0  # seconds between two checks whether a Service ejects endpoints
CONFIRMING: Final = (0.1, 0.1, 0.1)
"""Seconds to wait after each attempt to connect to a suspect. A suspect fails if no attempt has succeeded by the end of
the last pause. There are several attempts, because packets may be lost."""
RETURNING: Final = (0.5, 0.5)  # the pauses for an ejected endpoint: longer, so that a slow endpoint can return
REMOVALS: Final = 1.0
"""Seconds between removals of connections to the same endpoints: the kernel reads its whole table for a removal. If
more than half of a pool fails, its endpoints are not ejected; removals are then repeated, because a client's next SYN
may reach an endpoint that answers."""
AT_ONCE: Final = 128  # maximum number of simultaneous attempts
RATE: Final = 50  # attempts per second after the first AT_ONCE, in random order, so that many suspects cost little

REFUSALS: Final = frozenset({errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.EHOSTDOWN})
"""Errors of an attempt that show a failing endpoint. Other errors, such as a lack of ports, are errors of this node."""
_UNCONNECTED: Final = frozenset({b"\2", b"\7"})  # TCP_SYN_SENT, TCP_CLOSE
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
        self._budget = TokenBucket(RATE, AT_ONCE)
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
        now = time.monotonic()
        self._read()
        stuck = {key for key in self._suspects & self._ejections.failures.keys() if self._is_committed(key)}
        if stuck and (now >= self._removes_at or stuck - self._removed):
            self._removed, self._removes_at = stuck, now + REMOVALS
            try:
                await to_its_end(unanswered.remove, stuck)
            except ApplyError as error:
                log.debug("Cannot remove connections to failing endpoints error=%r", str(error))
        for key in self._ejections.due(random.sample(list(self._suspects), len(self._suspects)), now):
            if key not in self._trying and len(self._trying) < AT_ONCE and self._budget.take():
                self._trying.add(key)
                attempts.create_task(self._try(key))

    def _read(self) -> None:
        """Read the suspects on this thread: the kernel bounds their number, and no other program's lock delays it."""
        try:
            self._suspects = {key for read in self._readers for key in read()}
        except ApplyError as error:
            self._suspects = set()
            log.debug("Cannot read the suspects error=%r", str(error))

    def _is_committed(self, key: bytes) -> bool:
        planner, queued = self._engine.planner, self._engine.queued
        return not any(planner.is_dirty(name) or name in queued for name in self._ejections.services(key))

    async def _try(self, key: bytes) -> None:
        """Connect to an endpoint, and record the result. If a suspect has answered a client in the meantime, it has not
        failed."""
        now = time.monotonic()  # the pause before the next attempt begins here, not at the end of this attempt
        reason = await attempt(key, RETURNING if key in self._ejections.failures else CONFIRMING)
        self._trying.discard(key)
        if reason and key not in self._ejections.failures:
            self._read()
            reason = reason if key in self._suspects else ""
        if reason:
            changed = self._ejections.failed(key, reason, now, time.time())
        else:
            changed = self._ejections.answered(key, now)
        if changed:
            self._engine.plan_again(changed)


async def attempt(key: bytes, pauses: Sequence[float]) -> str:
    """Connect to an endpoint, once before each pause; return the reason of a failure, or '' if the endpoint did not
    fail. A UDP endpoint gets an empty datagram, and fails only if an ICMP error arrives, because it need not answer.
    After the last pause the states of the sockets in the kernel decide, because the event loop may be late."""
    address, is_udp = key[:-3], key[-3] == socket.IPPROTO_UDP
    family, loop, made = family_of(address), asyncio.get_running_loop(), list[socket.socket]()
    with ExitStack() as stack:
        try:
            for pause in (sum(pauses),) if is_udp else pauses:
                made.append(socket.socket(family, socket.SOCK_DGRAM if is_udp else socket.SOCK_STREAM))
                stack.enter_context(made[-1]).setblocking(False)
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await loop.sock_connect(made[-1], (unpack(address), int.from_bytes(key[-2:], "big")))
                        if is_udp:
                            made[-1].setsockopt(*_RECEIVE_ERRORS[family], 1)
                            made[-1].send(b"")
                            await loop.sock_recv(made[-1], 1)
                        return ""
        except OSError as error:
            return errno_text(error.errno or 0).lower() if error.errno in REFUSALS else ""
        states = [one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1) for one in made if not is_udp]
        return f"no answer within {sum(pauses):.1f} s" if states and _UNCONNECTED.issuperset(states) else ""
