"""Long sequences: ring attention, Ulysses and USP beside one process and torch's ring, in turn in the same processes.

    python -m benchmarks.context [--ranks 2] [--lengths 1024 2048 4096 8192] [--rounds 9] [--seconds 15]
                                 [--quick] [--json]

As in benchmarks/pipeline.py every contender takes its turn in every round, ratios are taken round by round, and their
medians count. fp32, 1 thread per process, the same kernels of attention and of products. All must agree with one
process before anything is measured: attention on outputs and gradients, steps on loss and gradient norm. A turn lasts
from the first process's beginning to the last one's end. Timed are:
- attention: forward and backward of one layer's attention, from queries, keys and values to their gradients;
- step: an optimizer step of a small Llama on one sequence, its state sharded over the cp ranks, by FSDP2 on both sides.

torch's public `context_parallel()` does not run on a CPU, so benchmarks/peers/torch_context.py calls the templates
under it, with torch's load balancing. Every run tries it again, for a minute at most, and reports the outcome.

Memory is exact and not that of the process: bytes of all tensors' storages that are alive during forward and backward
of one block of the model, counted at every operation, on the rank with the most. Parameters and their state are not
counted, nor are allocations inside kernels. `kept` is alive between forward and backward, including input and output;
`peak` is the most at any time. Besides: how evenly the causal mask's work is spread over ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.contenders import JOB, ROOT
from benchmarks.peers import torch_context
from benchmarks.report import machine, save
from benchmarks.turns import MIN_ROUNDS, Turns, agree, alone, lasted, prepare, ratio, take_turns
from phalanx.check.load import load_file
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.data.loader import MicroBatch
from phalanx.launch.pool import Pool
from phalanx.launch.ranks import Ranks
from phalanx.model.attention import CoreAttention
from phalanx.model.transformer import Transformer
from phalanx.parallel import context
from phalanx.parallel import mesh as meshes
from phalanx.partition import tensor_slices as sequence
from phalanx.train.step import StepInputs, Stepper

MODEL = (
    *("model.n_layers=4", "model.d_model=256", "model.n_heads=4", "model.norm=rmsnorm", "model.positions=rope"),
    *("model.activation=swiglu", "model.tied=false", "layout.micro_batch=1", "train.cpu_linear=mkl"),
)
LENGTHS = (1024, 2048, 4096, 8192)
QUICK_LENGTHS = (128, 256)
MEMORY_RANKS = (2, 4)
PRELOAD = ("benchmarks.peers.torch_context",)
TOLERANCE = 1e-4
"""Allowed difference of outputs and gradients, relative to their largest value, and of losses and norms."""
PUBLIC_API_S = 60.0
"""Seconds for which torch's public function is tried; the tried computation takes milliseconds."""
ONE, RING, ULYSSES, USP = "one process", "ring", "Ulysses", "USP"
ROTATIONS = {"torch, all-gather": "allgather", "torch, all-to-all": "alltoall"}
WAYS = (ONE, RING, ULYSSES, USP, *ROTATIONS)


def layouts(ranks: int) -> dict[str, Layout]:
    """Returns the layouts to compare on `ranks` processes, the first of them one process. torch orders tokens alike."""
    found = {ONE: Layout(), RING: Layout(cp=ranks), ULYSSES: Layout(cp=ranks, cp_ulysses=ranks)}
    if ranks > 2:
        found[USP] = Layout(cp=ranks, cp_ulysses=2)
    return found | dict.fromkeys(ROTATIONS, Layout(cp=ranks))


def load(length: int, layout: Layout) -> Job:
    words = [f"layout.cp={layout.cp}", f"layout.cp_ulysses={layout.cp_ulysses}", f"model.seq_len={length}"]
    return load_file(ROOT / JOB, [*MODEL, *words]).job


def held(layout: Layout, length: int, rank: int) -> Tensor:
    """Positions of the tokens that a rank holds."""
    return torch.tensor([place for run in sequence.rank_positions(layout, length, rank) for place in run])


def one_layer(way: str, job: Job, layout: Layout) -> Transformer:
    """Returns the model with one layer, whose attention communicates in one of the ways. Weights get no gradients."""
    model = Transformer(replace(job.model, n_layers=1)).requires_grad_(False)
    if way in ROTATIONS:
        torch_context.connect(model, ROTATIONS[way])
    elif layout.cp > 1:
        context.connect(model, meshes.build(layout, "cpu"))
    return model


def attention(ranks: Ranks, length: int, rounds: int, seconds: float) -> Turns:
    """Takes one rank's turns at attention forward and backward. Raises AssertionError if results differ."""
    prepare()
    steps: dict[str, Callable[[], Any]] = {}
    expected: list[Tensor] = []
    for way, layout in layouts(ranks.world).items():
        job = load(length, layout)
        core, size = _core(one_layer(way, job, layout)), job.model.head_size
        places = held(layout, length, ranks.rank if layout.cp > 1 else 0)
        # As the projections leave them: the heads of a token together. The last is the output's gradient.
        whole = torch.randn(4, 1, length, job.model.n_heads, size, generator=torch.Generator().manual_seed(0))
        *inputs, gradient = (x[:, places].transpose(1, 2) for x in whole)
        for x in inputs:
            x.requires_grad_()
        run = partial(_through, core, inputs, gradient)
        if way == ONE:
            steps[way] = run if ranks.rank == 0 else lambda: None
            found = run() if ranks.rank == 0 else [torch.empty_like(gradient).contiguous() for _ in range(4)]
            expected = [x.detach().contiguous() for x in found]
            for x in expected:
                dist.broadcast(x, 0)
            continue
        steps[way] = run
        for value, other in zip(run(), expected, strict=True):
            error = (value - other[:, :, places]).abs().max() / other.abs().max()
            assert error < TOLERANCE, f"{way}, {length} tokens: output or gradients differ by {error:.1e}"
    return take_turns(steps, rounds, seconds)


def training(ranks: Ranks, length: int, rounds: int, seconds: float) -> Turns:
    """Takes one rank's turns at optimizer steps. Raises AssertionError if losses or gradient norms differ."""
    prepare()
    drawn = np.random.default_rng(0).integers(load(length, Layout()).model.vocab_size, size=(1, length + 1))
    micro = MicroBatch(drawn[:, :-1].copy(), drawn[:, 1:].copy(), np.arange(1))
    tokens, targets = torch.from_numpy(micro.tokens), torch.from_numpy(micro.targets)
    steps: dict[str, Callable[[], Any]] = {}
    for way, layout in layouts(ranks.world).items():
        job = load(length, layout)
        if way in ROTATIONS:
            step = torch_context.step_of(job, ROTATIONS[way], held(layout, length, ranks.rank))
            steps[way] = partial(step, tokens, targets)
        elif way == ONE:
            steps[way] = partial(_step, alone(job), micro) if ranks.rank == 0 else lambda: None
        else:
            mesh = meshes.build(layout, "cpu")
            steps[way] = partial(_step, Stepper(job, mesh, torch.device("cpu"), job.model.vocab_size), micro)
    agree({way: step() for way, step in steps.items()}, TOLERANCE)
    return take_turns(steps, rounds, seconds)


def memory(ranks: Ranks, length: int) -> dict[str, tuple[int, int]]:
    """Returns the bytes that a block saves on this rank, and its peak, by way."""
    prepare()
    found: dict[str, tuple[int, int]] = {}
    for way, layout in layouts(ranks.world).items():
        job = load(length, layout)
        model = one_layer(way, job, layout)
        places = held(layout, length, ranks.rank if layout.cp > 1 else 0)
        rotary = model.rotary(places, torch.float32)
        if way == ONE and ranks.rank > 0:
            found[way] = (0, 0)
            continue
        with Alive() as alive:
            x = torch.randn(1, len(places), job.model.d_model, requires_grad=True)
            y = model.blocks["0"](x, rotary, None, None)
            kept = alive.now()
            y.backward(torch.ones_like(y))
        found[way] = kept, alive.peak
        del x, y
    return found


class Alive(TorchDispatchMode):
    """Counts the storages that operations create, while they are alive, with their size at the moment: FSDP2 empties
    those of whole parameters. Those that existed before do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        # By identity, which is not used again as long as there are weak references.
        self._met: dict[int, StorageWeakRef] = {}
        self._made: dict[int, StorageWeakRef] = {}

    def now(self) -> int:
        """Returns the bytes alive."""
        self._made = {key: made for key, made in self._made.items() if not made.expired()}
        return sum(torch.UntypedStorage._new_with_weak_ptr(made.cdata).nbytes() for made in self._made.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in _storages((args, kwargs)):
            if storage._cdata not in self._made:
                self._met[storage._cdata] = StorageWeakRef(storage)
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in self._met:
                self._made[storage._cdata] = StorageWeakRef(storage)
        self.peak = max(self.peak, self.now())
        return result


def balance(ranks: int, length: int) -> dict[str, float]:
    """Returns the query-key pairs of the fullest rank as a multiple of the mean: with a ring's zig-zag parts, and with
    contiguous parts."""
    zigzag = [
        sum(place + 1 for run in sequence.rank_positions(Layout(cp=ranks), length, rank) for place in run)
        for rank in range(ranks)
    ]
    share = length // ranks
    runs = [sum(range(rank * share + 1, (rank + 1) * share + 1)) for rank in range(ranks)]
    return {name: max(pairs) * ranks / sum(pairs) for name, pairs in (("zig-zag", zigzag), ("contiguous", runs))}


def public_api(seconds: float) -> str:
    """Returns the outcome of torch's own function on two processes."""
    with Pool(2, PRELOAD) as pool:
        try:
            pool.run(torch_context.public_api, 2, timeout=seconds)
        except TimeoutError:
            return f"is not done with a few tokens after {seconds:.0f} s"
        except Exception as error:  # torch's error is the result
            return f"raises {type(error).__name__}: {str(error).splitlines()[0].rstrip('.')}"
    return "works"


def table(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Returns times and bytes, a row per length, with their ratios."""
    rows: list[tuple[str, ...]] = [
        ("", *WAYS, *(f"{ONE} / {way}" for way in (RING, ULYSSES, USP)), f"torch's better / {RING}")
    ]
    for ranks, found in result["worlds"].items():
        for kind in ("attention", "step"):
            for length, cell in found[kind].items():
                shown = [f"{1000 * cell['median_s'][way]:,.0f} ms" if way in cell["median_s"] else "" for way in WAYS]
                rows.append((f"{kind}, {ranks} processes, {length:,} tokens", *shown, *_ratios(cell["ratios"])))
    for ranks, found in result["memory"].items():
        for length, ways in found.items():
            for number, kind in enumerate(("kept", "peak")):
                size = {way: both[number] for way, both in ways.items()}
                shown = [f"{size[way] / 2**20:,.2f} MiB" if way in size else "" for way in WAYS]
                rows.append((f"{kind}, {ranks} processes, {length:,} tokens", *shown, *_ratios(_compared(size))))
    return rows


def seen(result: dict[str, Any]) -> str:
    """Returns a summary of the figures in words."""
    said = []
    for ranks, found in result["worlds"].items():
        over = f", on {result['machine']['cores']} cores" if ranks > result["machine"]["cores"] else ""
        for kind in ("attention", "step"):
            ratios = _ranges([cell["ratios"] for cell in found[kind].values()])
            peers = ratios.pop("torch")
            said.append(
                f"{kind.capitalize()} on {ranks} processes{over}, speed as a multiple of one process's, over the "
                f"lengths: {_list(ratios)}. torch's ring, with its faster rotation, takes {peers} our ring's time."
            )
    for ranks, found in result["memory"].items():
        kept, peak = (
            _ranges([_compared({way: both[i] for way, both in ways.items()}) for ways in found.values()])
            for i in (0, 1)
        )
        peers = kept.pop("torch"), peak.pop("torch")
        said.append(
            f"One process's memory of a block as a multiple of that on each of {ranks} ranks: kept {_list(kept)}; peak "
            f"{_list(peak)}. torch's ring, with its leaner rotation, keeps {peers[0]} what ours does, its peak "
            f"is {peers[1]} ours."
        )
    for ranks, pairs in result["balance"].items():
        said.append(
            f"In a ring of {ranks} in zig-zag the rank with most pairs of query and key has {pairs['zig-zag']:.3f} × "
            f"the mean; with one run of tokens a rank it would be {pairs['contiguous']:.3f} ×."
        )
    return " ".join([*said, f"torch's public `context_parallel()` on this CPU: it {result['public_api']}."])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="numbers of processes")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=9, help="at most, for each length")
    parser.add_argument("--seconds", type=float, default=15, help=f"of a length, after {MIN_ROUNDS} rounds")
    parser.add_argument("--quick", action="store_true", help="2 rounds of short sequences; prints JSON, writes nothing")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args(argv)
    lengths, rounds = (QUICK_LENGTHS, 2) if options.quick else (options.lengths, options.rounds)
    result: dict[str, Any] = {"benchmark": "context", "machine": machine(), "model": MODEL, "rounds": rounds}
    result |= {"worlds": {}, "memory": {}, "balance": {ranks: balance(ranks, max(lengths)) for ranks in MEMORY_RANKS}}
    result["public_api"] = public_api(2.0 if options.quick else PUBLIC_API_S)
    with Pool(max(*options.ranks, *MEMORY_RANKS), PRELOAD) as pool:
        for ranks in options.ranks:
            result["worlds"][ranks] = found = {"attention": {}, "step": {}}
            for kind, fn in (("attention", attention), ("step", training)):
                for length in lengths:
                    print(f"{kind}, {ranks} processes, {length} tokens", file=sys.stderr, flush=True)
                    answers = pool.run(fn, ranks, length, rounds, options.seconds, timeout=1200)
                    found[kind][length] = _cell(lasted(answers))
        for ranks in MEMORY_RANKS:
            print(f"memory, {ranks} processes", file=sys.stderr, flush=True)
            result["memory"][ranks] = {
                length: _fullest(pool.run(memory, ranks, length, timeout=600)) for length in lengths
            }
    if not options.quick:
        quiet = contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext()
        with quiet:
            title = "Context parallelism, in turn with torch's ring attention"
            save("context", result, table(result), title, seen(result))
    if options.quick or options.json:
        print(json.dumps(result, indent=1))


def _cell(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Returns medians of one length, and the contenders' time ratios."""
    medians = {way: statistics.median(values) for way, values in seconds.items()}
    ratios = {way: ratio(seconds, ONE, way) for way in (RING, ULYSSES, USP) if way in seconds}
    ratios["torch"] = ratio(seconds, min(ROTATIONS, key=medians.__getitem__), RING)
    return {"median_s": medians, "ratios": ratios, "seconds": seconds}


def _compared(size: Mapping[str, int]) -> dict[str, float]:
    """Returns the same ratios, of bytes."""
    ratios = {way: size[ONE] / size[way] for way in (RING, ULYSSES, USP) if way in size}
    return ratios | {"torch": min(size[way] for way in ROTATIONS) / size[RING]}


def _fullest(answers: Sequence[dict[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    """Returns saved bytes and peak on the rank with the most."""
    return {way: (max(a[way][0] for a in answers), max(a[way][1] for a in answers)) for way in answers[0]}


def _ratios(found: Mapping[str, float]) -> list[str]:
    return [f"**{found[way]:.3f} ×**" if way in found else "" for way in (RING, ULYSSES, USP, "torch")]


def _ranges(found: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Returns the smallest and the largest value of each ratio, or one value if they are equal."""
    ranges = {}
    for way in found[0]:
        least, greatest = (f"{pick(ratios[way] for ratios in found):.2f}" for pick in (min, max))
        ranges[way] = f"{least} ×" if least == greatest else f"{least} to {greatest} ×"
    return ranges


def _list(ranges: Mapping[str, str]) -> str:
    return ", ".join(f"{way} {shown}" for way, shown in ranges.items())


def _core(model: Transformer) -> CoreAttention:
    return next(module for module in model.modules() if isinstance(module, CoreAttention))


def _through(core: CoreAttention, inputs: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
    """Returns the output, and the gradients of the inputs."""
    o = core(*inputs, None)
    return [o, *torch.autograd.grad(o, inputs, gradient)]


def _step(stepper: Stepper, micro: MicroBatch) -> tuple[float, float]:
    step = stepper.step(StepInputs([micro], 0, micro.targets.size, stepper.job.optimizer.lr))
    return step.loss, step.grad_norm


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


if __name__ == "__main__":
    sys.exit(main())
