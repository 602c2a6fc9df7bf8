"""The kernel as commands look at it: by the mode of the proxy that they ask, and without a way to write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import msgspec

from kubeproxy import modes
from kubeproxy.backends.examination import Examiner
from kubeproxy.config.load import load_text
from kubeproxy.control.wire import Facts
from kubeproxy.errors import Unsupported


@contextmanager
def examiners(facts: Facts) -> Iterator[list[Examiner]]:
    """Open the kernel for the proxy of which these facts hold. Raises KubeProxyError."""
    examine = modes.named(facts.mode).operations().examine
    if examine is None:
        raise Unsupported(f"mode: what the kernel has cannot be compared in {facts.mode} mode yet")
    config = load_text(msgspec.json.encode(facts.config).decode())
    with ExitStack() as opened:
        yield [opened.enter_context(closing(examine(config, facts.world, family))) for family in facts.world.families]
