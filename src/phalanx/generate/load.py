"""Loads a model and its tokenizer from a run's checkpoint for generation."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.blocks.parameters import parameter_shapes
from phalanx.bounded import field
from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.meta import job_of
from phalanx.checkpoint.reader import Reader
from phalanx.checkpoint.validity import check, directory_of, newest_valid
from phalanx.data.tokenizer import LARGEST_VOCABULARY, Tokenizer
from phalanx.errors import CheckpointError, JobError
from phalanx.generate.sampling import generate
from phalanx.model.transformer import Transformer
from phalanx.parallel.precision import DTYPES
from phalanx.train.device import choose
from phalanx.train.run_directory import RunDirectory

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedRun:
    """The model and tokenizer of a run."""

    model: Transformer
    tokenizer: Tokenizer
    device: torch.device

    def text(self, prompt: str, *, on_text: Callable[[str], None] | None = None, **options: Any) -> str:
        """Returns the prompt followed by generated text; `options` are those of `sampling.generate`.

        `on_text` gets each new piece of text as soon as it is whole (a character may consist of several tokens). Raises
        JobError on an empty prompt and invalid options.
        """
        ids = self.tokenizer.encode(prompt)
        if not len(ids):
            raise JobError("the prompt is empty; give at least one character")
        tokens = torch.from_numpy(ids.astype("int64"))[None].to(self.device)
        sofar = tokens[0].tolist()
        shown = self.tokenizer.decode(sofar)

        def show(token: torch.Tensor) -> None:
            nonlocal shown
            sofar.append(int(token))
            text = self.tokenizer.decode(sofar)
            if on_text and text.startswith(shown) and not text.endswith("\ufffd"):
                on_text(text[len(shown) :])
                shown = text

        done = self.tokens(tokens, on_token=show if on_text else None, **options)
        return self.tokenizer.decode(done[0].tolist())

    def tokens(self, prompt: Tensor, *, on_token: Callable[[Tensor], None] | None = None, **options: Any) -> Tensor:
        """Continues the tokens (batch, prompt) like `sampling.generate`."""
        return generate(self.model, prompt, on_token=on_token, **options)


def load_run(path: Path, step: int = 0, device: str = "auto") -> LoadedRun:
    """Returns the model of a run from its checkpoint of `step` (0: the newest whole one).

    Raises CheckpointError if there is no run, no such checkpoint, or a damaged one.
    """
    manifest = find(path, step)
    model = empty_model(manifest)
    target = choose(device, 0)
    fill(model, manifest, target)
    return LoadedRun(model, Tokenizer.load(path), target)


def find(path: Path, step: int = 0, verify: bool = True) -> Manifest:
    """Returns a run's checkpoint of `step` (0: the newest whole one); without `verify` only file sizes are checked.

    Raises CheckpointError in the same cases as `load_run`."""
    directory = RunDirectory(path)
    directory.require()
    root = directory.checkpoints
    if step:
        return check(directory_of(root, step), verify)
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
def fill(model: Transformer, manifest: Manifest, device: torch.device) -> None:
    """Moves a model, or a pipeline stage's part of it, from meta to `device` with its checkpoint's parameters, read one
    at a time. Raises CheckpointError if the checkpoint does not match."""
    model.to_empty(device=device)
    with Reader(manifest) as tensors:
        tensors.require(parameter_shapes(model.config, vocabulary_of(manifest)))
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors.read(name))
