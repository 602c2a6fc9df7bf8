"""The scripted server of support.scripted leaves no connection or task behind, whenever it ends."""

import asyncio
import gc
import socket
import warnings

import pytest

from support.scripted import Server


@pytest.mark.parametrize("turns", range(6))
def test_connections_that_it_has_just_accepted_are_closed(turns):
    async def script(request, reply):
        await reply.forever()

    async def use():
        async with Server(script) as server:
            links = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]
            for _ in range(turns):
                await asyncio.sleep(0)
        return links

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        links = asyncio.run(use())
        gc.collect()
    for link in links:
        link.close()
    assert [str(one.message) for one in seen] == []
