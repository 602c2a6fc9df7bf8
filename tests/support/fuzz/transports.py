"""A transport without a peer: it records that it was closed, and discards written bytes. Passes bytes to a protocol."""

from __future__ import annotations

import asyncio
from typing import Any

from kubeproxy.server.connection import ServerConnection


class Deaf(asyncio.Transport):
    """A transport that accepts all bytes immediately; `written` counts them."""

    def __init__(self, **extra: Any) -> None:
        super().__init__(extra)
        self.written = 0
        self._closing = False

    def write(self, data: Any) -> None:
        self.written += len(data)

    def write_eof(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True

    def abort(self) -> None:
        self._closing = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def deliver(protocol: asyncio.Protocol | ServerConnection, transport: Deaf, data: bytes, step: int) -> None:
    """Pass bytes to a protocol until it closes the transport: 64 pieces of `step` bytes, and then the rest."""
    pieces = [data[at : at + step] for at in range(0, min(len(data), 64 * step), step)] + [data[64 * step :]]
    for piece in filter(None, pieces):
        if transport.is_closing():
            break
        protocol.data_received(piece)
