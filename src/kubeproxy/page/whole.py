"""Joins the parts of the page; loaded at the first request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kubeproxy.ask.desk import Desk
from kubeproxy.engine.observer import Audience
from kubeproxy.model.plan import ServiceName
from kubeproxy.page.asking import FormQuestions
from kubeproxy.page.beside import Beside
from kubeproxy.page.feed import Feed
from kubeproxy.page.news import News
from kubeproxy.page.pages import facts, page_pages
from kubeproxy.page.rows import Row, Rows
from kubeproxy.server.http import Handler


class Whole:
    """The page of one proxy. `watched` sets the observer of changes, None for none."""

    def __init__(
        self,
        desk: Desk,
        watched: Callable[[Audience | None], None],
    ) -> None:
        snapshot, options = desk.snapshot, desk.snapshot.options
        rows = Rows(snapshot)
        news = News(snapshot, rows)

        def row(name: ServiceName) -> Row | None:
            return rows.one(name, news.seen(name))

        def beside(tell: Callable[[str, Any], None]) -> Beside:
            return Beside(snapshot, tell)

        self._feed = Feed(news, lambda: facts(desk), watched, beside)
        self.handlers: Mapping[str, Handler] = page_pages(
            options.page, desk, self._feed, row, FormQuestions(options.control_socket).why
        )

    async def close(self) -> None:
        """End the tasks for pages, and wait for their end."""
        await self._feed.close()
