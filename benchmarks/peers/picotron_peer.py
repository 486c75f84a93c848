"""picotron's own Llama on two processes: `--way cp`, its ring attention, or `--way pp`, its 1F1B over micro-batches of
one sequence. PICOTRON names the folder of its repository (huggingface/picotron).

Its imports of CUDA's flash attention and its waits for a device get stand-ins: neither is used on a CPU.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from benchmarks.gpu.nanogpt import missing_checkout
from benchmarks.peers import harness
from phalanx.config.job import Job

FOLDER = "PICOTRON"
"""The environment variable that names picotron's folder."""


def missing() -> str:
    """Returns why picotron cannot be measured; empty if it can."""
    return missing_checkout(FOLDER, "huggingface/picotron", "picotron")


def prepare() -> None:
    """Makes picotron importable, and chooses its forms for a CPU in fp32."""
    sys.path.insert(0, str(Path(os.environ[FOLDER]).expanduser()))
    for name, member in {
        "flash_attn.flash_attn_interface": "flash_attn_func",
        "flash_attn.layers.rotary": "apply_rotary_emb",
        "flash_attn.ops.triton.layer_norm": "layer_norm_fn",
    }.items():
        parts = name.split(".")
        for depth in range(1, len(parts)):
            sys.modules.setdefault(".".join(parts[:depth]), types.ModuleType(parts[depth - 1]))
        sys.modules[name] = types.ModuleType(name)
        setattr(sys.modules[name], member, None)
    os.environ |= {"FLASH_ATTEN": "0", "DEVICE": "cpu", "DTYPE": "float32", "CONTEXT_PARALLEL": "0"}
    torch.cuda.synchronize = lambda *_: None


class Loader:
    """The micro-batches of one step, of one sequence each, in picotron's form."""

    def __init__(self, tokens: Tensor, targets: Tensor):
        self.grad_acc_steps = len(tokens)
        self.parts: Iterator[tuple[Tensor, Tensor]] = zip(tokens.split(1), targets.split(1), strict=True)

    def __next__(self) -> dict[str, Any]:
        tokens, targets = next(self.parts)
        places = torch.arange(tokens.shape[1]).unsqueeze(0)
        return {"input_ids": tokens, "target_ids": targets, "position_ids": places, "hidden_states": None}


def step_of(job: Job, way: str) -> harness.Step:
    """Returns one step, on the ranks of the default group."""
    import picotron.process_group_manager as pgm
    from picotron.context_parallel.context_parallel import (
        apply_context_parallel,
    )
    from picotron.data_parallel.data_parallel import DataParallelBucket
    from picotron.model import Llama
    from picotron.pipeline_parallel.pipeline_parallel import (
        PipelineParallel,
        train_step_pipeline_1f1b,
    )

    world = dist.get_world_size()
    sizes = {"tp_size": 1, "cp_size": 1, "pp_size": 1, "dp_size": 1, f"{way}_size": world}
    pgm.setup_process_group_manager(**sizes)
    m = job.model
    shape = {"hidden_size": m.d_model, "intermediate_size": m.ff_size, "num_hidden_layers": m.n_layers}
    heads = {"num_attention_heads": m.n_heads, "num_key_value_heads": m.kv_heads, "vocab_size": m.vocab_size}
    config = types.SimpleNamespace(
        **shape, **heads, max_position_embeddings=m.seq_len, rms_norm_eps=1e-5, rope_theta=10000.0
    )
    whole: nn.Module = Llama(config)
    model = PipelineParallel(whole, config) if way == "pp" else DataParallelBucket(apply_context_parallel(whole))
    optimizer = harness.adamw(model, job)
    own = slice(*(m.seq_len // world * (dist.get_rank() + end) for end in (0, 1)))

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        if way == "pp":
            between = (1, m.seq_len, m.d_model)
            cpu = torch.device("cpu")
            loss = torch.tensor(train_step_pipeline_1f1b(model, Loader(tokens, targets), between, cpu, torch.float32))
        else:
            loss = harness.loss_of(model, tokens[:, own], targets[:, own])
            loss.backward()
        clip_grad_norm_(model.parameters(), job.optimizer.clip)
        optimizer.step()
        if way == "cp":
            model.reset()
        return loss

    return step


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--way", choices=("cp", "pp"), required=True)
    options = parser.parse_args()
    harness.require_present(missing())
    job = harness.load(options.job, *harness.LLAMA)
    prepare()
    dist.init_process_group("gloo")
    harness.measure(step_of(job, options.way), job, options.steps, data_rank=0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
