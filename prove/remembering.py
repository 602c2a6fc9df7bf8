"""What judges would ask nft or parse again and again: the rules of our table, which few histories ever change."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from kubeproxy.backends.examination import Examiner
from kubeproxy.backends.nftables.examine import NftablesExaminer
from kubeproxy.backends.nftables.ruleset import Ruleset
from kubeproxy.backends.nftables.view import Skeleton, expected
from kubeproxy.kernel import nfnetlink
from kubeproxy.model.addresses import Family
from kubeproxy.model.plan import Globals


def remember(examiners: Iterable[Examiner]) -> None:
    """Have examiners take what they found out about the same rules before."""
    nfnetlink._expressions = _expressions
    for one in examiners:
        if isinstance(one, NftablesExaminer):
            one._expect = _expected


_expressions = functools.lru_cache(maxsize=8192)(nfnetlink._expressions)


def _expected(ruleset: Ruleset, world: Globals, chains: Iterable[str]) -> Skeleton:
    return _skeleton(ruleset.family, world, frozenset(chains))


@functools.lru_cache(maxsize=256)
def _skeleton(family: Family, world: Globals, chains: frozenset[str]) -> Skeleton:
    return expected(Ruleset(family, world), world, chains)
