"""nanoGPT's model and optimizer in the plain loop. NANOGPT names the folder of its repository (karpathy/nanoGPT).

NANOGPT=~/nanoGPT python -m benchmarks.gpu.nanogpt --layers 12 --width 768 --heads 12 --batch 8 --steps 20
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu import loop

FOLDER = "NANOGPT"
"""The environment variable that names nanoGPT's folder."""


def missing() -> str:
    """Returns why nanoGPT cannot be measured; empty if it can."""
    return missing_checkout(FOLDER, "karpathy/nanoGPT", "model.py")


def missing_checkout(variable: str, repository: str, inside: str) -> str:
    """Returns why `variable` names no folder of a repository, which has a file or folder `inside`; empty if it does."""
    folder = os.environ.get(variable)
    if not folder:
        return f"not installed: {variable} names no folder of {repository}"
    return "" if (Path(folder).expanduser() / inside).exists() else f"not installed: no {inside} in {variable}={folder}"


class Loss(nn.Module):
    """nanoGPT's model as one that returns its loss."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model(tokens, targets.contiguous())[1]


def module() -> Any:
    """Returns nanoGPT's module, loaded by path: another module may be called model."""
    source = importlib.util.spec_from_file_location("nanogpt_model", Path(os.environ[FOLDER]).expanduser() / "model.py")
    assert source, "missing() has looked for the file"
    assert source.loader, "a file has a loader"
    theirs = importlib.util.module_from_spec(source)
    sys.modules["nanogpt_model"] = theirs
    source.loader.exec_module(theirs)
    return theirs


def make(options: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer]:
    theirs = module()
    shape = {"n_layer": options.layers, "n_head": options.heads, "n_embd": options.width}
    config = theirs.GPTConfig(block_size=options.seq_len, vocab_size=options.vocab, dropout=0.0, bias=True, **shape)
    model = theirs.GPT(config).to(options.device)
    return Loss(model), model.configure_optimizers(0.1, loop.LR, (0.9, 0.95), options.device)


if __name__ == "__main__":
    loop.main(__doc__, make)
