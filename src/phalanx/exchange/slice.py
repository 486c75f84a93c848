"""The first layers of a model: a smaller one for trials, whose weights are real."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from phalanx.config.model import ModelConfig
from phalanx.errors import JobError


def first_layers(model: ModelConfig, layers: int, source: Path) -> ModelConfig:
    """Returns the shape of a model of its first `layers` layers; of all if it is 0. Raises JobError if it has fewer."""
    if layers > model.n_layers:
        raise JobError(f"--layers {layers}: {source} has {model.n_layers} layers")
    return replace(model, n_layers=layers) if layers else model


def layer_of(name: str) -> int | None:
    """Returns the layer to which a tensor of transformers or of llama.cpp belongs, from 0; None for those outside."""
    found = re.search(r"(?:^|\.)(?:layers|h|blk)\.(\d{1,9})\.", name)
    return int(found[1]) if found else None
