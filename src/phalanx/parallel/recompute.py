"""Recomputation: activations are computed again in the backward pass instead of being kept since the forward pass.

`full` keeps only each block's input (Chen et al. 2016); `selective` keeps everything but the inside of the attention
core, which is large and cheap to repeat (Korthikanti et al. 2022, section 5). Dropout masks are functions of seed, step
and sample (model/noise.py), so the second pass meets the same ones without any saved generator state.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from phalanx.model.attention import CoreAttention
from phalanx.model.transformer import Block, Transformer


def recompute(model: Transformer, what: str) -> int:
    """Have the blocks of `model` ("full") or their attention cores ("selective") recomputed. Returns how many."""
    kind = Block if what == "full" else CoreAttention
    modules: list[nn.Module] = [module for module in model.modules() if isinstance(module, kind)]
    for module in modules:
        module.forward = partial(_run, module.forward)
    return len(modules)


def _run(forward: Callable[..., Any], *inputs: Any) -> Any:
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False)
