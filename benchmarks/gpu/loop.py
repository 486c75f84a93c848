"""The plain training loop around a model that returns its loss, shared by plain_gpt, nanogpt and torchtitan_llama.

It shares no code with the framework that it is compared with."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn

LR = 3e-4
CLIP = 1.0

Make = Callable[[argparse.Namespace], tuple[nn.Module, torch.optim.Optimizer]]
"""Builds, from the options, a model on its device, (tokens, targets) to the mean loss, and its optimizer."""


def main(description: str | None, make: Make, *, parts: bool = False) -> None:
    """Trains on random tokens and prints, as JSON, seconds per step, the last loss, and the allocator's peak in bytes
    (0 on a CPU). Every step ends with the loss on the host, as in a loop that prints it. `parts`: the model compiles
    its parts and casts its parameters by itself."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"vocab": 50304, "seq-len": 2048, "layers": 12, "width": 768, "heads": 12}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kv-heads", type=int, help="of a Llama")
    parser.add_argument("--hidden", type=int, help="the width of a Llama's feed-forward layer")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    model, optimizer = make(options)
    step_model = torch.compile(model) if options.compile and not parts else model
    on_gpu = options.device == "cuda"
    seconds, loss = [], 0.0
    for _ in range(options.steps):
        began = time.perf_counter()
        tokens = torch.randint(options.vocab, (options.batch, options.seq_len + 1)).to(options.device)
        with torch.autocast("cuda", torch.bfloat16) if on_gpu and not parts else nullcontext():
            output = step_model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        output.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        loss = output.item()
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    print(json.dumps({"seconds": seconds, "loss": loss, "memory": peak}))
