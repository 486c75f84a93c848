"""Generates text from a model that no single process holds: each pipeline rank has some layers and their KV cache.

Hidden states go from rank to rank; the last one chooses the token, with the same code and random draws as one process
(sampling.py), and broadcasts it. So the text equals that of one process.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store  # torch.distributed.Store, to the type stubs

from phalanx.checkpoint.meta import job_of
from phalanx.checkpoint.validity import check
from phalanx.comm.agree import on_rank_zero
from phalanx.comm.axis import Axis
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.config.run import RunOptions
from phalanx.data.tokenizer import Tokenizer
from phalanx.errors import JobError
from phalanx.generate.load import LoadedRun, empty_model, fill, find, vocabulary_of
from phalanx.generate.sampling import Choose, Sampling, extend
from phalanx.launch.local import launch_local
from phalanx.launch.process_group import process_group
from phalanx.launch.ranks import Ranks
from phalanx.model.cache import Cache
from phalanx.parallel import mesh as meshes
from phalanx.parallel.stages import Stage, Stages
from phalanx.partition.cut import stages_of
from phalanx.schedule.simple import gpipe
from phalanx.train import device as devices


@dataclass(frozen=True)
class PipelinedRun(LoadedRun):
    """One rank's part of a run. `model` has only this rank's layers; the ranks of the pipeline call `text` or `tokens`
    together, with the same arguments, and each gets the whole text."""

    stage: Stage
    axis: Axis
    """The ranks of the pipeline."""
    vocab: int

    def tokens(self, prompt: Tensor, *, on_token: Callable[[Tensor], None] | None = None, **options: Any) -> Tensor:
        """Continues the prompt like `sampling.generate`, token for token."""
        return extend(self._follow, prompt, self.model.config, self.vocab, Sampling(**options), on_token)

    def _follow(self, tokens: Tensor, cache: Cache | None, choose: Choose) -> Tensor:
        model, axis = self.model, self.axis
        start = cache.length if cache is not None else 0
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        if self.stage.first:
            x = model.embed_tokens(tokens, positions, None)
        else:
            like = next(model.parameters())
            x = torch.empty(*tokens.shape, model.config.d_model, dtype=like.dtype, device=like.device)
            axis.receive(x, axis.rank - 1)
        x = model.through(self.stage.layers, x, positions, None, cache)
        if cache is not None:
            cache.length += tokens.shape[1]
        if self.stage.last:
            new = choose(model.logits(model.normed(x))[:, -1])
        else:
            axis.send(x.contiguous(), axis.rank + 1)
            new = tokens.new_empty(len(tokens))
        axis.broadcast(new, source=axis.size - 1).wait()
        return new


def launch(argv: list[str], run: Path, step: int, pp: int) -> int:
    """Starts `pp` ranks with a command line that makes each call `joined`, and returns the exit code of the launch.

    Before it starts any, it raises JobError if `pp` does not suit the model, and the errors of `load_run`."""
    manifest = find(run, step, verify=False)  # the ranks verify it
    _stages(job_of(manifest).model, vocabulary_of(manifest), pp, rank=0)
    logs = Path(tempfile.mkdtemp(prefix="phalanx_generate_"))  # not in the run, which may belong to another user
    # Only one rank computes at a time, so each gets all cores, as one process would.
    threads, stopped = devices.threads_for(0, 1), "while {} of {} ranks were generating."
    code = launch_local(argv, processes=pp, log_dir=logs, threads=threads, all_ranks=False, stopped=stopped)
    if code == 0:
        shutil.rmtree(logs)
    return code


@contextmanager
def joined(
    ranks: Ranks, run: Path, step: int, device: str, pp: int, store: Store | None = None
) -> Iterator[PipelinedRun]:
    """Provides one rank's part of a run, in a process group of `pp` ranks, which may have met in a `store`. Other
    arguments and errors are those of `load_run`; also raises JobError if `pp` does not suit the model."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own handler would wait until a message has come
    target = devices.choose(device, ranks.local_rank)
    with process_group(ranks, device=target, timeout_s=RunOptions().timeout_s, store=store):
        yield load_part(run, step, target, pp)


def load_part(run: Path, step: int, device: torch.device, pp: int) -> PipelinedRun:
    """Loads one rank's part inside a process group. One rank verifies the checkpoint, each reads its own tensors."""
    manifest = check(Path(on_rank_zero(lambda: str(find(run, step).path))), verify=False)
    axis = meshes.build(Layout(pp=pp), device.type).axis("pp")
    model = empty_model(manifest)
    vocab = model.embed.num_embeddings
    stages = _stages(model.config, vocab, pp, axis.rank)
    stages.keep(model)
    fill(model, manifest, device)
    [stage] = stages.local_stages.values()
    return PipelinedRun(model, Tokenizer.load(run), device, stage, axis, vocab)


def _stages(model: ModelConfig, vocab: int, pp: int, rank: int) -> Stages:
    """Returns one stage per rank, cut by cost. Raises JobError if there are fewer layers than ranks."""
    layers = model.n_layers
    if not 1 <= pp <= layers:
        raise JobError(
            f"1 ≤ pp {pp} ≤ n_layers {layers} does not hold: each rank of a pipeline has at least one layer; nearest "
            f"legal: pp {min(max(pp, 1), layers)}"
        )
    return Stages(gpipe(pp, 1), rank, model, vocab, stages_of(model, Layout(pp=pp), pp, vocab))
