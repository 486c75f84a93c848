"""Generates text from a model that no single process holds: pipeline ranks have some layers each, tensor ranks parts of
their matrices, and every rank the KV cache of its own layers and heads.

Rank 0 runs the engine as one process would, with the same code and random draws, so the text equals that of one
process. It tells the other ranks what to compute; hidden states go from stage to stage, and the logits to rank 0.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch._C._distributed_c10d import Store  # torch.distributed.Store, to the type stubs

from phalanx.check.job import require_cut
from phalanx.checkpoint.manifest import Manifest, job_of
from phalanx.comm.agree import broadcast_json
from phalanx.config.job import RunOptions
from phalanx.config.layout import Layout
from phalanx.generate.decoder import STOP, Decoder, follow
from phalanx.generate.load import LoadedRun, empty_model, fill, find_on_ranks, tokenizer_of
from phalanx.launch.process_group import process_group
from phalanx.launch.ranks import Ranks
from phalanx.parallel import mesh as meshes
from phalanx.parallel import tensor
from phalanx.parallel.stages import Stages
from phalanx.partition.cut import stages_of
from phalanx.schedule.generators import gpipe
from phalanx.train import device as devices


@contextmanager
def joined(
    ranks: Ranks, run: Path, step: int, device: str, tp: int, pp: int, store: Store | None = None
) -> Iterator[LoadedRun | None]:
    """Provides the run on rank 0 of a process group of tp × pp ranks, which may have met in a `store`; the other ranks
    compute what it asks for, and then get None. Other arguments and errors are those of `load_run`; also raises
    JobError if the cut does not suit the model."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler would wait until a message has come
    target = devices.choose(device, ranks.local_rank)
    with process_group(ranks, device=target, timeout_s=RunOptions().timeout_s, store=store):
        manifest = find_on_ranks(run, step)
        part = load_part(manifest, target, tp, pp)
        if ranks.rank:
            follow(part)
            yield None
            return
        try:
            yield LoadedRun(replace(part, leads=True), tokenizer_of(run, manifest))
        finally:
            broadcast_json(STOP)


def load_part(manifest: Manifest, device: torch.device, tp: int, pp: int) -> Decoder:
    """Loads one rank's part of a checkpoint inside a process group. Each rank reads its own tensors."""
    require_cut(job_of(manifest).model.main, tp, pp)
    mesh = meshes.build(Layout(tp=tp, pp=pp), device.type)
    pipeline, slices = mesh.axis("pp"), mesh.axis("tp")
    model = empty_model(manifest)
    vocab = model.embed.num_embeddings
    cut = stages_of(model.config, Layout(pp=pp), pp, vocab)  # one stage per rank, cut by cost
    stages = Stages(gpipe(pp, 1), pipeline.rank, model.config, vocab, cut)
    stages.keep(model)
    if tp > 1:
        tensor.cut_parameters(model, slices)
        tensor.connect(model, tensor.TensorParallel(slices))
    fill(model, manifest, device, tp, slices.rank)
    return Decoder(model, device, vocab, stages.local_stages, range(pp), pipeline, slices)
