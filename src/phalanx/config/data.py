"""The data of a job: a corpus, a tokenizer, and the folder of the token shards made from them."""

from __future__ import annotations

from dataclasses import dataclass

IGNORE = -100
"""A target that counts for nothing (torch's ignore_index)."""


@dataclass(frozen=True)
class Data:
    """The data: a corpus and a tokenizer."""

    corpus: str = "stdlib"
    """stdlib (the text of this Python's own library, nothing to download), shakespeare_char, text (your own: set
    data.path), or random (tokens without text, for measuring)."""
    path: str = ""
    """A text or JSONL file, or a folder of them (corpus text); or a local copy of tiny Shakespeare."""
    text_field: str = "text"
    """The field of each JSON line that holds the text."""
    tokenizer: str = "char"
    """char, byte, bpe (trained on the corpus), or the path of a tokenizer.json."""
    bpe_vocab: int = 4096
    """Vocabulary size to train for tokenizer bpe."""
    document_mask: bool = False
    """A token attends only to tokens of its own document: those since the last separator, which is the tokenizer's
    end-of-text token or, where it has none (char, byte), a newline, so that every line is a document."""
    val_fraction: float = 0.1
    """Share of the corpus, taken from its end, used for validation."""
    limit_mb: float = 0.0
    """Use only this many megabytes of the corpus's text; 0 means all."""
    dir: str = "data"
    """Folder of prepared token shards."""
    random_tokens: int = 1_000_000
    """Corpus random: number of tokens."""
    random_vocab: int = 256
    """Corpus random: vocabulary size."""
    workers: int = 0
    """Processes that tokenize in `phalanx data prepare`; 0 means one per core."""
    prefetch: int = 4
    """Steps whose batches are prefetched in the background."""
