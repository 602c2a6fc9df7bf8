"""The page for screen readers, keyboards and many tabs, and its recovery after a restart of the proxy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from support.browser.driver import DESKTOP, PHONE, Browser
from support.browser.mock import MockProxy
from support.browser.scene import Json

Make = Callable[[int], Awaitable[MockProxy]]
LIVE = "return document.querySelector('#link').className === 'live'"
SCROLLS = """
return [...document.querySelectorAll('body *')].filter(e => e.checkVisibility() && e.scrollHeight > e.clientHeight + 2
  && /auto|scroll/.test(getComputedStyle(e).overflowY) && e.tabIndex < 0 && !e.querySelector('a, button, input, select')
  ).map(e => e.id || e.className)
"""
"""A script that returns the ids of elements that scroll, and that no key can reach."""

IN_THE_GRID = """
const grid = document.querySelector('[role=grid]');
const role = (e) => e.getAttribute('role');
const owned = (e) => [...e.children].filter(c => c.checkVisibility())
  .flatMap(c => role(c) === 'presentation' && !c.hasAttribute('tabindex') ? owned(c) : [role(c)]);
return [...new Set(owned(grid))].sort();
"""


async def _opened(page: Browser, mock: MockProxy, where: str = "#/") -> None:
    await page.open(mock.url + where)
    await page.until(LIVE)


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
async def test_the_list_of_services_is_a_grid_of_rows_that_keys_can_scroll(
    page: Browser, proxy: Make, size: tuple[int, int]
) -> None:
    await page.resize(*size)
    await _opened(page, await proxy(200), "#/services")
    await page.shows("#sum", "200 Services")
    assert set(await page.run(IN_THE_GRID)) <= {"row", "rowgroup"}
    assert await page.run(SCROLLS) == []
    await page.press("/")
    await page.type("zzz")
    await page.shows("#none", "No Service fits.")
    assert set(await page.run(IN_THE_GRID)) <= {"row", "rowgroup"}


async def test_the_problems_of_a_service_are_a_list(page: Browser, proxy: Make) -> None:
    mock = await proxy(10)
    name = min(mock.scene.rows)
    detail: Json = mock.scene.detail(name)
    mock.details[name] = detail | {"state": "refused", "reason": "no room", "problems": ["spec.x: is odd"]}
    await _opened(page, mock, f"#/service/{name}")
    await page.shows(".problem", "no room")
    stray = "return [...document.querySelectorAll('li')].filter(e => !e.closest('ul, ol')).length"
    assert await page.run(stray) == 0


async def test_each_view_has_a_title_of_its_own(page: Browser, proxy: Make) -> None:
    mock = await proxy(10)
    for row in mock.scene.rows.values():
        row[2] = row[3]
    name = min(mock.scene.rows)
    await _opened(page, mock)
    titles = {"#/": "Problems", "#/services": "Services", "#/now": "Now", f"#/service/{name}": name}
    for where, title in titles.items():
        await page.run("location.hash = arguments[0]", where)
        await page.until("return document.title === arguments[0]", f"node-a · {title} · kube-proxy")


async def test_a_service_without_endpoints_has_no_dot_of_one_that_works(page: Browser, proxy: Make) -> None:
    mock = await proxy(2)
    empty, full = sorted(mock.scene.rows)
    for name, ends in ((empty, 0), (full, 3)):
        mock.scene.rows[name][1:5] = "programmed", ends, ends, "ClusterIP"
    await _opened(page, mock, "#/services")
    await page.shows("#sum", "2 Services")
    dot = """
    const r = [...document.querySelectorAll('.row')]
      .find(e => !e.hidden && e.querySelector('.name').innerText === arguments[0]);
    return [getComputedStyle(r.querySelector('.dot')).backgroundColor, r.firstChild.getAttribute('aria-label')]
    """
    (none, said), (some, _) = [await page.run(dot, name) for name in (empty, full)]
    assert none != some
    assert said == "programmed, no endpoint is available"
    await page.run("location.hash = arguments[0]", f"#/service/{empty}")
    await page.shows(".chip", "programmed")
    assert await page.run("return getComputedStyle(document.querySelector('.chip .dot')).backgroundColor") == none


async def test_a_proxy_that_is_back_is_found_within_two_seconds(page: Browser, proxy: Make) -> None:
    mock = await proxy(5)
    await _opened(page, mock)
    await page.run("""
    const real = window.setTimeout;
    window.waits = [];
    window.setTimeout = (work, wait, ...more) => {
      if (wait > 100) window.waits.push(wait);
      return real(work, Math.min(wait, 20), ...more);
    };
    """)
    await mock.stop()
    waits = await page.until("return window.waits.length >= 12 && window.waits")
    assert waits[0] <= 1000
    assert max(waits) <= 2000
    await mock.start()
    await page.until(LIVE)


async def test_a_silent_proxy_is_queried_again(page: Browser, proxy: Make) -> None:
    mock = await proxy(5)
    mock.mute = True
    await page.open(mock.url)
    later = "const real = Date.now; Date.now = () => real() + arguments[0] * 1000"
    await page.until("return document.querySelector('#link-text').innerText === 'connecting'")
    await page.run(later, 10)
    await page.shows("#lost", "The connection to the proxy")
    mock.mute = False
    await page.until(LIVE)
    await page.run(later, 12)  # a live region announces something each second
    await page.shows("#lost", "The connection to the proxy")
    await page.until(LIVE)
