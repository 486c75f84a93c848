"""The order of samples: a stateless, keyed permutation. Any position is computed alone, in constant time and memory, so
resuming needs one integer and no rank holds a list of indices.

The permutation is the generalised Feistel cipher of J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains"
(CT-RSA 2002), method 3, on pairs (left, right) of numbers below a = ceil(sqrt(n)); results in [n, a²) are enciphered
again until they fall below n (method 2, cycle walking). It is not cryptographically secure.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

ROUNDS = 8
"""Feistel rounds, each with a 64-bit key: together they use one blake2b digest."""


def order_key(seed: int, epoch: int) -> bytes:
    """Returns the 64-byte key of one epoch's order, hashed from (seed, "order", epoch)."""
    return hashlib.blake2b(f"{seed}/order/{epoch}".encode(), digest_size=8 * ROUNDS).digest()


def permute(index: np.ndarray, n: int, key: bytes) -> np.ndarray:
    """Returns the images of `index` (any shape) under the permutation of [0, n) chosen by `key` (64 bytes), in int64.

    Raises ValueError if an index lies outside [0, n).
    """
    index = np.asarray(index)
    if index.size and (index.min() < 0 or index.max() >= n):
        raise ValueError(f"an index to permute lies outside [0, {n}): {index.min()} .. {index.max()}")
    side = np.uint64(math.isqrt(max(n - 1, 0)) + 1)  # the least a with a² >= n
    keys = np.frombuffer(key, dtype="<u8")
    values = index.reshape(-1).astype(np.uint64)
    outside = np.arange(values.size)
    while outside.size:
        values[outside] = _encipher(values[outside], side, keys)
        outside = outside[values[outside] >= n]
    return values.astype(np.int64).reshape(index.shape)


def sample_ids(first: int, count: int, n: int, seed: int) -> np.ndarray:
    """Returns which of `n` samples the global sample numbers first .. first+count-1 stand for, as `samples_of`."""
    return samples_of(np.arange(first, first + count, dtype=np.int64), n, seed)


def samples_of(numbers: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Returns which of `n` samples global sample numbers stand for: (count,) int64.

    Global sample number g lies in epoch g // n; every epoch visits each of the n samples once, in its own order.
    """
    ids = np.empty(numbers.size, dtype=np.int64)
    epochs = numbers // n
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        ids[chosen] = permute(numbers[chosen] % n, n, order_key(seed, int(epoch)))
    return ids


def _encipher(values: np.ndarray, side: np.uint64, keys: np.ndarray) -> np.ndarray:
    left, right = values // side, values % side
    for key in keys:
        left, right = right, (left + _mix(right ^ key) % side) % side
    return left * side + right


def _mix(values: np.ndarray) -> np.ndarray:
    """Applies the finalizer of SplitMix64 (Steele, Lea, Flood 2014): every input bit affects every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
