"""Number of slots of each endpoint by its weight: the fewest that keep each share within 2 % of its weight. Pure."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from math import gcd
from typing import Final

from kubeproxy.backends.nftables.layout import BELOW, CLASSES, class_of, tries

SLOTS: Final = CLASSES[-1]
"""Maximum number of slots of a pool."""

STICKY_SLOTS: Final = 512
"""Slots of a pool with session affinity, unless it has more endpoints. Each slot needs a rule."""

ERROR: Final = 0.019
"""Largest relative error of a share: a little below the documented 2 %."""


@lru_cache(maxsize=256)
def slot_counts(weights: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return the number of slots of each endpoint, for weights above 0: in all at most `most`, or one an endpoint.

    If `most` slots are too few for shares within ERROR, it returns the best approximation.
    """
    counts = Counter(weights)
    kinds = tuple(sorted(counts))
    chosen = dict(zip(kinds, _chosen(kinds, tuple([counts[kind] for kind in kinds]), most), strict=True))
    return tuple([chosen[weight] for weight in weights])


@lru_cache(maxsize=256)
def _chosen(kinds: tuple[int, ...], counts: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return the number of slots for each weight (smallest first); `counts` has the number of endpoints of each."""
    smallest, best, least = kinds[0], (1,) * len(kinds), float("inf")
    # smallest / gcd slots for the smallest weight need no rounding. With up to four times as many slots, the total
    # comes close to the size of its class, so few picks hit an empty slot.
    for few in range(1, 4 * smallest // gcd(*kinds) + 1):
        slots = tuple([max(1, (2 * kind * few + smallest) // (2 * smallest)) for kind in kinds])
        total = sum([n * count for n, count in zip(slots, counts, strict=True)])
        if total > most:
            break
        error = _error(kinds, counts, slots, total)
        if error < least:
            best, least = slots, error
        if error <= ERROR:
            break
    if least == float("inf"):
        total = sum([kind * count for kind, count in zip(kinds, counts, strict=True)])
        best = tuple([max(1, kind * most // total) for kind in kinds])
    return best


def _error(kinds: tuple[int, ...], counts: tuple[int, ...], slots: tuple[int, ...], total: int) -> float:
    """Return the largest relative error of a share.

    A pick that misses in every try falls to the slots of the class below, which get more than their share by it.
    """
    size = class_of(total)
    missed = (1 - total / size) ** tries(size)
    more = missed * (total / BELOW[size] - 1) if missed else 0
    whole = sum([kind * count for kind, count in zip(kinds, counts, strict=True)])
    ratios = [n * whole / (total * kind) for n, kind in zip(slots, kinds, strict=True)]
    return max(1 - min(ratios) * (1 - missed), max(ratios) * (1 + more) - 1)
