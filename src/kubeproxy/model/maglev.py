"""Maglev hashing: computes the endpoint of each slot of a Maglev table, and the slot of each client. Pure; the results
are the same on every node. Source: Eisenbud and others, "Maglev: A Fast and Reliable Software Network Load Balancer"
(NSDI 2016), section 3.4; for the client's slot the kernel's nft_jhash_eval (net/netfilter/nft_hash.c) and jhash
(include/linux/jhash.h)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from heapq import heapify, heapreplace
from typing import Final

from kubeproxy.model.plan import Hashing, HashKey, Pool, Weights

SEED: Final = 0x6B75_6265
"""The seed of the kernel's hash, the same on all nodes and in all releases, because another seed would move clients."""

SIZES: Final = (251, 1021, 4093)
"""The sizes of Maglev tables, which are primes, so that a permutation with any stride contains all slots."""

DEFAULT_SIZE: Final = 1021

_WORD: Final = 0xFFFF_FFFF
_BEGIN: Final = 0xDEAD_BEEF  # JHASH_INITVAL
_MIX: Final = ((0, 2, 4, 1), (1, 0, 6, 2), (2, 1, 8, 0), (0, 2, 16, 1), (1, 0, 19, 2), (2, 1, 4, 0))
_FINAL: Final = ((2, 1, 14), (0, 2, 11), (1, 0, 25), (2, 1, 16), (0, 2, 4), (1, 0, 14), (2, 1, 24))


def fill(pool: Pool, weights: Weights, size: int) -> Pool:
    """Return the destination of each slot of a Maglev table. `weights` are as in plan.Balance; `size` is a prime.
    Destinations take turns; in its turn a destination gets the next free slot of its permutation. A smaller weight
    means fewer turns. The table depends on the set of destinations, not on their order."""
    if not pool:
        return ()
    members = sorted(zip(pool, weights or (1,) * len(pool), strict=True))
    destinations = [d for d, _ in members]
    at, skips = [-1] * len(members), [0] * len(members)
    table: list[bytes] = [b""] * size
    left = size
    for n in _turns([weight for _, weight in members]):
        slot = at[n]
        if slot < 0:  # permutations are computed on demand: with more destinations than slots, some get no turn
            slot, skips[n] = _permutation(destinations[n], size)
        skip = skips[n]
        while table[slot]:
            slot += skip
            if slot >= size:
                slot -= size
        table[slot] = destinations[n]
        at[n] = slot
        left -= 1
        if not left:
            break
    return tuple(table)


_SPARSE: Final = 4
"""A heap computes the turns if a round has fewer turns than the number of destinations divided by this factor."""


def _turns(weights: Sequence[int]) -> Iterator[int]:
    """Yield the index of each turn's destination. In each round a destination adds its weight to its sum, and gets a
    turn when the sum reaches the largest weight."""
    count, heaviest = len(weights), max(weights)
    if sum(weights) * _SPARSE < heaviest * count:
        yield from _sparse_turns(weights, heaviest)
    due, every = [0] * count, range(count)
    while True:
        for n in every:
            due[n] += weights[n]
            if due[n] >= heaviest:
                due[n] -= heaviest
                yield n


def _sparse_turns(weights: Sequence[int], heaviest: int) -> Iterator[int]:
    """Yield the same indexes as `_turns`, faster if a round has few turns (many small weights, one large weight)."""
    count, turns = len(weights), [1] * len(weights)
    # Each number combines the round of a destination's next turn and the destination's index.
    upcoming = [-(-heaviest // weight) * count + n for n, weight in enumerate(weights)]
    heapify(upcoming)
    while True:
        n = upcoming[0] % count
        yield n
        turns[n] += 1
        heapreplace(upcoming, -(-turns[n] * heaviest // weights[n]) * count + n)


@lru_cache(maxsize=1 << 14)
def _permutation(destination: bytes, size: int) -> tuple[int, int]:
    digest = blake2b(destination, digest_size=16).digest()
    return int.from_bytes(digest[:8], "big") % size, int.from_bytes(digest[8:], "big") % (size - 1) + 1


def slot_of(hashing: Hashing, source: bytes, port: int) -> int | None:
    """Return the slot of a client's packed address and port. None if the slot depends on the port, but the port is 0
    (unknown)."""
    if hashing.key is HashKey.CLIENT:
        return _scaled(jhash(source, SEED), hashing.size)
    return _scaled(jhash(source + port.to_bytes(2, "big") + b"\0\0", SEED), hashing.size) if port else None


def _scaled(number: int, size: int) -> int:
    return number * size >> 32  # reciprocal_scale


def jhash(key: bytes, seed: int) -> int:
    """Return the kernel's jhash of a key of whole 4-byte words, as on a little-endian machine."""
    words = [int.from_bytes(key[i : i + 4], "little") for i in range(0, len(key), 4)]
    state = [(_BEGIN + len(key) + seed) & _WORD] * 3
    while len(words) > 3:
        state = [(value + word) & _WORD for value, word in zip(state, words, strict=False)]
        del words[:3]
        for one, other, by, third in _MIX:
            state[one] = ((state[one] - state[other]) & _WORD) ^ _rotated(state[other], by)
            state[other] = (state[other] + state[third]) & _WORD
    for index, word in enumerate(words):
        state[index] = (state[index] + word) & _WORD
    for one, other, by in _FINAL:
        state[one] = ((state[one] ^ state[other]) - _rotated(state[other], by)) & _WORD
    return state[2]


def _rotated(word: int, by: int) -> int:
    return ((word << by) | (word >> (32 - by))) & _WORD
