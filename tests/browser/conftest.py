"""One browser for all tests, and a page for each test whose console must stay empty."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from support.browser.driver import DESKTOP, Browser
from support.browser.mock import MockProxy
from support.browser.scene import Scene


@pytest.fixture(scope="session")
def browser(loop: Any) -> Iterator[Browser]:
    """The browser; it starts in a second or two."""
    made = Browser()
    loop.run(made.__aenter__())
    yield made
    loop.run(made.close())


@pytest.fixture
def page(browser: Browser, loop: Any) -> Iterator[Browser]:
    """The browser in its initial state, with a desktop's width; at the end the console must be empty."""
    loop.run(browser.resize(*DESKTOP))
    loop.run(browser.prefer())
    yield browser
    found = loop.run(browser.complaints(expected=_lost))
    loop.run(browser.open("about:blank"))
    assert not found


def _lost(text: str) -> bool:
    """Return whether a message only reports that the proxy did not answer, or refused, which tests cause."""
    return "Failed to load resource: " in text and (
        "net::ERR_" in text or "the server responded with a status of" in text
    )


@pytest.fixture
def proxy(loop: Any) -> Iterator[Callable[[int], Awaitable[MockProxy]]]:
    """Creates fake proxies with this number of Services."""
    made: list[MockProxy] = []

    async def make(count: int) -> MockProxy:
        mock = MockProxy(Scene(count, time.time()))
        await mock.start()
        made.append(mock)
        return mock

    yield make
    for mock in made:
        loop.run(mock.stop())
