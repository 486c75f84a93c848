"""The perplexity of a run's checkpoint on a text, under any layout: the trainer's own validation code over windows."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phalanx.blocks.parameters import parameter_shapes
from phalanx.checkpoint.manifest import job_of
from phalanx.checkpoint.parts import held
from phalanx.checkpoint.shard_file import Reader
from phalanx.comm.agree import on_every_rank
from phalanx.config.job import Job
from phalanx.data.files import Progress, silent
from phalanx.data.loader import MicroBatch, evaluation_batches
from phalanx.data.tokenizer import Tokenizer
from phalanx.errors import JobError
from phalanx.evaluate import text as windows
from phalanx.evaluate.text import ScoredConversations, ScoredText, ScoringOptions, scoring_job
from phalanx.generate.load import find_on_ranks, tokenizer_of, vocabulary_of
from phalanx.parallel import mesh as meshes
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.objective import MicroTensors
from phalanx.train.evaluate import validation_loss
from phalanx.train.state import fill
from phalanx.train.step import Stepper

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Perplexity:
    """The loss of a model on a text."""

    run: str
    step: int
    text: str
    split: str
    context: int
    stride: int
    tokens: int
    """Tokens that were scored, each once."""
    bytes: int | None
    """Bytes of the text; None for tokens without text."""
    loss: float
    """Mean over the scored tokens, in nats."""
    begins_with: str = ""
    """The text of the tokens with which every window begins, as those of an imported model do: "<s>"."""

    @property
    def perplexity(self) -> float:
        """exp of the loss per token; infinite where a float has no number for it."""
        return math.exp(self.loss) if self.loss < 709 else math.inf

    @property
    def loss_per_byte(self) -> float | None:
        """The whole loss divided by the text's bytes, in nats: comparable between tokenizers."""
        return self.loss * self.tokens / self.bytes if self.bytes else None

    @property
    def bits_per_byte(self) -> float | None:
        """The loss per byte in bits (Gao et al. 2020, "The Pile", section 3.1)."""
        return self.loss_per_byte / math.log(2) if self.loss_per_byte is not None else None

    def as_dict(self) -> dict[str, Any]:
        """Returns everything for `--json`."""
        ratios = {name: getattr(self, name) for name in ("loss_per_byte", "bits_per_byte")}
        perplexity = self.perplexity if math.isfinite(self.perplexity) else None
        return {**vars(self), "perplexity": perplexity, **ratios}


def score(
    run: Path,
    step: int,
    scoring: ScoringOptions,
    device: torch.device,
    read: Callable[[Job, Tokenizer], Sequence[ScoredText | ScoredConversations]],
    progress: Progress = silent,
) -> list[Perplexity]:
    """Scores a run's checkpoint of `step` (0: the newest), together with the other ranks of the process group.

    `read` returns the texts, given the run's job and tokenizer; it is called on every rank. Raises the errors of
    `generate.load.find`, JobError, and DataError."""
    manifest = find_on_ranks(run, step)
    job = scoring_job(manifest, scoring, device.type)
    tokenizer = tokenizer_of(run, manifest)
    texts = on_every_rank(lambda: read(job_of(manifest), tokenizer))
    mesh = meshes.build(job.layout, device.type)
    stepper = Stepper(job, mesh, device, vocabulary_of(manifest))

    def load() -> None:  # the parameters that this rank holds
        shards = stepper.replica.shards
        with Reader(manifest) as tensors:
            tensors.require(parameter_shapes(job.model, vocabulary_of(manifest)))
            for tensor in held(shards, {shard.name: shard.value for shard in shards}):
                fill(tensor, tensors)

    def tensors(batches: Iterator[MicroBatch], words: str, total: int) -> Iterator[MicroTensors]:
        for number, micro in enumerate(batches, start=1):
            yield stepper.tensors(micro, 0, validates=True)
            progress(words, number, total)

    on_every_rank(load)
    stepper.reload()
    separator = tokenizer.separator if job.data.document_mask else ()
    rows = mesh.data_ranks * job.layout.micro_batch
    found = []
    for text in texts:
        samples = _samples(text, scoring, job, mesh, separator, tokenizer.begin_ids)
        words, total = f"scoring {run}" + (f" on {text.name}" if len(texts) > 1 else ""), -(-samples.count // rows)
        loss = validation_loss(stepper.replica, mesh, tensors(samples.batches, words, total), device)
        assert loss is not None, "nothing stops it"
        facts = samples.context, samples.stride, samples.scored, text.bytes, loss, tokenizer.decode(samples.begin)
        found.append(Perplexity(str(run), manifest.step, text.name, text.split, *facts))
    return found


@dataclass(frozen=True)
class _Samples:
    """The windows of a text that one data rank reads."""

    batches: Iterator[MicroBatch]
    count: int
    """Windows or samples of all ranks."""
    scored: int
    """Tokens that they score."""
    context: int
    stride: int
    begin: Sequence[int] = ()
    """Ids with which each window begins."""


def _samples(
    text: ScoredText | ScoredConversations,
    scoring: ScoringOptions,
    job: Job,
    mesh: Mesh,
    separator: Sequence[int],
    begin: Sequence[int],
) -> _Samples:
    """Returns this rank's windows of a text, or its conversations. Raises JobError for windows over conversations."""
    micro, seq_len = job.layout.micro_batch, job.model.seq_len
    if isinstance(text, ScoredConversations):
        if scoring.context or scoring.stride:
            raise JobError(f"--context, --stride: a conversation of {text.name} is one sample, scored as it is trained")
        data, count = text.samples, text.samples.sample_count
        own = evaluation_batches(data, samples=count, micro_batch=micro, rank=mesh.data_rank, ranks=mesh.data_ranks)
        return _Samples(own, count, data.valid_tokens(0, count, 0), seq_len, seq_len)
    again = tuple(text.tokens[: len(begin)].tolist()) == tuple(begin)  # tokens that another program made
    tokens = text.tokens[len(begin) if again else 0 :]
    context, stride = windows.legal_stride(scoring.context, scoring.stride, seq_len, len(begin))
    found = list(windows.windows(len(begin) + len(tokens), context, stride, len(begin)))
    own = windows.batches(
        tokens,
        found,
        context=context,
        micro_batch=micro,
        rank=mesh.data_rank,
        ranks=mesh.data_ranks,
        separator=separator,
        documents=text.documents if job.data.document_mask else None,
        begin=begin,
    )
    return _Samples(own, len(found), sum(window.scored for window in found), context, stride, begin)
