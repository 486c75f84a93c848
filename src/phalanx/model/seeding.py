"""Random numbers by hashing: every use has its own seed, so no result depends on the order of draws, or on the layout.

An initial weight is a function of (seed, parameter's name, its place in the whole parameter) alone, so that a rank
draws the elements that it holds, where they live. A counter-based generator (Salmon et al. 2011) makes them: the place
is hashed (SplitMix64: Steele et al. 2014), and a table turns the hash into a normal number, in integers and single
operations of floats, which every device rounds alike.

The dropout mask of a site (such as `blocks.3.attn.residual`) for one sample is a function of the run's seed, the step
and the sample's number alone: a recomputed forward pass gets it again without saved generator state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn

from phalanx.blocks.operator import Initial
from phalanx.blocks.parameters import weight_of
from phalanx.config.model import ModelConfig
from phalanx.model.layers import uncompiled


def derive_seed(seed: int, role: str, *key: str | int) -> int:
    """Returns the 64-bit seed of one stream, from the run's seed, the stream's role ("init", "dropout", ...) and the
    `key` that distinguishes its uses (parameter name, site, step, sample)."""
    text = "/".join(map(str, (seed, role, *key)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


_RESIDUAL_OUTPUTS = ("wo.weight", "down.weight")
Places = Callable[[int, int, torch.device], Tensor]
"""Returns the places in the flattened whole parameter, (n,) int64, of elements first to last - 1 of a part of it on a
device; -1 for padding."""
CHUNK = 2**15
"""Elements that each thread draws at a time: on a CPU they stay in the cache."""
LARGE_CHUNK = 2**22
"""The same on other devices."""
_MIX = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1))
"""SplitMix64's shifts and factors, as signed numbers."""
_STEP = -0x61C8864680B583EB
_LEAST, _MOST = 0x3000, 0x3F80
"""The first 16 bits of the floats 2^-31 and 1."""


def initial_value(name: str, shape: Sequence[int], model: ModelConfig, seed: int) -> Tensor:
    """Returns the initial value of the parameter `name` of the whole `shape`, in float32 on the CPU."""
    value = torch.empty(*shape)
    initialise_part(value, name, shape, model, seed)
    return value


@torch.no_grad()
def initialise_part(
    value: Tensor, name: str, shape: Sequence[int], model: ModelConfig, seed: int, places: Places | None = None
) -> None:
    """Sets the elements of a part of the parameter `name` of the whole `shape`, at its `places`; without them it is the
    whole. `value` is contiguous. Padding becomes zero.

    Norms start at one and biases at zero; the rest is normal with standard deviation init_std, divided by √(2 n_layers)
    for the matrices that write to the residual stream (Radford et al. 2019, section 2.3). Of an adapter A is normal
    with variance 1 / (3 inputs), B zero, so that it begins without effect (Hu et al. 2022, section 4.1). A parameter
    whose description says otherwise starts so. Raises KeyError for a name that the model does not have."""
    kind = weight_of(model, name).initial
    if kind == "by name":
        kind = _by_name(name)
    if kind == "zeros" or (kind == "ones" and places is None):
        value.fill_(kind == "ones")
        return
    if kind in ("rates", "steps"):
        where = places(0, value.numel(), value.device) if places else torch.arange(len(value), device=value.device)
        value.copy_(_decay(kind, where, shape[0]).view_as(value))
        return
    std = (3 * shape[-1]) ** -0.5 if kind == "adapter" else model.init_std
    if kind == "residual":
        std /= (2 * model.n_layers) ** 0.5
    flat, key = value.detach().view(-1), derive_seed(seed, "init", name) - 2**63
    size = CHUNK * torch.get_num_threads() if value.device.type == "cpu" else LARGE_CHUNK
    for first in range(0, len(flat), size):
        last = min(first + size, len(flat))
        where = places(first, last, value.device) if places else torch.arange(first, last, device=value.device)
        drawn = torch.ones(len(where), device=value.device) if kind == "ones" else normal(where, key).mul_(std)
        flat[first:last] = drawn if places is None else drawn.masked_fill_(where < 0, 0)


def _decay(kind: Initial, heads: Tensor, count: int) -> Tensor:
    """Returns, for `heads` (n,) of `count`, the logarithm of their rate, from 1 to 16, or what softplus takes to a
    step from 0.1 to 0.001 (Gu and Dao 2023, section 3.6, drawn there): 0 for padding, at -1."""
    share = heads.double() / max(1, count - 1)
    steps = 0.1 * 0.01**share
    value = (1 + 15 * share).log() if kind == "rates" else steps + (-(-steps).expm1()).log()
    return value.masked_fill(heads < 0, 0)


def normal(places: Tensor, key: int) -> Tensor:
    """Returns a normal number, in float32, for each of `places` (n,) int64, of the stream `key`, a signed 64-bit
    number: half of the hash's bits are its distance from the mean, one bit is its sign."""
    x = places * _STEP + key
    for shift, factor in _MIX:
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))).mul_(factor)
    magnitude = (((x >> 32) & 0x7FFFFFFF) + 1).float().mul_(2.0**-31).view(torch.int32)
    start, rise = _quantiles(places.device)
    cell = (magnitude >> 16).sub_(_LEAST)
    within = (magnitude & 0xFFFF).float().mul_(2.0**-16)
    distance = rise.index_select(0, cell).mul_(within).add_(start.index_select(0, cell))
    return distance.mul_((x & 1).mul_(2).sub_(1))


@cache
def _quantiles(device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns, for each cell of floats u from 2^-31 to 1 with the same sign, exponent and first seven bits of the
    fraction, the distance from the mean that a normal number exceeds with probability u at the cell's start, and its
    rise to the next cell, between which it is linear: to 1e-5."""
    starts = (torch.arange(_LEAST, _MOST + 1, dtype=torch.int32) << 16).view(torch.float32)
    distances = -torch.special.ndtri(starts.double() / 2)
    rises = torch.cat((distances.diff(), distances.new_zeros(1)))
    return distances.float().to(device), rises.float().to(device)


def _by_name(name: str) -> Initial:
    if name.endswith("norm.weight"):
        return "ones"
    if name.endswith((".bias", ".logit_bias")):
        return "zeros"
    return "residual" if name.endswith(_RESIDUAL_OUTPUTS) else "normal"


def initialise(module: nn.Module, model: ModelConfig, seed: int) -> None:
    """Sets every parameter of a `Transformer`, or of a part of one that keeps its names, to its initial value in place.

    A module built on the meta device must first be allocated with `module.to_empty(device=...)`."""
    for name, parameter in module.named_parameters():
        initialise_part(parameter.detach(), name, parameter.shape, model, seed)


_LEVELS = 2**16
Read = Callable[[Tensor, Tensor], object]
"""Writes what it makes of random bits (int16) into a tensor of the same shape."""
_LOWEST_INT64 = torch.iinfo(torch.int64).min


def halves_of(batch: int, halved: int) -> list[slice]:
    """Returns the sequences whose tokens ranks of sequence parallelism share together: both halves of a batch of
    `halved` sequences (layout.ep_overlap), and all of any other."""
    ends = [0, (batch + 1) // 2, batch] if batch == halved else [0, batch]
    return [slice(first, last) for first, last in pairwise(ends)]


@dataclass(frozen=True)
class Noise:
    """The inputs of the dropout masks, and of the noise on embeddings, of one forward pass. Both are active only where
    a Noise is given."""

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
    embeddings: float = 0.0
    """Most that is added to an element of an embedding, or subtracted."""
    halved: int = 0
    """Sequences of a batch of which ranks have parts of each half's tokens (`halves_of`)."""

    @uncompiled
    def dropout(self, x: Tensor, p: float, site: str) -> Tensor:
        """Drops elements of `x` (batch, seq, d_model) with probability `p` and scales the others up. Where a rank has
        only part of the tokens, seq is correspondingly shorter."""
        return self._drop(x, p, self._of_tokens(x, site, _kept(p), torch.bool))

    @uncompiled
    def perturbed(self, x: Tensor) -> Tensor:
        """Returns embeddings `x` (batch, seq, d_model) with uniform noise of up to `embeddings` (NEFTune: Jain et al.
        2023, section 3); where a rank has only part of the tokens, seq is correspondingly shorter."""
        unit = 2 * self.embeddings / _LEVELS

        def read(bits: Tensor, out: Tensor) -> None:
            out.copy_(bits).add_(0.5).mul_(unit)

        return x + self._of_tokens(x, "embed.noise", read, torch.promote_types(x.dtype, torch.float32)).to(x.dtype)

    def _of_tokens(self, x: Tensor, site: str, read: Read, dtype: torch.dtype) -> Tensor:
        """Returns what `read` makes of the random bits of each element of `x` (batch, seq, d_model)."""
        if len(halves := halves_of(len(x), self.halved)) > 1:
            alone = [replace(self, sample_ids=self.sample_ids[half]) for half in halves]
            found = (each._of_tokens(x[half], site, read, dtype) for each, half in zip(alone, halves, strict=True))
            return torch.cat([*found])
        part, parts = self.tokens
        samples, tokens = len(self.sample_ids), x.shape[1]
        if (places := self.places) is not None:
            of_sample = (self.seq_len, *x.shape[2:])
            drawn = self._drawn(
                site, of_sample, x.device, read, dtype, select=lambda bits: bits.index_select(0, places)
            )
            drawn = _part(drawn.flatten(0, 1), 0, samples * tokens * part, samples * tokens)
            return drawn.unflatten(0, (samples, tokens))
        # The samples that this part of the tokens touches: with as many samples as parts, whole ones.
        first, last = samples * part // parts, -(-samples * (part + 1) // parts)
        drawn = self._drawn(site, (tokens * parts, *x.shape[2:]), x.device, read, dtype, first, last).flatten(0, 1)
        start = samples * tokens * part - first * tokens * parts
        return _part(drawn, 0, start, samples * tokens).unflatten(0, (samples, tokens))

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

        return self._drawn(site, (n_heads, *whole), device, _kept(p), torch.bool, select=select)

    def _drop(self, x: Tensor, p: float, keep: Tensor) -> Tensor:
        # Without this check one sample's mask would be broadcast over the batch.
        if x.shape != keep.shape:
            raise ValueError(f"dropout mask {tuple(keep.shape)} for activations {tuple(x.shape)}: sample_ids or heads")
        # A boolean mask takes one byte per element until the backward pass; the scale is that of the rounded p.
        return (x * keep).mul_(scale(p))

    def _drawn(
        self,
        site: str,
        shape: Sequence[int],
        device: torch.device,
        read: Read,
        dtype: torch.dtype,
        first: int = 0,
        last: int | None = None,
        select: Callable[[Tensor], Tensor] = lambda bits: bits,
    ) -> Tensor:
        """Returns what `read` makes of random bits: (samples, *shape) of samples `first` to before `last`, or the part
        of it that `select` takes of a tensor of `shape`.

        Each element has 16 bits, four elements per 64-bit draw: about ten times faster on a CPU than torch's dropout,
        and independent of the data type."""
        size, samples = prod(shape), self.sample_ids[first:last]
        generator = torch.Generator(device)
        # One sample's bits at a time: they take twice the memory of its mask, and more than that of a part.
        words = torch.empty(-(-size // 4), dtype=torch.int64, device=device)
        bits = words.view(torch.int16)[:size].unflatten(0, tuple(shape))
        drawn = None
        for row, sample in enumerate(samples):
            generator.manual_seed(derive_seed(self.seed, "dropout", site, self.step, sample))
            words.random_(_LOWEST_INT64, None, generator=generator)
            part = select(bits)
            drawn = part.new_empty(len(samples), *part.shape, dtype=dtype) if drawn is None else drawn
            read(part, drawn[row])
        return bits.new_empty(0, dtype=dtype) if drawn is None else drawn


def _kept(p: float) -> Read:
    """Returns what makes a mask of random bits: true with probability 1 - p, p being rounded to a multiple of 2^-16."""
    threshold = round(p * _LEVELS) - _LEVELS // 2
    return lambda bits, out: torch.ge(bits, threshold, out=out)


def scale(p: float) -> float:
    """Returns the factor of kept elements at dropout probability `p`, which preserves the mean."""
    return _LEVELS / (_LEVELS - round(p * _LEVELS))


def _part(keep: Tensor, dim: int, start: int, size: int) -> Tensor:
    """Returns a part of a mask as a copy: a view would keep the whole mask alive until the backward pass."""
    return keep if size == keep.shape[dim] else keep.narrow(dim, start, size).clone()


def dropout(x: Tensor, p: float, noise: Noise | None, site: str) -> Tensor:
    """Returns `x` (batch, ...) with elements dropped with probability `p`, or `x` itself without noise."""
    return x if noise is None or p == 0 else noise.dropout(x, p, site)


def perturbed(x: Tensor, noise: Noise | None) -> Tensor:
    """Returns embeddings `x` (batch, ...) with the noise that they have in training, if any."""
    return x if noise is None or noise.embeddings == 0 else noise.perturbed(x)
