"""Dropout whose masks do not depend on the layout.

The mask of a site (a place in the model, such as `blocks.3.attn.residual`) for one sample is a function of the run's
seed, the step and the sample's number alone. However a global batch is split over ranks and micro-batches, each sample
gets the same masks, and a recomputed forward pass gets them again without saved generator state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from phalanx.model.layers import uncompiled
from phalanx.model.seeding import derive_seed

_LEVELS = 2**16
_LOWEST_INT64 = torch.iinfo(torch.int64).min


@dataclass(frozen=True)
class Noise:
    """The inputs of the dropout masks of one forward pass. Dropout is active only where a Noise is given."""

    seed: int
    step: int
    """Optimizer step."""
    sample_ids: Sequence[int]
    """Number of each sample of the batch within the global batch or the epoch."""
    heads: tuple[int, int] = (0, 1)
    """(index, parts): this rank's part of the attention heads (tensor parallelism)."""
    tokens: tuple[int, int] = (0, 1)
    """(index, parts): this rank's part of the batch's tokens, in the order (sample, position), between the matrices
    (sequence parallelism)."""
    places: Tensor | None = None
    """Positions, within their sequences, of this rank's tokens, (seq,) of int64, if it does not have all: slices of
    sequences (of a pipeline), or a context-parallel rank's tokens."""
    seq_len: int = 0
    """Tokens of a whole sequence; set with `places`."""

    @uncompiled
    def dropout(self, x: Tensor, p: float, site: str) -> Tensor:
        """Drops elements of `x` (batch, seq, d_model) with probability `p` and scales the others up. Where a rank has
        only part of the tokens, seq is correspondingly shorter."""
        part, parts = self.tokens
        samples = len(self.sample_ids)
        if (places := self.places) is not None:
            of_sample = (self.seq_len, *x.shape[2:])
            keep = self._keep(site, of_sample, p, x.device, select=lambda bits: bits.index_select(0, places))
            keep = _part(keep.flatten(0, 1), 0, samples * x.shape[1] * part, samples * x.shape[1])
            return self._drop(x, p, keep.unflatten(0, (samples, x.shape[1])))
        # The samples that this part of the tokens touches: with as many samples as parts, whole ones.
        first, last = samples * part // parts, -(-samples * (part + 1) // parts)
        keep = self._keep(site, (x.shape[1] * parts, *x.shape[2:]), p, x.device, first, last).flatten(0, 1)
        start = samples * x.shape[1] * part - first * x.shape[1] * parts
        return self._drop(x, p, _part(keep, 0, start, samples * x.shape[1]).unflatten(0, (samples, x.shape[1])))

    def dropout_heads(self, probabilities: Tensor, p: float, site: str, n_heads: int) -> Tensor:
        """Drops attention probabilities (batch, local heads, queries, keys) of a model with `n_heads` heads, where the
        keys are those of all positions so far."""
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
        """Returns the boolean mask of attention probabilities to keep, (batch, local heads, queries, keys), for a
        `whole` of (queries, keys), or for those at `places` of it. Kept elements are to be multiplied by `scale(p)`."""
        part, parts = self.heads
        here = slice(n_heads * part // parts, n_heads * (part + 1) // parts)

        def select(bits: Tensor) -> Tensor:
            if places is None:
                return bits[here]
            queries, keys = places
            return bits[here][:, queries[:, None], keys]

        return self._keep(site, (n_heads, *whole), p, device, select=select)

    def _drop(self, x: Tensor, p: float, keep: Tensor) -> Tensor:
        # Without this check one sample's mask would be broadcast over the batch.
        if x.shape != keep.shape:
            raise ValueError(f"dropout mask {tuple(keep.shape)} for activations {tuple(x.shape)}: sample_ids or heads")
        # A boolean mask takes one byte per element until the backward pass; the scale is that of the rounded p.
        return (x * keep).mul_(scale(p))

    def _keep(
        self,
        site: str,
        shape: Sequence[int],
        p: float,
        device: torch.device,
        first: int = 0,
        last: int | None = None,
        select: Callable[[Tensor], Tensor] = lambda bits: bits,
    ) -> Tensor:
        """Returns the boolean mask (samples, *shape) of samples `first` to before `last`, true for kept elements, or
        the part of it that `select` takes of a tensor of `shape`.

        Each element compares 16 random bits with p, four elements per 64-bit draw: about ten times faster on a CPU than
        torch's dropout, and independent of the data type. p is thereby rounded to a multiple of 2^-16."""
        size, samples, threshold = prod(shape), self.sample_ids[first:last], round(p * _LEVELS) - _LEVELS // 2
        generator = torch.Generator(device)
        # One sample's bits at a time: they take twice the memory of its mask, and more than that of a part.
        words = torch.empty(-(-size // 4), dtype=torch.int64, device=device)
        bits = words.view(torch.int16)[:size].unflatten(0, tuple(shape))
        keep = None
        for row, sample in enumerate(samples):
            generator.manual_seed(derive_seed(self.seed, "dropout", site, self.step, sample))
            words.random_(_LOWEST_INT64, None, generator=generator)
            part = select(bits)
            keep = part.new_empty(len(samples), *part.shape, dtype=torch.bool) if keep is None else keep
            torch.ge(part, threshold, out=keep[row])
        return bits.new_empty(0, dtype=torch.bool) if keep is None else keep


def scale(p: float) -> float:
    """Returns the factor of kept elements at dropout probability `p`, which preserves the mean."""
    return _LEVELS / (_LEVELS - round(p * _LEVELS))


def _part(keep: Tensor, dim: int, start: int, size: int) -> Tensor:
    """Returns a part of a mask as a copy: a view would keep the whole mask alive until the backward pass."""
    return keep if size == keep.shape[dim] else keep.narrow(dim, start, size).clone()


def dropout(x: Tensor, p: float, noise: Noise | None, site: str) -> Tensor:
    """Returns `x` (batch, ...) with elements dropped with probability `p`, or `x` itself without noise."""
    return x if noise is None or p == 0 else noise.dropout(x, p, site)
