"""Initial weights: each parameter has its own random stream, a function of (seed, name) alone.

So the values do not depend on the order of construction, the data type, the device, or which parameters a process
holds: a rank that holds a shard draws the whole parameter and takes its part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from phalanx.blocks.operator import Initial
from phalanx.blocks.parameters import weight_of
from phalanx.config.model import ModelConfig
from phalanx.model.seeding import derive_seed

_RESIDUAL_OUTPUTS = ("wo.weight", "down.weight")


def initial_value(name: str, shape: Sequence[int], model: ModelConfig, seed: int) -> Tensor:
    """Returns the initial value of the parameter `name` of the whole `shape`, in float32 on the CPU.

    Norms start at one and biases at zero; the rest is normal with standard deviation init_std, divided by √(2 n_layers)
    for the matrices that write to the residual stream (Radford et al. 2019, section 2.3). Of an adapter A is normal
    with variance 1 / (3 inputs), B zero, so that it begins without effect (Hu et al. 2022, section 4.1). A parameter
    whose description says otherwise starts so. Raises KeyError for a name that the model does not have."""
    kind = weight_of(model, name).initial
    if kind == "by name":
        kind = _by_name(name)
    if kind == "ones":
        return torch.ones(*shape)
    if kind == "zeros":
        return torch.zeros(*shape)
    std = (3 * shape[-1]) ** -0.5 if kind == "adapter" else model.init_std
    if kind == "residual":
        std /= (2 * model.n_layers) ** 0.5
    generator = torch.Generator().manual_seed(derive_seed(seed, "init", name))
    return torch.empty(*shape).normal_(0.0, std, generator=generator)


def _by_name(name: str) -> Initial:
    if name.endswith("norm.weight"):
        return "ones"
    if name.endswith((".bias", ".logit_bias")):
        return "zeros"
    return "residual" if name.endswith(_RESIDUAL_OUTPUTS) else "normal"


@torch.no_grad()
def initialise(module: nn.Module, model: ModelConfig, seed: int) -> None:
    """Sets every parameter of a `Transformer`, or of a part of one that keeps its names, to its initial value in place.

    A module built on the meta device must first be allocated with `module.to_empty(device=...)`."""
    for name, parameter in module.named_parameters():
        parameter.copy_(initial_value(name, parameter.shape, model, seed))
