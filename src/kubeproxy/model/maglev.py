"""Maglev: which endpoint each slot of a table leads to, and which slot a client has. Pure, and the same on every node.

Source: Eisenbud and others, "Maglev: A Fast and Reliable Software Network Load Balancer" (NSDI 2016), section 3.4; for
the client's slot the kernel's nft_jhash_eval (net/netfilter/nft_hash.c) and jhash (include/linux/jhash.h).
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import Final

from kubeproxy.model.plan import Hashing, HashKey, Pool, Weights

SEED: Final = 0x6B75_6265
"""What the kernel begins its hash with: the same on every node, and in every version, or clients would move."""

SIZES: Final = (251, 1021, 4093)
"""Sizes of tables, primes: every way through a table meets with each of its slots."""

DEFAULT_SIZE: Final = 1021

_WORD: Final = 0xFFFF_FFFF
_BEGIN: Final = 0xDEAD_BEEF  # JHASH_INITVAL
_MIX: Final = ((0, 2, 4, 1), (1, 0, 6, 2), (2, 1, 8, 0), (0, 2, 16, 1), (1, 0, 19, 2), (2, 1, 4, 0))
_FINAL: Final = ((2, 1, 14), (0, 2, 11), (1, 0, 25), (2, 1, 16), (0, 2, 4), (1, 0, 14), (2, 1, 24))


def fill(pool: Pool, weights: Weights, size: int) -> Pool:
    """Return the destination of each slot. `weights` are as in plan.Balance, `size` is a prime.

    In turns each destination takes the next free slot on its own way through the table; with weights it misses turns.
    What comes of it depends on the destinations alone, not on the order in which anybody learnt of them.
    """
    if not pool:
        return ()
    members = sorted(zip(pool, weights or (1,) * len(pool), strict=True))
    heaviest = max(weight for _, weight in members)
    ways = [_way(destination, size) for destination, _ in members]
    at, skips = [offset for offset, _ in ways], [skip for _, skip in ways]
    destinations, turns = [d for d, _ in members], [weight for _, weight in members]
    every = range(len(members))
    due = [0] * len(members)
    table: list[bytes] = [b""] * size
    left = size
    while True:
        for n in every:
            due[n] += turns[n]
            if due[n] < heaviest:
                continue
            due[n] -= heaviest
            slot, skip = at[n], skips[n]
            while table[slot]:
                slot += skip
                if slot >= size:
                    slot -= size
            table[slot] = destinations[n]
            at[n] = slot
            left -= 1
            if not left:
                return tuple(table)


@lru_cache(maxsize=1 << 14)
def _way(destination: bytes, size: int) -> tuple[int, int]:
    """Return where a destination's way through a table begins, and how far it goes at a time."""
    digest = blake2b(destination, digest_size=16).digest()
    return int.from_bytes(digest[:8], "big") % size, int.from_bytes(digest[8:], "big") % (size - 1) + 1


def slot_of(hashing: Hashing, source: bytes, port: int) -> int | None:
    """Return the slot of a client (packed address, and port, 0 if unknown), None where that takes a port to say."""
    if hashing.key is HashKey.CLIENT:
        return _scaled(jhash(source, SEED), hashing.size)
    return _scaled(jhash(source + port.to_bytes(2, "big") + b"\0\0", SEED), hashing.size) if port else None


def _scaled(number: int, size: int) -> int:
    return number * size >> 32  # reciprocal_scale


def jhash(key: bytes, seed: int) -> int:
    """Return the kernel's hash of whole words of 4 bytes, on a machine that is little-endian."""
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
