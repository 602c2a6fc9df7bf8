"""A browser for tests: controls chromium through a part of its driver's protocol (W3C WebDriver).

One process each of driver and browser; both end with the context manager, by their pids. Errors in the page's console,
and violations of its Content-Security-Policy, are collected: `complaints()`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import aiohttp

ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",  # chromium's sandbox does not work for root
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--no-first-run",
    "--no-proxy-server",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
DESKTOP, PHONE = (1280, 800), (360, 740)
TIMEOUT = 20.0
"""Seconds to wait for a change of the page on a busy machine; usually it takes some 10 ms."""
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's name for a reference to an element
KEYS = {
    "Enter": "\ue007",
    "Escape": "\ue00c",
    "ArrowDown": "\ue015",
    "ArrowUp": "\ue013",
    "PageDown": "\ue00f",
    "End": "\ue010",
    "Home": "\ue011",
    "Tab": "\ue004",
}


class BrowserError(Exception):
    """The driver refused a command, or the page did not reach the expected state."""


class Browser:
    """An async context manager around one tab."""

    def __init__(self, chromium: str = "", driver: str = "") -> None:
        self._chromium = chromium or shutil.which("chromium") or "chromium"
        self._driver = driver or shutil.which("chromedriver") or "chromedriver"
        self._process: asyncio.subprocess.Process | None = None
        self._http: aiohttp.ClientSession | None = None
        self._session = ""
        self._profile = Path()

    async def __aenter__(self) -> Self:
        self._profile = Path(tempfile.mkdtemp(prefix="page-browser-"))
        try:
            port = await self._start()
            self._http = aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=aiohttp.ClientTimeout(60))
            options = {"binary": self._chromium, "args": [*ARGUMENTS, f"--user-data-dir={self._profile}/profile"]}
            wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            made = await self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
            self._session = f"/session/{made['sessionId']}"
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _start(self) -> int:
        """Start the driver; return its port."""
        self._process = await asyncio.create_subprocess_exec(
            self._driver,
            "--port=0",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "HOME": str(self._profile), "XDG_CONFIG_HOME": str(self._profile)},
        )
        assert self._process.stdout is not None
        async with asyncio.timeout(TIMEOUT):
            async for line in self._process.stdout:
                if found := re.search(rb"successfully on port (\d+)", line):
                    return int(found[1])
        raise BrowserError("chromedriver ended before it said its port")

    async def close(self) -> None:
        """End browser and driver, and remove their files."""
        if self._session:
            with contextlib.suppress(BrowserError, aiohttp.ClientError, TimeoutError):
                await self._ask("DELETE", self._session)
        self._session = ""
        if self._http is not None:
            await self._http.close()
        if self._process is not None and self._process.returncode is None:
            # The driver has a separate session of processes, which includes the browser.
            os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    async def _ask(self, method: str, path: str, body: Any = None) -> Any:
        assert self._http is not None
        given = None if method != "POST" else json.dumps(body or {})
        async with self._http.request(method, path, data=given) as answer:
            value = (await answer.json(content_type=None))["value"]
        if isinstance(value, dict) and "error" in value:
            raise BrowserError(f"{value['error']}: {value['message']}")
        return value

    # actions of a user

    async def open(self, url: str) -> None:
        """Open an address, as in a new tab: stored data of the page is removed."""
        await self._ask("POST", f"{self._session}/url", {"url": "about:blank"})
        await self._ask("POST", f"{self._session}/url", {"url": url})

    async def press(self, *keys: str) -> None:
        """Press keys in order, given by name (Enter, ArrowDown) or character."""
        actions = []
        for key in keys:
            value = KEYS.get(key, key)
            actions += [{"type": "keyDown", "value": value}, {"type": "keyUp", "value": value}]
        source = {"type": "key", "id": "keyboard", "actions": actions}
        await self._ask("POST", f"{self._session}/actions", {"actions": [source]})

    async def type(self, text: str) -> None:
        """Type a text into the focused element."""
        await self.press(*text)

    async def click(self, selector: str) -> None:
        """Click the first element of a CSS selector, which must be visible."""
        element = await self._ask("POST", f"{self._session}/element", {"using": "css selector", "value": selector})
        await self._ask("POST", f"{self._session}/element/{element[_ELEMENT]}/click")

    async def resize(self, width: int, height: int) -> None:
        """Set the page's width and height in CSS pixels; the width of a phone works too."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.devtools("Emulation.setDeviceMetricsOverride", metrics)

    async def prefer(self, scheme: str = "light", motion: str = "no-preference") -> None:
        """Emulate the user's preferences: a light or dark page, and reduced motion."""
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": motion},
        ]
        await self.devtools("Emulation.setEmulatedMedia", {"features": features})

    async def devtools(self, command: str, arguments: Any) -> Any:
        """Send a command of the DevTools protocol."""
        return await self._ask("POST", f"{self._session}/goog/cdp/execute", {"cmd": command, "params": arguments})

    # visible content

    async def run(self, script: str, *arguments: Any) -> Any:
        """Run the body of a function in the page; return its result."""
        return await self._ask("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    async def text(self, selector: str = "body") -> str:
        """Return the visible text of the first element of a selector, '' if there is none."""
        found = await self.run("const e = document.querySelector(arguments[0]); return e ? e.innerText : ''", selector)
        return str(found)

    async def until(self, script: str, *arguments: Any, patience: float = TIMEOUT) -> Any:
        """Run a script until its result is true; return the result. Raises BrowserError with the page's text."""
        loop = asyncio.get_running_loop()
        end = loop.time() + patience
        while not (value := await self.run(script, *arguments)):
            if loop.time() > end:
                raise BrowserError(f"not within {patience:g} s: {script} {arguments}\n{(await self.text())[:3000]}")
            await asyncio.sleep(0.02)
        return value

    async def shows(self, selector: str, text: str, patience: float = TIMEOUT) -> None:
        """Wait until an element of a selector shows a text."""
        every = "[...document.querySelectorAll(arguments[0])]"
        script = f"return {every}.some(e => (e.innerText ?? e.textContent).includes(arguments[1]))"
        await self.until(script, selector, text, patience=patience)

    async def picture(self) -> bytes:
        """Return the visible part of the page as PNG."""
        return base64.b64decode(await self._ask("GET", f"{self._session}/screenshot"))

    async def complaints(self, expected: Callable[[str], bool] = lambda _: False) -> list[str]:
        """Return errors of the page and of its policy since the last call, without those that are `expected`."""
        entries = await self._ask("POST", f"{self._session}/se/log", {"type": "browser"})
        said = [entry["message"] for entry in entries if entry["level"] in {"SEVERE", "WARNING"}]
        return [text for text in said if not expected(text)]
