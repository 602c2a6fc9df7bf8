"""The kernel as commands look at it: by the mode of the proxy that they ask, and without a way to write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager

from kubeproxy.ask.facts import Facts
from kubeproxy.backends.examination import Examiner
from kubeproxy.model.addresses import Family
from kubeproxy.setup import modes


@contextmanager
def examiners(facts: Facts, families: Iterable[Family]) -> Iterator[list[Examiner]]:
    """Open the kernel, for these families, of the proxy of which these facts hold. Raises KubeProxyError."""
    examine = modes.named(facts.mode).operations().examine
    config = facts.configuration()
    with ExitStack() as opened:
        yield [opened.enter_context(closing(each)) for each in examine(config, facts.world, list(families))]
