"""Opens one split of a job's prepared data as what it holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType

from phalanx.config.corpora import PAIR
from phalanx.config.data import Data
from phalanx.data.conversations import ConversationData
from phalanx.data.index import read_index
from phalanx.data.loader import ShardData, TokenData
from phalanx.data.megatron import MegatronData
from phalanx.data.mixture import MixedData
from phalanx.data.preferences import PreferenceData

NONE: Mapping[Path, Collection[int]] = MappingProxyType({})


def open_split(
    folder: Path, split: str, seq_len: int, data: Data, damaged: Mapping[Path, Collection[int]] = NONE
) -> ShardData:
    """Returns the samples of one split of a job's prepared folder; `damaged` are those of each folder of shards that
    are not read. Raises DataError as their class does."""
    index = read_index(folder)
    found: list[ShardData] = []
    for each in index.folders(folder):
        own = read_index(each)
        if own.row_size:
            kind = PreferenceData if own.row_size == PAIR else ConversationData
            found.append(kind(each, split, seq_len, data))
        else:
            text = MegatronData if own.elsewhere else TokenData
            found.append(text(each, split, seq_len, document_mask=data.document_mask, damaged=damaged.get(each, ())))
    return MixedData(folder, split, seq_len, data.mix, found) if index.sources else found[0]
