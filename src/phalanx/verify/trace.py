"""Runs on the ranks: records what every module computes in one step, to find the first that differs from one process.

Each output, and the gradient of each output, becomes a matrix (tokens here, features here). `places` says which tokens
of the global batch its rows are: row of the batch × seq_len + position. They follow from the rank's micro-batches, not
from the modules under test: rows of the batch from the samples' numbers, positions from the part of a sequence that a
context-parallel rank gets, and between the matrices of sequence parallelism from the tensor rank's run of those.
`partial` marks summands: the tensor ranks' outputs before their sum, or gradients that each rank computes from its own
columns.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from phalanx.comm.calls import Recording, recorded
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.launch.ranks import Ranks
from phalanx.model.attention import CoreAttention
from phalanx.model.layers import Linear
from phalanx.model.moe import MixtureOfExperts, RoutedTokens, Slots
from phalanx.model.sparse import ChosenAttention
from phalanx.model.transformer import Block, Transformer
from phalanx.parallel.objective import MicroTensors
from phalanx.parallel.pipeline import Pipeline
from phalanx.parallel.vocabulary import ChunkedLoss
from phalanx.partition import derived as batch
from phalanx.verify.measure import ObservedStepper, run_steps


def trace_step(
    ranks: Ranks, job: Job, vocab_size: int, steps: int, step: int, folder: Path, stale: Layout | None = None
) -> None:
    """Runs `steps` steps and writes to `folder` what this rank computed in `step` (from 0): outputs and their
    gradients, the weights that modules used, shards and their gradients before and after the step, and the collectives
    in order. `stale` as `measure.record`."""
    recording = Recording()
    recorder = StepRecorder(job, step, recording)
    with recorded(recording):
        run_steps(ranks, job, vocab_size, steps, recorder.attach, stale)
    recorder.save(folder / f"rank_{ranks.rank}.safetensors")


class _Current(threading.local):
    """The micro-batch, or its slice, whose forward pass a thread runs: its tokens' places, (rows, positions)."""

    places: Tensor | None = None
    tokens: Tensor | None = None


class StepRecorder:
    """Records one step of one rank."""

    def __init__(self, job: Job, step: int, recording: Recording):
        self.job, self.step, self.recording = job, step, recording
        self.rows, self.seq_len = batch.solve(job.train.global_batch, job.layout).global_batch, job.model.seq_len
        self.current = _Current()
        self.micros: dict[int, tuple[Tensor, Sequence[int], Tensor]] = {}
        """Each micro-batch's tokens, rows of the batch and positions, by the address of the tokens, which stay alive
        for it."""
        self.tensors: dict[str, Tensor] = {}
        self.records: list[dict[str, Any]] = []
        self.shards: list[dict[str, Any]] = []
        self.unknown: dict[str, str] = {}
        """Modules whose outputs cannot be told apart into tokens and features, with the reason."""
        self.lock = threading.Lock()

    def attach(self, stepper: ObservedStepper) -> None:
        """Adds hooks to the stepper's model, which is parallel by now."""
        self.stepper, mesh = stepper, stepper.mesh
        self.coordinates, self.tp = mesh.coordinates, mesh.axis("tp")
        runner = stepper.replica.runner
        self.slices = runner.schedule.slices if isinstance(runner, Pipeline) else 1
        vars(stepper).update(tensors=partial(self._tensors, stepper.tensors), show=self._show)
        objective = stepper.replica.objective
        objective.register_forward_pre_hook(self._enter)
        objective.register_forward_hook(self._leave)
        self._hook_model(objective.model)
        of_hidden = objective.of_hidden

        def loss(x: Tensor, targets: Tensor, chunked: ChunkedLoss | None, *, shared: bool) -> Tensor:
            found = of_hidden(x, targets, chunked, shared=shared)
            self.see("loss", found)
            return found

        vars(objective)["of_hidden"] = loss

    def see(
        self,
        module: str,
        x: Tensor,
        shape: Callable[[Tensor], Tensor] = lambda x: x,
        *,
        part: tuple[bool, bool] = (False, False),
        gradient: bool = True,
        unit: tuple[str, int] = ("column", 1),
    ) -> None:
        """Records the output `x` of a module, which `shape` maps to (batch, seq, features) or (tokens, features), and
        its gradient once it is there. `part`: whether output and gradient are summands over the tensor ranks. `unit` is
        the name and the width of what the features consist of, 0 for the last dimension of `x`. What is recomputed is
        not recorded again."""
        if self.current.places is None:
            return
        places, unit = self.current.places.flatten(), (unit[0], unit[1] or x.shape[-1])
        matrix = _matrix(shape(x.detach()))
        if len(matrix) * self.tp.size == len(places) > 1:  # the tensor rank's run of the tokens
            places = places.chunk(self.tp.size)[self.tp.rank]
        elif matrix.numel() == 1 < len(places):
            unit = ("sum", 1)  # over all tokens
        elif len(matrix) != len(places):
            self.unknown[module] = f"{tuple(x.shape)} for {len(places)} tokens"
            return
        self._put("output", module, matrix, places, part[0], unit)
        if gradient and x.requires_grad:
            x.register_hook(lambda g: self._put("gradient", module, _matrix(shape(g)), places, part[1], unit))

    def save(self, path: Path) -> None:
        """Writes everything."""
        facts = {name: getattr(self, name) for name in ("coordinates", "records", "shards", "unknown")}
        facts["calls"] = [(call.axis, call.collective, call.bytes) for call in self.recording.calls]
        save_file(self.tensors, path, {"facts": json.dumps(facts)})

    def _put(
        self, direction: str, module: str, matrix: Tensor, places: Tensor, is_part: bool, unit: tuple[str, int]
    ) -> None:
        key = f"{direction}/{module}/{int(places[0])}"
        with self.lock:
            if key in self.tensors:
                return
            self.tensors[key] = matrix.detach().clone(memory_format=torch.contiguous_format).cpu()
            self.tensors.setdefault(f"places/{key}", places.clone())
            record = {"key": key, "module": module, "direction": direction, "unit": unit}
            record |= {"partial": is_part and self.tp.size > 1, "call": len(self.recording.calls)}
            self.records.append(record)

    def _tensors(self, made_by: Callable[..., MicroTensors], micro: Any, step: int, *args: Any) -> MicroTensors:
        made = made_by(micro, step, *args)
        rows = [int(number) - self.step * self.rows for number in micro.sample_ids]
        if all(0 <= row < self.rows for row in rows):
            if not self.micros:
                self._keep_shards("before", {shard.name: shard.value for shard in self.stepper.replica.shards})
            positions = torch.arange(made.tokens.shape[1]) if made.places is None else made.places.cpu()
            self.micros[made.tokens.untyped_storage().data_ptr()] = made.tokens, rows, positions
        return made

    def _enter(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        tokens: Tensor = inputs[0].tokens
        base, rows, positions = self.micros.get(tokens.untyped_storage().data_ptr(), (None, (), tokens))
        self.current.places, self.current.tokens = None, tokens
        if base is None:
            return
        offset = int(tokens.storage_offset()) - int(base.storage_offset())
        of_row, of_token = (int(stride) for stride in base.stride())
        if of_row >= of_token:
            row, column = offset // of_row, offset % of_row // of_token
        else:
            row, column = offset % of_token // of_row, offset // of_token
        mine = torch.tensor(rows[row : row + len(tokens)])
        self.current.places = mine[:, None] * self.seq_len + positions[column : column + tokens.shape[1]]

    def _leave(self, *_: Any) -> None:
        self.current.places = None

    def _show(self, kind: str, tensors: dict[str, Tensor]) -> None:
        """Takes the place of the stepper's own, which reassembles whole tensors."""
        if kind == f"gradient/{self.step}":
            self._keep_shards("gradient", {name: self.stepper.mean(tensor) for name, tensor in tensors.items()})
        elif kind == "parameter":
            self._keep_shards("after", tensors)

    def _keep_shards(self, when: str, tensors: dict[str, Tensor]) -> None:
        for shard in self.stepper.replica.shards:
            if shard.name in tensors:
                key, own = f"{when}/{shard.name}", shard.tensor_slice
                self.tensors[key] = tensors[shard.name].detach().reshape(-1).clone().cpu()
                found = {"key": key, "when": when, "name": shard.whole_name, "start": shard.start}
                found |= {"whole": own.whole, "dim": own.dim, "first": own.start, "size": own.size}
                self.shards.append(found | {"call": len(self.recording.calls)})

    def _hook_model(self, model: Transformer) -> None:
        for name, module in model.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                module.register_forward_pre_hook(partial(self._keep_weights, name))
        model.embed.register_forward_hook(self._see_embedded)
        if model.positions is not None:
            model.positions.register_forward_hook(self._see_positions)
        if model.layer_inputs is not None:  # of which tensor ranks have parts of the gradient
            self._after("layer_inputs", model.layer_inputs, part=(False, True), gradient=self.tp.size == 1)
        for layer, block in model.blocks.items():
            assert isinstance(block, Block), "a wrapped block is still one"
            name = f"blocks.{layer}"
            if block.layer_input is not None:
                self._after(f"{name}.layer_input", block.layer_input)
            for norm in ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm"):
                # In a parallel block each tensor rank normalises all tokens for its own heads and columns.
                self._after(f"{name}.{norm}", getattr(block, norm), part=(False, block.parallel))
            for kind, half in block.sublayers():
                path = f"{name}.{kind.name_in_block}"
                self._hook_half(path, half, kind.connection.reads, kind.connection.writes, sums=block.parallel)
            self._after(name, block)
        self._after("final_norm", model.final_norm)
        self._after("head", model.head, unit=("vocabulary entry", 1))

    def _hook_half(
        self, path: str, half: nn.Module, reads: Sequence[str], writes: Sequence[str], *, sums: bool
    ) -> None:
        """Adds hooks to attention or a feed-forward layer. `sums`: its block sums the tensor ranks' outputs."""
        named = dict(half.named_modules())
        read = {name for name in reads if name in named}
        if read:
            vars(half)["project"] = self._projecting(path, half)
        for name, module in named.items():
            if isinstance(module, CoreAttention):
                module.register_forward_pre_hook(partial(self._see_heads, f"{path}.{name}"))
                by_token = _FLAT if isinstance(module, ChosenAttention) else _by_token
                self._after(f"{path}.{name}", module, by_token, unit=("head", 0))
            elif isinstance(module, Linear) and name not in (*reads, *writes) and _is_plain(name):
                # Of what every tensor rank computes whole, each has an unknown part of the gradient.
                self._after(f"{path}.{name}", module, part=(False, True), gradient=self.tp.size == 1)
        if isinstance(half, MixtureOfExperts):
            self._hook_experts(path, half)
        if len(writes) == 1:
            self._after(f"{path}.{writes[0]}", named[writes[0]], part=(sums, False))
        else:
            self._after(path, half, part=(sums, False))

    def _hook_experts(self, path: str, moe: MixtureOfExperts) -> None:
        self._after(f"{path}.router", moe.router, part=(False, True), unit=("expert", 1))
        slots, combine = moe.slots, moe.combine

        def choose(chosen: Tensor, *others: Any) -> Slots:
            self.see(f"{path}.router.choice", chosen.double(), unit=("choice", 1))
            return slots(chosen, *others)

        def combined(rows: Tensor, routed: RoutedTokens) -> Tensor:
            choices, kept, (tokens, top_k) = routed.slots.choices, routed.slots.kept, routed.chosen.shape

            def by_choice(x: Tensor) -> Tensor:
                every = x.new_zeros(tokens * top_k + 1, x.shape[1])
                every[choices[: len(x)]] = x
                if kept is not None:  # rows of padding are not computed
                    every[:-1][~kept.flatten()] = 0
                return every[:-1].view(tokens, -1)

            self.see(f"{path}.experts", rows, by_choice, part=(True, False), unit=("choice", rows.shape[1]))
            return combine(rows, routed)

        if moe.shared is not None:
            self._after(f"{path}.shared", moe.shared, part=(True, False))
        vars(moe).update(slots=choose, combine=combined)

    def _after(self, name: str, module: nn.Module, *shape: Callable[[Tensor], Tensor], **options: Any) -> None:
        """Records the output of a module."""
        if isinstance(module, nn.Identity):
            return

        def see(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            self.see(name, output, *shape, **options)

        module.register_forward_hook(see)

    def _projecting(self, path: str, half: nn.Module) -> Callable[..., tuple[Tensor, ...]]:
        project: Any = half.project
        names = {id(module): name for name, module in half.named_modules()}
        head: Any = getattr(half, "head_size", 1)

        def see(layers: Sequence[nn.Module], x: Tensor) -> tuple[Tensor, ...]:
            for layer in layers:
                self._keep_weights(f"{path}.{names[id(layer)]}", layer)
            outputs: tuple[Tensor, ...] = project(layers, x)
            for layer, y in zip(layers, outputs, strict=True):
                unit = ("head", head) if head > 1 else ("column", 1)
                # Of a key head with copies each rank has the gradient from its own query heads.
                self.see(f"{path}.{names[id(layer)]}", y, part=(False, True), unit=unit)
            return outputs

        return see

    def _see_heads(self, path: str, core: nn.Module, inputs: tuple[Any, ...]) -> None:
        shape, names, more = partial(_by_token, last=inputs[0].shape[2]), ("q", "k", "v"), {}
        if isinstance(core, ChosenAttention):
            shape, names, more = _FLAT, ("q", "latents"), inputs[2]._asdict()
        for name, x in (*zip(names, inputs, strict=False), *more.items()):
            # Of keys in slices this pass has only its own queries' part of the gradient.
            whole = self.slices == 1 or name in ("q", "queries")
            # Every tensor rank has the whole indexer, which learns from all heads.
            site, part = (f"index.{name}", False) if name in more else (name, True)
            self.see(f"{path}.{site}", x, shape, part=(False, part), gradient=whole, unit=("head", 0))

    def _see_embedded(self, _: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        tokens = self.current.tokens
        if tokens is not None and tokens.data_ptr() == inputs[0].data_ptr():  # not of further tokens
            self.see("embed", output)

    def _see_positions(self, _: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        if output.dim() == 2 and self.current.places is not None:  # the same for every sequence
            output = output.detach().expand(len(self.current.places), *output.shape)
        self.see("positions", output, gradient=False)

    def _keep_weights(self, name: str, module: nn.Module, *_: Any) -> None:
        if self.current.places is None:
            return
        with self.lock:
            for leaf, weight in module.named_parameters(recurse=False):
                key = f"weight/{name}.{leaf}"
                if key not in self.tensors and not hasattr(weight, "to_local"):  # otherwise a shard
                    self.tensors[key] = weight.detach().clone(memory_format=torch.contiguous_format).cpu()


_FLAT = partial(torch.flatten, start_dim=2)
"""Maps (batch, tokens, heads, size) to (batch, tokens, heads × size)."""


def _matrix(x: Tensor) -> Tensor:
    """Returns (batch, seq, features) or (tokens, features) as a matrix, and losses (tokens,), or one, as a column."""
    return x.flatten(0, 1) if x.dim() == 3 else x if x.dim() == 2 else x.reshape(-1, 1)


def _by_token(x: Tensor, last: int = 0) -> Tensor:
    """Maps (batch, heads, tokens, size) to (batch, tokens, heads × size): of the `last` tokens, by default of all."""
    return x[:, :, -last:].transpose(1, 2).flatten(2)


def _is_plain(name: str) -> bool:
    """Returns whether a linear layer is neither a tile, an adapter, nor the experts' or a router."""
    return not any(part in ("tiles", "lora_a", "lora_b", "router", "shared") for part in name.split("."))
