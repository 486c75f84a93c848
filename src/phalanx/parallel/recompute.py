"""Recomputation: activations are computed again in the backward pass instead of being kept since the forward pass.

Each block has a mode of its own (partition/recompute.py). `full` keeps only the block's input (Chen et al. 2016);
`selective` keeps everything but the inside of the attention core, which is large and cheap to repeat (Korthikanti et
al. 2022, section 5). Dropout masks are functions of seed, step and sample (model/noise.py), so the second pass meets
the same ones without any saved generator state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from phalanx.config.layout import Layout
from phalanx.model.attention import CoreAttention
from phalanx.model.transformer import Block, Transformer
from phalanx.partition.recompute import recompute_of


def recompute(model: Transformer, layout: Layout) -> int:
    """Have each block of `model`, or its attention core, recomputed where the layout says so of its layer. Returns how
    many are."""
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


def run_again(compute: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Return what `compute` makes of `inputs`, which alone are saved: the backward pass computes the rest again."""
    return checkpoint(compute, *inputs, use_reentrant=False, preserve_rng_state=False)
