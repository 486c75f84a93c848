"""The data of a job: a corpus, a tokenizer, and the folder of the token shards made from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from phalanx.config.constraints import Above, AtLeast, Below, Between

IGNORE = -100
"""A target that is not counted in the loss (torch's ignore_index)."""


@dataclass(frozen=True, repr=False)
class MixSource:
    """One source of data.mix."""

    path: str
    """What data.path takes."""
    weight: Annotated[float, Above(0)]
    """Its share of the samples, relative to the other sources' weights."""
    epochs: Annotated[float, AtLeast(0)] = 0.0
    """The most passes over it: a run that needs more is refused; 0: as many as it needs."""
    corpus: Literal["", "text", "chat", "preferences"] = ""
    """The kind of its content. Empty: that of data.corpus, or text if that is not set either."""
    columns: tuple[str, ...] = ()
    """Instead of data.columns."""
    ignore_keys: tuple[str, ...] = ()
    """Instead of data.ignore_keys."""

    def __repr__(self) -> str:
        rest = {name: value for name, value in vars(self).items() if value not in (0, "", ())}
        rest |= {name: f"[{', '.join(value)}]" for name, value in rest.items() if isinstance(value, tuple)}
        rest |= {name: f"{value:g}" for name, value in rest.items() if isinstance(value, float)}
        return f"{{{', '.join(f'{name}: {value}' for name, value in rest.items())}}}"


@dataclass(frozen=True)
class Data:
    """The data: a corpus and a tokenizer."""

    corpus: str = "stdlib"
    """stdlib (the text of this Python's own library, nothing to download), shakespeare_char, text (your own: set
    data.path), chat (your own conversations, for fine-tuning: set data.path), or random (tokens without text, for
    measuring)."""
    path: str = ""
    """A text or JSONL file, or a folder of them (corpora text and chat); a Megatron data set (corpus text): its .bin,
    .idx or the name without either; or a local copy of tiny Shakespeare."""
    mix: tuple[MixSource, ...] = ()
    """Instead of path: several sources, drawn by weight, of text or of what corpora chat and preferences read. Each has
    a path, a weight (its share of the samples, relative to the others') and epochs (the most passes over it; a run that
    needs more is refused; 0: as many as it needs), and may have a corpus (text among conversations), columns and
    ignore_keys of its own."""
    text_field: str = "text"
    """The field of each record (JSON, or a column of CSV, TSV, Parquet, Arrow) that holds the text of corpus text."""
    columns: tuple[str, ...] = ()
    """Names of columns of corpora chat and preferences by the names here: [question:prompt,answer:completion]."""
    ignore_keys: tuple[str, ...] = ()
    """Fields of rows of corpora chat and preferences that are left out on purpose, those of messages as messages.NAME;
    others that no reader knows are errors."""
    tokenizer: str = "char"
    """char, byte, bpe (trained on the corpus), or the path of a tokenizer.json, tekken.json, tokenizer.model or
    *.tiktoken."""
    bpe_vocab: Annotated[int, AtLeast(1)] = 4096
    """Vocabulary size to train for tokenizer bpe."""
    document_mask: bool = False
    """A token attends only to tokens of its own document: those since the last separator, which is the tokenizer's
    end-of-text token or, where it has none (char, byte), a newline, so that every line is a document."""
    template: str = "tokenizer"
    """How corpus chat makes a text of a conversation: tokenizer (by the chat template that comes with data.tokenizer),
    chatml, llama3, alpaca, raw (contents alone), or the path of a Jinja file."""
    template_date: str = ""
    """The day that a template's strftime_now writes, such as 2026-01-31; empty: the one that is recorded beside the
    tokenizer, or 2024-07-26."""
    loss_on: Literal["answers", "all"] = "answers"
    """Tokens of corpus chat that count in the loss: those of the answers, or all."""
    packing: bool = False
    """Put several conversations of corpus chat into one sample, each whole and attending only to itself (needs
    document_mask). Otherwise a sample is one conversation and padding."""
    too_long: Literal["truncate", "drop"] = "truncate"
    """What to do about a conversation of corpus chat that is longer than model.seq_len: keep its beginning, or leave it
    out."""
    val_fraction: Annotated[float, AtLeast(0), Below(1)] = 0.1
    """Share of the corpus, or of each source of a mixture, from its end, kept for validation."""
    limit_mb: Annotated[float, AtLeast(0), Below(1e12)] = 0.0
    """Use only this many megabytes of the text of the corpus, or of each source of a mixture; 0 means all."""
    dir: str = "data"
    """Folder of the prepared token shards."""
    random_tokens: Annotated[int, AtLeast(1)] = 1_000_000
    """Corpus random: number of tokens."""
    random_vocab: Annotated[int, Between(1, 2**24)] = 256
    """Corpus random: vocabulary size."""
    workers: Annotated[int, AtLeast(0)] = 0
    """Processes that tokenize in `phalanx data prepare`; 0: one per core."""
    prefetch: Annotated[int, AtLeast(0)] = 4
    """Steps whose batches are read ahead in the background."""
    on_corruption: Literal["stop", "skip"] = "stop"
    """What to do about a block of a token shard that does not match its digest: stop when it is read, or check all
    blocks at the start and read other samples instead of the damaged ones, the same ones in any layout."""
    skip_quota: Annotated[int, AtLeast(0)] = 100
    """Samples of a split that on_corruption=skip may replace; more stop the run."""
