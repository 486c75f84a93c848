"""What is scored: a corpus or a split of it, as tokens of a run's tokenizer, with its bytes; and in which job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from phalanx.check.job import problems_of
from phalanx.checkpoint.manifest import Manifest, job_of
from phalanx.config.corpora import CORPORA, has_pairs, has_prompts
from phalanx.config.job import IGNORE, Checkpoint, Data, GuardOptions, Job, Optimizer, Train
from phalanx.config.layout import Layout
from phalanx.data import corpus
from phalanx.data.corpus import Segment
from phalanx.data.formats import pair_of
from phalanx.data.index import DTYPES
from phalanx.data.loader import MicroBatch, ShardData, TokenData
from phalanx.data.megatron import open_megatron
from phalanx.data.mixture import open_split
from phalanx.data.prepare import encode_segments, prepare, segments_of
from phalanx.data.settings import prepared_path, source_settings
from phalanx.data.tokenizer import Tokenizer, require_in_vocabulary
from phalanx.errors import DataError, JobError


@dataclass(frozen=True)
class ContextWindow:
    """One window: it reads `length` tokens from `start` on and scores the last `scored` of its predictions."""

    start: int
    length: int
    scored: int


def windows(tokens: int, context: int, stride: int, given: int = 1) -> Iterator[ContextWindow]:
    """Yields the windows over a text of so many tokens, 1 ≤ stride ≤ context. The first `given` are not scored, and
    neither are those of a window, of which they take the place: stride ≤ context + 1 - given."""
    predictions, done, start = tokens - 1, max(0, given - 1), 0
    while done < predictions:
        end = min(start + context, predictions)
        yield ContextWindow(start, end - start, end - done)
        done = end
        start += stride


def count(tokens: int, context: int, stride: int) -> int:
    """Returns the number of windows."""
    predictions = tokens - 1
    return 0 if predictions < 1 else 1 + max(0, -(-(predictions - context) // stride))


def legal_stride(context: int, stride: int, seq_len: int, given: int = 1) -> tuple[int, int]:
    """Returns context and stride, where 0 means seq_len and the context, of which `given` tokens begin each window.
    Raises JobError with every problem."""
    least, context = max(1, given), context or seq_len
    legal = min(max(context, least), seq_len)
    problems = []
    if not least <= context <= seq_len:
        problems.append(f"{least} ≤ --context {context} ≤ seq_len {seq_len} does not hold; nearest legal: {legal}")
    legal -= least - 1
    stride = stride or legal
    if not 1 <= stride <= legal:
        problems.append(
            f"1 ≤ --stride {stride} ≤ context {legal} does not hold, and tokens between windows would never be "
            f"scored; nearest legal: {min(max(stride, 1), legal)}"
        )
    if problems:
        raise JobError(problems)
    return context, stride


def batches(
    tokens: np.ndarray,
    found: Sequence[ContextWindow],
    *,
    context: int,
    micro_batch: int,
    rank: int = 0,
    ranks: int = 1,
    separator: Sequence[int] = (),
    documents: np.ndarray | None = None,
    begin: Sequence[int] = (),
) -> Iterator[MicroBatch]:
    """Yields the micro-batches of one of `ranks` over the windows of `begin` and `tokens` (n,). Windows after the first
    have `begin` in place of their first tokens.

    Every rank gets the same number of micro-batches, as collectives require. Rows and ends of windows that are padded,
    and predictions that an earlier window scored, have IGNORE as their target. With a `separator`, or the number of
    each token's document in `documents` (n,), micro-batches contain the documents (data.document_mask)."""
    if documents is None and separator:
        ends = np.ones(len(tokens), dtype=np.int64)
        for back, token in enumerate(reversed(separator)):
            matches = tokens == token
            ends &= np.concatenate((np.zeros(min(back, len(tokens)), dtype=bool), matches[: len(tokens) - back]))
        documents = ends.cumsum() - ends
    if begin:
        tokens = np.concatenate((begin, tokens))
        documents = documents if documents is None else np.concatenate((documents[:1].repeat(len(begin)), documents))
    for first in range(0, len(found), ranks * micro_batch):
        own = list(islice(found, first + rank * micro_batch, first + (rank + 1) * micro_batch))
        inputs = np.zeros((micro_batch, context), dtype=np.int64)
        targets = np.full((micro_batch, context), IGNORE, dtype=np.int64)
        numbers = np.zeros((micro_batch, context), dtype=np.int64)
        for row, window in enumerate(own):
            end = window.start + window.length
            inputs[row, : window.length] = tokens[window.start : end]
            inputs[row, : len(begin)] = begin
            scored = slice(window.length - window.scored, window.length)
            targets[row, scored] = tokens[end + 1 - window.scored : end + 1]
            if documents is not None:
                numbers[row, : window.length] = documents[window.start : end] - documents[window.start]
                numbers[row, window.length :] = numbers[row, window.length - 1]
        ids = np.full(micro_batch, -1, dtype=np.int64)
        ids[: len(own)] = first + rank * micro_batch + np.arange(len(own))
        yield MicroBatch(inputs, targets, ids, numbers if documents is not None else None)


@dataclass(frozen=True)
class ScoredText:
    """A text as tokens."""

    name: str
    split: str
    tokens: np.ndarray
    """(n,) int64."""
    bytes: int | None
    """Bytes of the documents in UTF-8, without the separators between them; None for tokens without text."""
    documents: np.ndarray | None = None
    """(n,) int64: the number of each token's document, where something else than a separator tells it."""


@dataclass(frozen=True)
class ScoredConversations:
    """A split of conversations, scored sample by sample as it is trained: the answers, if only they count."""

    name: str
    split: str
    samples: ShardData
    bytes: None = None
    """Only some tokens of the text are scored."""


def read_texts(
    data: Data, tokenizer: Tokenizer, split: str, seq_len: int, limit_mb: float = 0.0
) -> list[ScoredText | ScoredConversations]:
    """Reads the text of `data` as `read_text` does; of a mixture the text of every source."""
    each = source_settings(data, prepared_path(data)) if data.mix else [data]
    return [read_text(one, tokenizer, split, seq_len, limit_mb) for one in each]


def read_text(
    data: Data, tokenizer: Tokenizer, split: str, seq_len: int, limit_mb: float = 0.0
) -> ScoredText | ScoredConversations:
    """Reads a split ("train", "val", or "all") of the corpus of `data`, at most `limit_mb` megabytes of it; 0: all.

    Raises DataError if there is none, or characters are outside the tokenizer's vocabulary."""
    entry = CORPORA[data.corpus]
    if has_pairs(data):
        raise DataError(f"corpus {data.corpus} holds pairs, which have no perplexity: give --files or --corpus")
    if (entry.tokens is not None or entry.rows is not None) and split == "all":
        raise DataError(f"corpus {data.corpus} is prepared in two splits: give --split train or --split val")
    if entry.rows is not None:
        if limit_mb:
            raise JobError(f"--limit-mb: the conversations of {corpus.describe(data)} are scored whole")
        return ScoredConversations(corpus.describe(data), split, open_split(prepare(data), split, seq_len, data))
    if entry.tokens is not None:
        shards = TokenData(prepare(data), split, 1)
        tokens = shards.read(0, shards.tokens).astype(np.int64)
        return ScoredText(data.corpus, split, tokens[: round(limit_mb * 1e6) or None], None)
    if data.corpus == "text" and pair_of(data.path):
        return _ready_tokens(data, tokenizer, split, limit_mb)
    size = 0

    def counted() -> Iterator[Segment]:
        nonlocal size
        for segment in _limited(segments_of(data, split), limit_mb):
            size += len(segment.text.encode())
            yield segment

    tokens = encode_segments(tokenizer, counted())
    name = corpus.describe(data)
    if len(tokens) < 2:
        raise DataError(f"{name}, split {split}: {len(tokens)} tokens; at least 2 are needed to score one")
    return ScoredText(name, split, tokens, size)


def _ready_tokens(data: Data, tokenizer: Tokenizer, split: str, limit_mb: float) -> ScoredText:
    """Reads the tokens of a Megatron data set."""
    found = open_megatron(data.path)
    cut = int(found.tokens * (1 - data.val_fraction))
    first, end = {"train": (0, cut), "val": (cut, found.tokens)}.get(split, (0, found.tokens))
    tokens = np.memmap(found.bin, DTYPES[found.dtype], mode="r")[first:end]
    tokens = tokens[: round(limit_mb * 1e6) // tokens.itemsize or None]
    require_in_vocabulary(tokens, tokenizer.vocab_size, f"{found.bin}, read with the run's tokenizer,")
    documents = np.searchsorted(found.documents, first + np.arange(tokens.size), side="right")
    return ScoredText(data.path, split, tokens.astype(np.int64), None, documents)


def other_corpus(own: Data, corpus_name: str, files: Path | None, text_field: str) -> Data:
    """Returns the settings of the corpus that the user names instead of the run's own. Its tokenizer is the run's, and
    its whole text is read unless a split is given."""
    if files is not None:
        return Data(corpus="text", path=str(files), text_field=text_field, dir=own.dir)
    if not corpus_name:
        return own
    return replace(own, corpus=corpus_name, mix=own.mix if corpus_name == own.corpus else ())


def _limited(segments: Iterator[Segment], limit_mb: float) -> Iterator[Segment]:
    """Yields the segments up to a number of megabytes."""
    left = round(limit_mb * 1e6)
    for segment in segments:
        content = segment.text.encode()
        if limit_mb and len(content) >= left:
            yield replace(segment, text=content[:left].decode(errors="ignore"))
            return
        left -= len(content)
        yield segment


@dataclass(frozen=True)
class ScoringOptions:
    """How runs are scored."""

    layout: Layout
    batch_size: int
    """Windows in one forward pass of one data rank."""
    context: int = 0
    """Tokens of a window; 0: the model's seq_len."""
    stride: int = 0
    """Tokens between the beginnings of windows; 0: the context."""
    precision: str = ""
    """That of training, unless it is given; bf16 where that is fp8."""


def scoring_job(manifest: Manifest, scoring: ScoringOptions, device: str) -> Job:
    """Returns the job in which a checkpoint is scored: its model and data, with a layout of its own, and no optimizer
    state. Raises JobError if the model does not fit into the layout."""
    job, layout = job_of(manifest), scoring.layout
    if job.model.reward:
        raise JobError(f"{manifest.path} is a reward model, whose loss is of pairs and not of tokens")
    if has_pairs(job.data) or has_prompts(job.data):  # the loss is that of tokens
        plain = Data(document_mask=job.data.document_mask)
        job = replace(job, data=plain, train=replace(job.train, dpo=Train().dpo, grpo=Train().grpo))
    micro = layout.micro_batch or scoring.batch_size
    accumulation = layout.accumulation or (2 * layout.pp if layout.pp > 1 else 1)
    job = replace(
        job,
        layout=replace(layout, micro_batch=micro, accumulation=accumulation),
        train=replace(
            job.train,
            global_batch=micro * accumulation * layout.data_ranks,
            batch_ramp="",
            seq_ramp="",
            precision=scoring.precision or job.train.precision.replace("fp8", "bf16"),  # pyrefly: ignore[bad-argument-type]
            compile=False,
        ),
        optimizer=Optimizer(name="sgd", momentum=0.0),
        guard=GuardOptions(),
        checkpoint=Checkpoint(),
        cluster=replace(job.cluster, nodes=1, devices_per_node=layout.processes, device=device),  # pyrefly: ignore[bad-argument-type]
    )
    context, _ = legal_stride(scoring.context, scoring.stride, job.model.seq_len)
    problems = [f"{path}: {message}" for path, message in problems_of(job)]
    if context < job.model.seq_len and layout.cp > 1:
        problems.append(f"--context {context}: with cp it must be the model's seq_len {job.model.seq_len}, or 0")
    if problems:
        raise JobError(problems)
    return job
