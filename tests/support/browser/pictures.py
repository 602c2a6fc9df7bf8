"""Makes the pictures in docs/pictures: .venv/bin/python -m support.browser.pictures [FOLDER]

They show a simulated busy cluster. For the typeface of the pictures in the repository install the Debian packages
fonts-inter and fonts-jetbrains-mono.
"""

from __future__ import annotations

import asyncio
import io
import sys
import time
from pathlib import Path

from PIL import Image

from support.browser.driver import Browser
from support.browser.mock import MockProxy
from support.browser.scene import Scene, finding

FOLDER = Path(__file__).parents[3] / "docs" / "pictures"
MOST = 80_000
"""Maximum number of bytes of a picture, because README is also read over slow connections."""
WARMING = 75.0
"""Seconds of traffic before the first picture: sparklines show a minute."""
FINDINGS = [
    finding(
        "broken",
        "net.ipv4.ip_forward is 0",
        "connections of pods and from outside are translated, and then not forwarded to endpoints: they time out",
        "sysctl -w net.ipv4.ip_forward=1, and remove it from the file in /etc/sysctl.d that sets it to 0",
    ),
    finding(
        "note",
        "table inet guard may drop packets too: forward at forward",
        "a firewall is no mistake, but if a connection hangs, a rule of the firewall may be the cause",
        "`kube-proxy trace SRC DST:PORT` shows which rule drops a connection",
    ),
]


def smallest(png: bytes) -> bytes:
    """Return a picture with at most 256 colours, and so few that it has at most MOST bytes."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    for colours in (256, 128, 64, 32):
        made = io.BytesIO()
        picture.quantize(colours, dither=Image.Dither.NONE).save(made, "PNG", optimize=True)
        if made.tell() <= MOST:
            break
    return made.getvalue()


def _shown(scene: Scene) -> str:
    """Return the Service of the picture: a load balancer with policy Local, and one endpoint that is not ready."""
    name = next(
        name for name, row in scene.rows.items() if row[4] == "LoadBalancer" and "L" in row[5] and 7 <= row[3] < 10
    )
    scene.rows[name][2] = scene.rows[name][3] - 1
    scene.busy.insert(0, name)
    scene.still.add(name)
    return name


async def make(folder: Path) -> None:
    """Write all pictures."""
    scene = Scene(10_000, time.time())
    name = _shown(scene)
    async with MockProxy(scene) as proxy, Browser() as browser:
        proxy.problems = {"at": time.time() + WARMING, "looking": False, "findings": FINDINGS, "objects": []}
        await browser.resize(1200, 720)
        await browser.prefer("light")
        await browser.open(f"{proxy.url}#/services?s=rate")
        play = asyncio.create_task(proxy.play())
        await asyncio.sleep(WARMING)
        wanted = (
            ("services", "#/services?s=rate", "light"),
            ("service", f"#/service/{name}", "light"),
            ("problems", "#/", "dark"),
            ("now", "#/now", "dark"),
        )
        for file, where, scheme in wanted:
            await browser.prefer(scheme)
            await browser.run("location.hash = arguments[0]; document.activeElement.blur()", where)
            await asyncio.sleep(2)
            picture = smallest(await browser.picture())
            (folder / f"page-{file}.png").write_bytes(picture)
            print(f"{folder / f'page-{file}.png'}: {len(picture):,} bytes")
        play.cancel()


if __name__ == "__main__":
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    given.mkdir(parents=True, exist_ok=True)
    asyncio.run(make(given))
