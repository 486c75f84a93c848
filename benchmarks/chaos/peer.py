"""What many people write: a loop under torchrun with DDP or FSDP2 and DCP checkpoints, restarted by torchrun.

    torchrun --max-restarts 3 --nproc-per-node 2 peer.py RUN_DIRECTORY ddp|fsdp STEPS SAVE_EVERY D_MODEL LAYERS SEQ_LEN

It resumes from the newest checkpoint that has DCP's metadata, which is written last, and writes the rows of
metrics.jsonl that the bench reads.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, BATCH_PER_RANK, TIMEOUT_S = 64, 16, 20.0


class Model(nn.Module):
    """A small decoder of torch's own layers."""

    def __init__(self, d_model: int, layers: int, seq_len: int):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, d_model)
        self.positions = nn.Parameter(torch.zeros(seq_len, d_model))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(d_model, 2, 4 * d_model, 0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(d_model, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(seq_len), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss of the next tokens."""
        hidden = self.embedding(tokens[:, :-1]) + self.positions
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())


def train(run: Path, how: str, steps: int, every: int, d_model: int, layers: int, seq_len: int) -> None:
    """Trains to the last step, from the newest checkpoint if there is one, and ends the process."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    rank = dist.get_rank()
    torch.manual_seed(1337)
    plain = Model(d_model, layers, seq_len)
    if how == "fsdp":
        for layer in plain.layers:
            fully_shard(layer)
        model: nn.Module = fully_shard(plain)
    else:
        model = DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = resume(run, model, optimizer)
    run.mkdir(parents=True, exist_ok=True)
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as metrics:
        note(metrics, rank, event="start", step=first)
        for step in range(first, steps):
            generator = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
            tokens = torch.randint(VOCABULARY, (BATCH_PER_RANK, seq_len + 1), generator=generator)
            loss = model(tokens)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            note(metrics, rank, event="step", step=step + 1, loss=float(loss.detach()))
            if (step + 1) % every == 0 or step + 1 == steps:
                dcp.save(state_of(model, optimizer), checkpoint_id=run / "checkpoints" / f"step-{step + 1:06d}")
    dist.destroy_process_group()
    # Where DDP's buckets are freed with Python's lock held, its thread of gloo can wait for that lock for ever: a
    # hang at the end that no fault caused (torch 2.13). So the process ends while they are alive.
    os._exit(0)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the state that is saved."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def resume(run: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads the newest checkpoint; returns its step, or 0."""
    whole = sorted(path.parent for path in (run / "checkpoints").glob("step-*/.metadata"))
    if not whole:
        return 0
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=whole[-1])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(whole[-1].name[5:])


def note(metrics: Any, rank: int, **row: Any) -> None:
    """Writes a row on rank 0."""
    if rank == 0:
        metrics.write(json.dumps({"time": time.time(), **row}) + "\n")
        metrics.flush()


def final(checkpoints: Path, step: int) -> dict[str, torch.Tensor] | None:
    """Returns the tensors of the checkpoint of `step`, or None if it cannot be read."""
    folder = checkpoints / f"step-{step:06d}"
    if not (folder / ".metadata").exists():
        return None
    with tempfile.TemporaryDirectory() as place:
        try:
            dcp_to_torch_save(folder, os.path.join(place, "state.pt"))
            return _flat(torch.load(os.path.join(place, "state.pt"), weights_only=True))
        except Exception:  # whatever a damaged checkpoint makes DCP raise
            return None


def _flat(tree: Any, name: str = "") -> dict[str, torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return {name: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    return {key: tensor for part, value in items for key, tensor in _flat(value, f"{name}/{part}").items()}


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:8]))
