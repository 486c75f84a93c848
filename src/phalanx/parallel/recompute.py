"""Recomputation: activations are recomputed in the backward pass instead of being saved in the forward pass.

Each block has a mode of its own (partition/recompute.py). `full` saves only the block's input (Chen et al. 2016);
`selective` saves everything but the inside of the attention core, which is large and cheap to repeat (Korthikanti et
al. 2022, section 5). Dropout masks are functions of seed, step and sample (model/noise.py), so the second pass gets the
same ones without saved generator state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from phalanx.config.layout import Layout
from phalanx.model.attention import CoreAttention
from phalanx.model.layers import uncompiled
from phalanx.model.transformer import Block, Transformer
from phalanx.partition.recompute import recompute_of


def recompute(model: Transformer, layout: Layout) -> int:
    """Makes each block of `model`, or its attention core, recompute if the layout says so for its layer. Returns their
    number."""
    modules: list[Block | CoreAttention] = []
    for layer, block in model.blocks.items():
        mode = recompute_of(layout, int(layer), model.config.n_layers)
        assert isinstance(block, Block), "nothing wraps blocks before this"
        if mode == "full":
            modules.append(block)
        elif mode == "selective":
            modules += [module for module in block.modules() if isinstance(module, CoreAttention)]
    for module in modules:
        module.run = run_again
    return len(modules)


@uncompiled
def run_again(compute: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Returns `compute(*inputs)` and saves only `inputs`: the backward pass recomputes the rest."""
    return checkpoint(compute, *inputs, use_reentrant=False, preserve_rng_state=False)
