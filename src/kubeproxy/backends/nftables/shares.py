"""How many slots endpoints get for their weights: as few as keep each share within 2 % of what was asked for. Pure."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from math import gcd
from typing import Final

from kubeproxy.backends.nftables.layout import BELOW, CLASSES, class_of, tries

SLOTS: Final = CLASSES[-1]
"""Slots that there are for a pool."""

STICKY_SLOTS: Final = 512
"""Slots of a pool with session affinity, unless it has more endpoints: each is a rule that looks for the client."""

ERROR: Final = 0.019
"""How far a share may be from what was asked for, as a part of it; a little below what is promised."""


@lru_cache(maxsize=256)
def slot_counts(weights: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return the number of slots of each endpoint, for weights above 0; all together `most`, unless there are more.

    Where that is too few for shares as exact as they should be, they are as exact as they can be.
    """
    counts = Counter(weights)
    kinds = tuple(sorted(counts))
    chosen = dict(zip(kinds, _chosen(kinds, tuple([counts[kind] for kind in kinds]), most), strict=True))
    return tuple([chosen[weight] for weight in weights])


@lru_cache(maxsize=256)
def _chosen(kinds: tuple[int, ...], counts: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Return the number of slots for each weight (smallest first), of which there are so many endpoints."""
    smallest, best, least = kinds[0], (1,) * len(kinds), float("inf")
    # With `smallest` slots for the smallest weight, over what divides all, nothing is rounded; four times as many come
    # to a place in a class where hardly any pick misses.
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
    """Return how far a share is from what was asked for at most, as a part of it.

    Picks that miss all the time fall to the first slots, those of the class below: they get more by it, others less.
    """
    size = class_of(total)
    missed = (1 - total / size) ** tries(size)
    more = missed * (total / BELOW[size] - 1) if missed else 0
    whole = sum([kind * count for kind, count in zip(kinds, counts, strict=True)])
    ratios = [n * whole / (total * kind) for n, kind in zip(slots, kinds, strict=True)]
    return max(1 - min(ratios) * (1 - missed), max(ratios) * (1 + more) - 1)
