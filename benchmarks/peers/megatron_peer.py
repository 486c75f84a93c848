"""Megatron-core's GPTModel in tensor parallelism, on its layers without Transformer Engine, which have no sequence
parallelism.

It is written for CUDA: on a CPU its random states, its mask and its question for a current device
get answers of the CPU's.
"""

from __future__ import annotations

import contextlib
import functools

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from benchmarks.peers import harness
from phalanx.config.job import Job


class NoStates:
    """Stands for the random states of CUDA devices: nothing here draws while it computes."""

    def fork(self, name: str = "") -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_initialized(self) -> bool:
        return True


def build(job: Job) -> torch.nn.Module:
    """Returns this rank's part of the job's model."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.fusions import fused_softmax
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.cuda.current_device = lambda: torch.device("cpu")
    fused_softmax.get_default_causal_mask = functools.cache(lambda size: torch.ones(size, size).triu(1).bool())
    tensor_parallel.random._CUDA_RNG_STATE_TRACKER = NoStates()
    tensor_parallel.random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    m = job.model
    config = TransformerConfig(
        num_layers=m.n_layers,
        hidden_size=m.d_model,
        num_attention_heads=m.n_heads,
        ffn_hidden_size=m.ff_size,
        add_bias_linear=m.bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=dist.get_world_size(),
        pipeline_dtype=torch.float32,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=m.bias,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=m.vocab_size + m.vocab_size % 2,
        max_sequence_length=m.seq_len,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=True,
        parallel_output=True,
    )


def main() -> None:
    options = harness.parser(__doc__).parse_args()
    job = harness.load(options.job)
    dist.init_process_group("gloo")
    model = build(job)
    optimizer = harness.adamw(model, job)
    places = torch.arange(job.model.seq_len).expand(job.layout.micro_batch, -1)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = model(tokens, places, None, labels=targets).mean()
        loss.backward()
        clip_grad_norm_(model.parameters(), job.optimizer.clip)
        optimizer.step()
        return loss

    harness.measure(step, job, options.steps, data_rank=0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
