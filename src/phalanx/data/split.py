"""Opens one split of a job's prepared data as what it holds."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from phalanx.config.corpora import PAIR
from phalanx.config.data import Data
from phalanx.data.conversations import ConversationData
from phalanx.data.loader import ShardData, TokenData
from phalanx.data.preferences import PreferenceData
from phalanx.data.shards import read_index


def open_split(folder: Path, split: str, seq_len: int, data: Data, damaged: Collection[int] = ()) -> ShardData:
    """Returns the samples of one split of a job's prepared folder. Raises DataError as their class does."""
    row_size = read_index(folder).row_size
    if row_size:
        kind = PreferenceData if row_size == PAIR else ConversationData
        return kind(folder, split, seq_len, data)
    return TokenData(folder, split, seq_len, document_mask=data.document_mask, damaged=damaged)
