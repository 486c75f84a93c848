"""Corpus random: tokens without a text, from a generator with a fixed seed."""

from __future__ import annotations

import numpy as np

from phalanx.config.data import Data
from phalanx.data.index import SPLITS
from phalanx.data.shards import TOKEN_SHARD_TOKENS


def random_tokens(data: Data, split: str, start: int, size: int) -> np.ndarray:
    """Returns the tokens of a shard of corpus random, which begins at `start`: (size,) int64."""
    generator = np.random.Generator(np.random.Philox(key=[SPLITS.index(split), start // TOKEN_SHARD_TOKENS]))
    return generator.integers(0, data.random_vocab, size)
