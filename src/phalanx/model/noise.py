"""Dropout whose masks do not depend on the layout.

The mask of a site (a place in the model, such as `blocks.3.attn.residual`) for one sample is a function of the run's
seed, the step and the sample's number alone. However a global batch is split over ranks and micro-batches, each sample
meets the same masks; and a recomputed forward pass meets them again without any saved generator state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from phalanx.model.seeding import derive_seed

_LEVELS = 2**16
_LOWEST_INT64 = torch.iinfo(torch.int64).min


@dataclass(frozen=True)
class Noise:
    """What the masks of one forward pass derive from. Dropout is active exactly where a Noise is given."""

    seed: int
    step: int
    """Optimizer step."""
    sample_ids: Sequence[int]
    """Number of each sample of the batch within the global batch or the epoch."""
    heads: tuple[int, int] = (0, 1)
    """Which of how many equal parts of the attention heads are held here (tensor parallelism)."""
    tokens: tuple[int, int] = (0, 1)
    """Which of how many equal parts of the batch's tokens, in the order (sample, position), lie between the matrices
    here (sequence parallelism)."""
    places: Tensor | None = None
    """Positions, within their sequences, of the tokens that are here, (seq,) of int64, where those are not all: slices
    of sequences (a pipeline's), or a context-parallel rank's share."""
    seq_len: int = 0
    """With `places`: tokens of a whole sequence."""

    def dropout(self, x: Tensor, p: float, site: str) -> Tensor:
        """Drops elements of `x` (batch, seq, d_model) with probability `p` and scales up the others. Where a rank has
        a part of the tokens, seq is that much shorter."""
        part, parts = self.tokens
        samples = len(self.sample_ids)
        if self.places is not None:
            keep = self._keep(site, (self.seq_len, *x.shape[2:]), p, x.device)
            keep = keep.index_select(1, self.places).flatten(0, 1)
            keep = _part(keep, 0, samples * x.shape[1] * part, samples * x.shape[1])
            return self._drop(x, p, keep.unflatten(0, (samples, x.shape[1])))
        # The samples that this part of the tokens touches: with as many samples as parts, whole ones.
        first, last = samples * part // parts, -(-samples * (part + 1) // parts)
        keep = self._keep(site, (x.shape[1] * parts, *x.shape[2:]), p, x.device, first, last).flatten(0, 1)
        start = samples * x.shape[1] * part - first * x.shape[1] * parts
        return self._drop(x, p, _part(keep, 0, start, samples * x.shape[1]).unflatten(0, (samples, x.shape[1])))

    def dropout_heads(self, probabilities: Tensor, p: float, site: str, n_heads: int) -> Tensor:
        """The same for attention probabilities (batch, local heads, queries, keys) of a model with `n_heads` heads,
        where the keys are those of all positions so far."""
        queries, keys = probabilities.shape[2:]
        places = None if self.places is None else (self.places, torch.arange(keys, device=probabilities.device))
        of_heads = (self.seq_len or queries, self.seq_len or keys)
        keep = self.keep_heads(p, site, n_heads, of_heads, probabilities.device, places)
        return self._drop(probabilities, p, keep)

    def keep_heads(
        self,
        p: float,
        site: str,
        n_heads: int,
        whole: tuple[int, int],
        device: torch.device,
        places: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Which attention probabilities stay: boolean, (batch, local heads, queries, keys), of `whole` many queries and
        keys, or of those at `places` of them. What stays is multiplied by `scale(p)`."""
        part, parts = self.heads
        keep = self._keep(site, (n_heads, *whole), p, device)
        keep = _part(keep, 1, n_heads * part // parts, n_heads // parts)
        if places is None:
            return keep
        queries, keys = places
        return keep[:, :, queries[:, None], keys]

    def _drop(self, x: Tensor, p: float, keep: Tensor) -> Tensor:
        # Without this check one sample's mask would be broadcast over the batch.
        if x.shape != keep.shape:
            raise ValueError(f"dropout mask {tuple(keep.shape)} for activations {tuple(x.shape)}: sample_ids or heads")
        # A boolean mask takes one byte an element until the backward pass; the scale is that of the rounded p.
        return (x * keep).mul_(scale(p))

    def _keep(
        self, site: str, shape: Sequence[int], p: float, device: torch.device, first: int = 0, last: int | None = None
    ) -> Tensor:
        """Boolean mask (samples, *shape) of the samples from `first` to before `last`, true where an element stays.

        Each element compares 16 random bits with p, four elements to a 64-bit draw: some ten times faster on a CPU
        than torch's dropout, and independent of the data type. p is thereby rounded to a multiple of 2^-16."""
        size = prod(shape)
        generator = torch.Generator(device)
        samples = self.sample_ids[first:last]
        words = torch.empty(len(samples), -(-size // 4), dtype=torch.int64, device=device)
        for row, sample in zip(words, samples, strict=True):
            generator.manual_seed(derive_seed(self.seed, "dropout", site, self.step, sample))
            row.random_(_LOWEST_INT64, None, generator=generator)
        bits = words.view(torch.int16)[:, :size].unflatten(1, tuple(shape))
        return bits >= round(p * _LEVELS) - _LEVELS // 2


def scale(p: float) -> float:
    """What elements that stay are multiplied by, where others are dropped with probability `p`, so that the mean is
    kept."""
    return _LEVELS / (_LEVELS - round(p * _LEVELS))


def _part(keep: Tensor, dim: int, start: int, size: int) -> Tensor:
    """A part of a mask: a copy, since a view would hold on to the whole mask until the backward pass."""
    return keep if size == keep.shape[dim] else keep.narrow(dim, start, size).clone()


def dropout(x: Tensor, p: float, noise: Noise | None, site: str) -> Tensor:
    """`x` (batch, ...) with elements dropped with probability `p`, or `x` itself where there is no noise."""
    return x if noise is None or p == 0 else noise.dropout(x, p, site)
