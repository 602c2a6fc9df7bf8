"""Notices that the configuration file has changed, whatever way it was changed.

A Kubernetes ConfigMap volume changes by swapping a symlink above the file, which a watch of the file itself never
sees (the Go kube-proxy misses it). So the file is looked at once a second, through all symlinks, and read when
anything about it is different; that costs a few microseconds and works on every file system.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from msgspec import Struct

from kubeproxy.config.load import log_lenient, read_text
from kubeproxy.config.types import KubeProxyConfiguration
from kubeproxy.config.write import differences
from kubeproxy.errors import ConfigError

logger = logging.getLogger("kubeproxy.config")

Resolve = Callable[[KubeProxyConfiguration], KubeProxyConfiguration]
_Look = tuple[int, int, int, int] | None


class NewConfiguration(Struct, frozen=True):
    """A valid configuration that differs from the running one, and how: lines "path: old -> new"."""

    config: KubeProxyConfiguration
    difference: list[str]


async def watch(
    path: str | Path,
    running: KubeProxyConfiguration,
    resolve: Resolve = lambda config: config,
    interval: float = 1.0,
    invalid: Callable[[bool], None] = lambda _: None,
) -> AsyncIterator[NewConfiguration]:
    """Yield each valid configuration that the file holds, when it is another one than that yielded (or running) before.

    resolve puts the flags that outrank the file over what it says (Options.resolve). A file that cannot be read or
    is invalid is logged once, with every mistake, and changes nothing; invalid is told at each change whether it is.
    A new look of the file must last for one interval (seconds) before it is read, so that a file being written is not
    read half.
    """
    file = Path(path)
    seen: _Look = None
    previous = _look(file)
    rejected: str | None = None
    first = True
    while True:
        current = _look(file)
        if current != seen and current == previous:
            seen = current
            try:
                config, strict = read_text(_content(file))
                config = resolve(config)
            except (OSError, UnicodeDecodeError, ConfigError) as error:
                invalid(True)
                if str(error) != rejected:
                    logger.error("The changed configuration file %s is not used: %s", file, error)
                rejected = str(error)
            else:
                rejected = None
                invalid(False)
                difference = differences(running, config)
                if not first:  # the start has logged that of the first look
                    log_lenient(strict)
                if difference:
                    running = config
                    yield NewConfiguration(config, difference)
            first = False
        previous = current
        await asyncio.sleep(interval)


def _content(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def _look(file: Path) -> _Look:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
