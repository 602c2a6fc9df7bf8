"""Read access of commands to the kernel, in the mode of the running proxy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager

from kubeproxy.ask.facts import Facts
from kubeproxy.backends.state import Examiner
from kubeproxy.model.addresses import Family
from kubeproxy.setup import modes


@contextmanager
def examiners(facts: Facts, families: Iterable[Family]) -> Iterator[list[Examiner]]:
    """Open the examiners of these families, for the mode in a proxy's facts. Raises KubeProxyError."""
    examine = modes.named(facts.mode).operations().examine
    config = facts.configuration()
    with ExitStack() as opened:
        yield [opened.enter_context(closing(each)) for each in examine(config, facts.world, list(families))]
