"""Loads a model and its tokenizer from a run's checkpoint for generation."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from phalanx.blocks.parameters import parameter_shapes
from phalanx.bounded import field
from phalanx.checkpoint.inventory import check, checkpoint_at, newest_valid
from phalanx.checkpoint.manifest import Box, Manifest, job_of
from phalanx.checkpoint.shard_file import Reader
from phalanx.data.template import ChatPrompts
from phalanx.data.tokenizer import LARGEST_VOCABULARY, Tokenizer
from phalanx.errors import CheckpointError, JobError
from phalanx.generate.decoder import Decoder, ModelDecoder
from phalanx.generate.engine import Engine
from phalanx.generate.request import GenerationRequest
from phalanx.generate.sampling import Sampling
from phalanx.model.transformer import Transformer
from phalanx.parallel.precision import DTYPES
from phalanx.partition.tensor_slices import slice_of
from phalanx.train.device import choose
from phalanx.train.run_directory import RunDirectory

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedRun:
    """The model of a run, ready to compute, and its tokenizer."""

    decoder: Decoder
    tokenizer: Tokenizer

    chat: ChatPrompts | None = None
    """Turns messages into prompts; None if prompts are plain text."""

    def encode(self, prompt: str) -> list[int]:
        """Returns a prompt's tokens. Raises JobError if it is empty, or if the chat template refuses it."""
        try:
            message = {"role": "user", "content": prompt}
            ids = self.tokenizer.encode(prompt).tolist() if self.chat is None else self.chat([message])
        except ValueError as error:
            raise JobError(f"the chat template: {error}") from error
        if not (prompt and ids):
            raise JobError("the prompt is empty; give at least one character")
        return ids

    def text(self, prompt: str, **options: Any) -> str:
        """Returns the prompt followed by generated text; `options` are those of `sampling.Sampling`. Raises JobError on
        an empty prompt and invalid options."""
        request = GenerationRequest(self.encode(prompt), Sampling(**options), ends=self.tokenizer.end_ids)
        Engine(self.decoder).run([request])
        return self.tokenizer.decode(request.tokens)


def load_run(path: Path, step: int = 0, device: str = "auto") -> LoadedRun:
    """Returns the model of a run from its checkpoint of `step` (0: the newest whole one).

    Raises CheckpointError if there is no run, no such checkpoint, or a damaged one.
    """
    manifest = find(path, step)
    model = empty_model(manifest)
    target = choose(device, 0)
    fill(model, manifest, target)
    return LoadedRun(ModelDecoder.whole(model), Tokenizer.load(path))


def in_chat(loaded: LoadedRun, path: Path) -> LoadedRun:
    """Returns the same run, for which prompts are messages of a user. Raises JobError if it has no chat template."""
    chat = ChatPrompts.of_run(path, loaded.tokenizer)
    if chat is None:
        raise JobError(f"--chat: {path} has no chat template: train on data.corpus=chat, or leave it out")
    return replace(loaded, chat=chat)


def find(path: Path, step: int = 0, verify: bool = True) -> Manifest:
    """Returns a run's checkpoint of `step` (0: the newest whole one); without `verify` only file sizes are checked.

    Raises CheckpointError in the same cases as `load_run`."""
    directory = RunDirectory(path)
    directory.require()
    root = directory.checkpoints
    if step:
        return check(checkpoint_at(root, step), verify)
    manifest = newest_valid(root, verify, report=log.warning)
    if manifest is None:
        raise CheckpointError(
            f"{path} has no checkpoint yet; it writes one at its end, or every checkpoint.every steps"
        )
    return manifest


def empty_model(manifest: Manifest) -> Transformer:
    """Returns the model of a checkpoint on the meta device, where it takes no memory until it is filled."""
    job = job_of(manifest)
    with torch.device("meta"):
        return Transformer(job.model, vocabulary_of(manifest)).to(DTYPES[job.train.precision])


def vocabulary_of(manifest: Manifest) -> int:
    """Returns the size of a checkpoint's vocabulary. Raises CheckpointError if it states none."""
    try:
        size = field(manifest.meta, "vocab_size", int)
    except ValueError as error:
        raise CheckpointError(f"checkpoint {manifest.path}: its metadata is not valid: {error}") from None
    if not 1 <= size <= LARGEST_VOCABULARY:
        raise CheckpointError(
            f"checkpoint {manifest.path}: a vocabulary of {size:,} tokens; at least 1, at most {LARGEST_VOCABULARY:,}"
        )
    return size


@torch.no_grad()
def fill(model: Transformer, manifest: Manifest, device: torch.device, tp: int = 1, rank: int = 0) -> None:
    """Moves a model, or a rank's part of it, from meta to `device` with its checkpoint's parameters, read one at a
    time: all that `model` has of them, or the slices of tensor rank `rank` of `tp`. Raises CheckpointError if the
    checkpoint does not match."""
    model.to_empty(device=device)
    shapes = parameter_shapes(model.config, vocabulary_of(manifest))
    with Reader(manifest) as tensors:
        tensors.require(shapes)
        for name, parameter in model.named_parameters():
            cut = slice_of(name, shapes[name], model.config, tp, rank)
            if cut.dim is None:
                parameter.copy_(tensors.read(name))
                continue
            parameter.zero_()  # what the vocabulary is padded with
            if cut.real:
                box = Box.of(cut.whole).moved(cut.dim, cut.start, cut.real)
                parameter.narrow(cut.dim, 0, cut.real).copy_(tensors.read(name, box))
