"""Random streams by hashing: every use of randomness has its own seed, so no result depends on the order of draws."""

from __future__ import annotations

from hashlib import blake2b


def derive_seed(seed: int, role: str, *key: str | int) -> int:
    """Returns the 64-bit seed of one stream, from the run's seed, the stream's role ("init", "dropout", ...) and the
    `key` that distinguishes its uses (parameter name, site, step, sample)."""
    text = "/".join(map(str, (seed, role, *key)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
