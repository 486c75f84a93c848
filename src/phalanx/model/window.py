"""The keys that a query sees: earlier ones of its document, within its window (Mistral 7B, Jiang et al. 2023, section
2)."""

from __future__ import annotations

from torch import Tensor

from phalanx.model.documents import Documents


def visible(queries: Tensor, keys: Tensor, window: int = 0, documents: Documents | None = None) -> Tensor:
    """Returns which keys queries see, both given by position (one dimension each): their own and those before, at most
    the last `window` (0: all), within their own document where `documents` are given. Boolean, (queries, keys), or with
    documents (batch, 1, queries, keys)."""
    seen = queries[:, None] >= keys
    if window:
        seen &= (queries - window)[:, None] < keys
    if documents is None:
        return seen
    numbers = documents.numbers
    return ((numbers[:, queries, None] == numbers[:, None, keys]) & seen).unsqueeze(1)
