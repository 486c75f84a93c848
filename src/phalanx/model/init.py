"""Initial weights: each element is a function of (seed, parameter's name, its place in the whole parameter) alone.

So the values do not depend on the order of construction, the data type, the device, or the layout: a rank draws the
elements that it holds, where they live. A counter-based generator (Salmon et al. 2011) makes them: the place is hashed
(SplitMix64: Steele et al. 2014), and a table turns the hash into a normal number. Only integers and single additions
and multiplications of floats are computed, which every device rounds alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from phalanx.blocks.operator import Initial
from phalanx.blocks.parameters import weight_of
from phalanx.config.model import ModelConfig
from phalanx.model.seeding import derive_seed

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
