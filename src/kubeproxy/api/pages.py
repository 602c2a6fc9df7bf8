"""Lists of the API server that are read once, a page at a time, for people. What is watched is listed in watch.py."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Final, Protocol, TypeVar
from urllib.parse import urlencode

import msgspec
from msgspec import Struct

from kubeproxy.api.client import ApiClient
from kubeproxy.api.connection import LIST
from kubeproxy.api.status import MalformedAnswer

_PAGE: Final = 500
"""Objects a page."""


class ListMeta(Struct):
    """What a list says of itself: where the next page begins."""

    continue_: str | None = msgspec.field(default=None, name="continue")


class ItemList(Protocol):
    """A kind of list, with its items as whoever asks wants them."""

    metadata: ListMeta


P = TypeVar("P", bound=ItemList)


async def pages(client: ApiClient, path: str, query: Mapping[str, str], kind: type[P]) -> AsyncIterator[P]:
    """Yield the pages of a list. Raises SourceError."""
    following: str | None = ""
    while following is not None:
        asked = {**query, "limit": str(_PAGE)} | ({"continue": following} if following else {})
        response = await client.http.request("GET", f"{path}?{urlencode(asked)}", most=LIST)
        try:
            page = msgspec.json.decode(response.body, type=kind)
        except msgspec.MsgspecError as error:
            raise MalformedAnswer(f"the answer to GET {path} cannot be read: {error}") from error
        yield page
        following = page.metadata.continue_ or None
