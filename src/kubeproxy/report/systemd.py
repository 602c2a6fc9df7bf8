"""Notifications to systemd: ready, status, watchdog, stopping (sd_notify(3), Type=notify).

Each is a datagram to the socket in NOTIFY_SOCKET; without the variable nothing is sent. Errors never fail the proxy.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, MutableMapping
from typing import Final

from kubeproxy.server.text import clean, printable

_log = logging.getLogger("kubeproxy.report")

STATUS_SECONDS: Final = 5.0


class Notifier:
    """Sends notifications. `address` is a socket's path, or its abstract name after an @; '' sends none.

    `watchdog` is the time in seconds after which systemd kills a service that sent no WATCHDOG=1, 0 for never.
    """

    def __init__(self, address: str = "", watchdog: float = 0.0) -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog = watchdog
        self._status = ""
        self._complained = False

    @classmethod
    def of_environment(cls, environment: MutableMapping[str, str]) -> Notifier:
        """Take the variables of systemd out of the environment, so that no child process uses them."""
        address = environment.pop("NOTIFY_SOCKET", "")
        microseconds, pid = environment.pop("WATCHDOG_USEC", ""), environment.pop("WATCHDOG_PID", "")
        ours = pid in {"", str(os.getpid())}
        seconds = int(microseconds) / 1e6 if ours and microseconds.isascii() and microseconds.isdigit() else 0.0
        return cls(address, seconds)

    def ready(self) -> None:
        """Report that the service has started, so that units ordered after it may start."""
        self._send("READY=1")

    def stopping(self) -> None:
        """Report that the service ends."""
        self._send("STOPPING=1\nSTATUS=Stopping; the rules stay in the kernel")

    async def run(self, healthy: Callable[[], bool], status: Callable[[], str]) -> None:
        """Send changes of the status, and WATCHDOG=1 while `healthy` is true, until cancelled.

        This coroutine shows that the event loop runs. systemd expects WATCHDOG=1 at half of its timeout.
        """
        if not self._address:
            return
        pause = min(STATUS_SECONDS, self._watchdog / 2) if self._watchdog else STATUS_SECONDS
        while True:
            lines = ["WATCHDOG=1"] if self._watchdog and healthy() else []
            text = printable(clean(" ".join(status().split())))
            if text != self._status:
                self._status = text
                lines.append(f"STATUS={text}")
            if lines:
                self._send("\n".join(lines))
            await asyncio.sleep(pause)

    def _send(self, message: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.setblocking(False)
                sock.sendto(message.encode(errors="replace"), self._address)
        except OSError as error:
            if not self._complained:
                self._complained = True
                _log.warning("Cannot notify systemd error=%r", str(error))
