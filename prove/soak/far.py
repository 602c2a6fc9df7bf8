"""The endpoints of a soak: answers a request to any address of its namespace with this address and the request.

As a program it enters the network namespace of the process with the given id.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys

from bench.companion import say
from bench.worker import die_with_parent
from prove.soak.cluster import PORT
from prove.soak.joining import join_network_of

_IP_PKTINFO = 8  # linux/in.h
_BACKLOG = 4096


async def _talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    address = socket.inet_aton(writer.get_extra_info("sockname")[0])
    try:
        while asked := await reader.read(64):
            writer.write(address + asked)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


def _answer(datagrams: socket.socket) -> None:
    """Answer from the request's destination address, because the kernel would select another one."""
    asked, ancillary, _, peer = datagrams.recvmsg(64, 64)
    for _, _, info in ancillary:
        address = info[8:12]
        # struct in_pktinfo: no interface, and the source in ipi_spec_dst.
        source = [(socket.IPPROTO_IP, _IP_PKTINFO, struct.pack("=I4s4s", 0, address, address))]
        datagrams.sendmsg([address + asked], source, 0, peer)


async def _serve() -> None:
    server = await asyncio.start_server(_talk, "0.0.0.0", PORT, backlog=_BACKLOG)
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
    datagrams.bind(("", PORT))
    datagrams.setblocking(False)
    asyncio.get_running_loop().add_reader(datagrams, _answer, datagrams)
    say(pid=os.getpid())
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    die_with_parent()
    join_network_of(int(sys.argv[1]))
    asyncio.run(_serve())
