"""Lists of the API server that are read once, a page at a time, for people. What is watched is listed in watch.py."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Final, Generic, TypeVar
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


T = TypeVar("T")


class ItemList(Struct, Generic[T]):
    """A list, with its items as whoever asks wants them."""

    metadata: ListMeta
    items: list[T] | None = None


async def items(client: ApiClient, path: str, query: Mapping[str, str], kind: type[T]) -> AsyncIterator[T]:
    """Yield the items of a list, which is read a page at a time. Raises SourceError."""
    following: str | None = ""
    while following is not None:
        asked = {"limit": str(_PAGE), **query} | ({"continue": following} if following else {})
        response = await client.http.request("GET", f"{path}?{urlencode(asked)}", most=LIST)
        try:
            page = msgspec.json.decode(response.body, type=ItemList[kind])  # type: ignore[valid-type]
        except msgspec.MsgspecError as error:
            raise MalformedAnswer(f"the answer to GET {path} cannot be read: {error}") from error
        for item in page.items or ():
            yield item
        following = page.metadata.continue_ or None
