"""Documents over context-parallel ranks: chunks assigned by cost beside the zig-zag cut, in turn in the same processes.

    python -m benchmarks.documents [--ranks 2 4] [--lengths 4096 8192] [--rows 4] [--rounds 9] [--seconds 30]
                                   [--mean 0.125] [--predicted] [--quick] [--json]

Sequences are packed with documents of log-normal lengths (partition/documents.py, `long_tailed`: sigma 1.5, mean an
eighth of a sequence, or `--mean`). Contenders: the zig-zag cut as it was before (cp_balance=position), the same cut
with the blocks and messages of documents, which shows what skipping alone brings, assignment by cost in chunks, and the
default: whole documents on every rank in the sequences where these are short, without an exchange, and otherwise all
but the long ones whole. Each takes its turn in every round, ratios are taken round by round, and their medians count;
fp32, 1 thread per process. Losses, gradient norms and outputs must agree before anything is measured. Timed are, for
`rows` sequences one after the other:
- attention: forward and backward of one layer's attention;
- step: an optimizer step of a small Llama, its state sharded over the cp ranks.
A turn lasts from the first process's beginning to the last one's end. Where there are more processes than cores it
measures work rather than waiting, so that there are also `busiest`, the processor time of the rank with the most, and
`sent`, the bytes that attention sends in a turn, over all ranks.

`--predicted` measures, instead, steps with documents over steps of whole sequences, both as jobs have them by default,
beside the ratio that `phalanx predict` gives for these documents on cluster=local.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.contenders import JOB, ROOT
from benchmarks.context import MODEL, PRELOAD, TOLERANCE
from benchmarks.report import machine, save
from benchmarks.turns import Turns, agree, lasted, prepare, ratio, take_turns
from phalanx.check.load import load_file
from phalanx.config.clusters import cluster_of
from phalanx.config.job import Job
from phalanx.cost.job_spec import step_spec
from phalanx.cost.prediction import predict
from phalanx.data.loader import MicroBatch
from phalanx.launch.pool import Pool
from phalanx.launch.ranks import Ranks
from phalanx.model.attention import CoreAttention
from phalanx.model.documents import Documents
from phalanx.model.transformer import Transformer
from phalanx.parallel import context
from phalanx.parallel import mesh as meshes
from phalanx.partition.document_sample import DocumentSample
from phalanx.partition.documents import Places, assign, assigned, keys_seen, long_tailed, pairs_of
from phalanx.partition.tensor_slices import ring_positions
from phalanx.train.step import StepInputs, Stepper

DATA = ("data.document_mask=true", "data.corpus=stdlib")
UNMASKED, MASKED = "whole sequences", "documents"
POSITION, BLOCKS, COST, WHOLE = "zig-zag", "zig-zag, blocks of documents", "in chunks", "by default"
WAYS = (POSITION, BLOCKS, COST, WHOLE)
Answer = tuple[Turns, dict[str, list[float]], dict[str, float]]
"""A rank's turns; then, by way, the processor time of each turn, and the bytes that the rank sends in one turn."""


def load(ranks: int, length: int, rows: int, balance: str) -> Job:
    words = [f"layout.cp={ranks}", f"layout.cp_balance={balance}", f"model.seq_len={length}", *DATA]
    return load_file(ROOT / JOB, [*MODEL, *words, f"train.global_batch={rows}"]).job


def compared(length: int, rows: int, ranks: int) -> dict[str, Job]:
    """Returns jobs that differ in data.document_mask alone."""
    masked = load(ranks, length, rows, "auto")
    return {UNMASKED: replace(masked, data=replace(masked.data, document_mask=False)), MASKED: masked}


def predicted(jobs: dict[str, Job], numbers: np.ndarray) -> dict[str, float]:
    """Returns the predicted seconds of a step, by way."""
    found = dict[str, float]()
    for way, job in jobs.items():
        here = replace(job, cluster=replace(cluster_of("local"), devices_per_node=job.layout.world))
        documents = DocumentSample.of(numbers) if way == MASKED else None
        spec = replace(step_spec(here, job.model.vocab_size), documents=documents)
        found[way] = predict(spec).step_time_s
    return found


def beside_whole(ranks: Ranks, length: int, rows: int, mean: float, rounds: int, seconds: float) -> Answer:
    """Takes one rank's turns at optimizer steps with documents and with whole sequences."""
    prepare()
    jobs, every = compared(length, rows, ranks.world), long_tailed(length, rows, mean)
    steps = {way: stepping(job, every if way == MASKED else None)[0] for way, job in jobs.items()}
    for step in steps.values():
        step()
    return timed(steps, rounds, seconds, dict.fromkeys(steps, 0.0))


def cut(way: str, job: Job, numbers: np.ndarray) -> Places:
    """Returns the tokens of every ring position; none where the code for positions cuts."""
    if way == WHOLE:
        return assigned(numbers, job.model, job.layout).places
    if way == COST:
        return assign(keys_seen(numbers, job.model), job.layout.ring).places
    return [ring_positions(job.layout, job.model.seq_len, place) for place in range(job.layout.ring)]


def timed(steps: dict[str, Callable[[], Any]], rounds: int, seconds: float, sent: dict[str, float]) -> Answer:
    """Takes one rank's turns."""
    busy: dict[str, list[float]] = {name: [] for name in steps}

    def run(name: str) -> None:
        began = time.thread_time()
        steps[name]()
        busy[name].append(time.thread_time() - began)

    return take_turns({name: partial(run, name) for name in steps}, rounds, seconds), busy, sent


def attention(ranks: Ranks, length: int, rows: int, mean: float, rounds: int, seconds: float) -> Answer:
    """Takes one rank's turns at attention forward and backward. Raises AssertionError if results differ."""
    prepare()
    job = load(ranks.world, length, rows, "documents")
    model = Transformer(job.model).requires_grad_(False)
    mesh = meshes.build(job.layout, "cpu")
    context.connect(model, mesh, job.layout)
    core = next(module for module in model.modules() if isinstance(module, CoreAttention))
    shape = 4, 1, length, job.model.n_heads, job.model.head_size
    whole = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    every = long_tailed(length, rows, mean)
    made: dict[str, list[tuple[list[torch.Tensor], torch.Tensor, np.ndarray, torch.Tensor]]] = {}
    for way in WAYS:
        made[way] = []
        for row in range(rows):
            numbers = every[row : row + 1]
            places = cut(way, job, numbers)
            held = torch.tensor([p for run in places[ranks.rank] for p in run])
            *inputs, gradient = (x[:, held].transpose(1, 2).clone() for x in whole)
            made[way].append(([x.requires_grad_() for x in inputs], gradient, numbers, held))

    def run(way: str) -> list[torch.Tensor]:
        found = []
        for inputs, gradient, numbers, held in made[way]:
            # A micro-batch's own: what layers share is computed again for each.
            places = () if way == POSITION else cut(way, job, numbers)
            o = core(*inputs, None, Documents(torch.from_numpy(numbers), places, numbers, ranks.rank))
            sums = (x.new_zeros(1, x.shape[1], length, x.shape[3]) for x in (o, *inputs))
            parts = (o.detach(), *torch.autograd.grad(o, inputs, gradient))
            found += [whole.index_copy(2, held, part) for whole, part in zip(sums, parts, strict=True)]
        return found

    expected, sent = None, dict[str, float]()
    for way in WAYS:
        mesh.ledger.clear()
        found = torch.stack([x.double().square().sum() for x in run(way)])
        sent[way] = sum(entry.sent for entry in mesh.ledger.entries.values())
        torch.distributed.all_reduce(found)
        expected = found if expected is None else expected
        assert (found / expected - 1).abs().max() < TOLERANCE, f"{way}: output or gradients differ"
    return timed({way: partial(run, way) for way in WAYS}, rounds, seconds, sent)


def training(ranks: Ranks, length: int, rows: int, mean: float, rounds: int, seconds: float) -> Answer:
    """Takes one rank's turns at optimizer steps. Raises AssertionError if losses or gradient norms differ."""
    prepare()
    every = long_tailed(length, rows, mean)
    steps: dict[str, Callable[[], Any]] = {}
    ledgers = {}
    for way in WAYS:
        job = load(ranks.world, length, rows, "position" if way == POSITION else "documents")
        steps[way], stepper = stepping(job, every)
        ledgers[way] = stepper.mesh.ledger
        if way in (BLOCKS, COST):
            vars(stepper)["assigned"] = lambda numbers, _, way=way, job=job: cut(way, job, numbers)
    agree({way: step() for way, step in steps.items()}, TOLERANCE)
    sent = {way: ledger.traffic(1).get("cp", {}).get("send", 0) for way, ledger in ledgers.items()}
    return timed(steps, rounds, seconds, sent)


def stepping(job: Job, every: np.ndarray | None) -> tuple[Callable[[], tuple[float, float]], Stepper]:
    """Returns an optimizer step of a job on random tokens, each sequence a micro-batch, with the documents `every`."""
    rows, length = job.train.global_batch, job.model.seq_len
    drawn = np.random.default_rng(0).integers(job.model.vocab_size, size=(rows, length + 1))
    micros = list[MicroBatch]()
    for row in range(rows):
        documents = None if every is None else every[row : row + 1]
        tokens = drawn[row : row + 1]
        micros.append(MicroBatch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), np.array([row]), documents))
    stepper = Stepper(job, meshes.build(job.layout, "cpu"), torch.device("cpu"), job.model.vocab_size)

    def step() -> tuple[float, float]:
        found = stepper.step(StepInputs(micros, 0, rows * length, job.optimizer.lr))
        return found.loss, found.grad_norm

    return step, stepper


def imbalance(ranks: int, length: int, rows: int, mean: float) -> dict[str, float]:
    """Returns the most pairs of a rank over their mean, the mean over rows, by way."""
    job, every = load(ranks, length, rows, "documents"), long_tailed(length, rows, mean)
    found, numbers = dict[str, float](), np.split(every, rows)
    seen = [keys_seen(each, job.model) for each in numbers]
    for way in (POSITION, COST, WHOLE):
        each = [pairs_of(s, cut(way, job, n)).imbalance for s, n in zip(seen, numbers, strict=True)]
        found[way] = statistics.fmean(each)
    found["skipped"] = statistics.fmean(assigned(n, job.model, job.layout).skips(job.layout) for n in numbers)
    return found


def cell(answers: Sequence[Answer]) -> dict[str, Any]:
    """Returns medians and ratios of one length."""
    seconds = lasted([turns for turns, *_ in answers])
    busiest = {way: [max(each) for each in zip(*(busy[way] for _, busy, _ in answers), strict=True)] for way in WAYS}
    work = {way: [sum(each) for each in zip(*(busy[way] for _, busy, _ in answers), strict=True)] for way in WAYS}
    others = WAYS[:-1]
    return {
        "median_s": {way: statistics.median(values) for way, values in seconds.items()},
        "ratios": {way: ratio(seconds, way, WHOLE) for way in others},
        "busiest_ratios": {way: ratio(busiest, way, WHOLE) for way in others},
        "work_ratios": {way: ratio(work, way, WHOLE) for way in others},
        "sent": {way: sum(sent[way] for *_, sent in answers) for way in WAYS},
        "seconds": seconds,
        "busiest_s": busiest,
    }


def table(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Returns times and their ratios, a row per length."""
    others = WAYS[:-1]
    ratios = [f"{way} / {WHOLE}" for way in others]
    busiest = [f"processor time of the busiest rank: {name}" for name in ratios]
    fullest = f"pairs of the fullest rank over the mean: {POSITION}, {COST}, {WHOLE}"
    sent = f"attention's MiB on the wire: {', '.join(WAYS)}"
    rows: list[tuple[str, ...]] = [("", *WAYS, *ratios, *busiest, fullest, sent, "sequences without an exchange")]
    for ranks, world in result["worlds"].items():
        for kind in ("attention", "step"):
            for length, found in world[kind].items():
                pairs = world["imbalance"][length]
                rows.append(
                    (
                        f"{kind}, {ranks} processes, {result['rows']} × {int(length):,} tokens",
                        *(f"{1000 * found['median_s'][way]:,.0f} ms" for way in WAYS),
                        *(f"**{found['ratios'][way]:.2f} ×**" for way in others),
                        *(f"{found['busiest_ratios'][way]:.2f} ×" for way in others),
                        ", ".join(f"{pairs[way]:.2f}" for way in (POSITION, COST, WHOLE)),
                        ", ".join(f"{found['sent'][way] / 2**20:.1f}" for way in WAYS),
                        f"{pairs['skipped']:.0%}",
                    )
                )
    return rows


def with_whole(options: argparse.Namespace, result: dict[str, Any], lengths: list[int], rounds: int) -> None:
    """Measures and predicts steps with documents beside steps of whole sequences, prints or saves them."""
    rows: list[tuple[str, ...]] = [
        ("", UNMASKED, MASKED, "measured ratio, processor time of the busiest rank", "predicted ratio")
    ]
    with Pool(max(options.ranks), PRELOAD) as pool:
        for ranks in options.ranks:
            for length in lengths:
                given = length, options.rows, options.mean, rounds, options.seconds
                answers = pool.run(beside_whole, ranks, *given, timeout=1200)
                busiest = {
                    way: [max(each) for each in zip(*(busy[way] for _, busy, _ in answers), strict=True)]
                    for way in (UNMASKED, MASKED)
                }
                expected = predicted(
                    compared(length, options.rows, ranks), long_tailed(length, options.rows, options.mean)
                )
                found = {"busiest_s": busiest, "ratio": ratio(busiest, MASKED, UNMASKED), "predicted_s": expected}
                result["worlds"].setdefault(ranks, {})[length] = found
                rows.append(
                    (
                        f"{ranks} processes, {options.rows} × {length:,} tokens",
                        *(f"{1000 * statistics.median(busiest[way]):,.0f} ms" for way in (UNMASKED, MASKED)),
                        f"**{found['ratio']:.2f}**",
                        f"{expected[MASKED] / expected[UNMASKED]:.2f}",
                    )
                )
    if options.quick or options.json:
        print(json.dumps(result, indent=1))
    if not options.quick:
        name = f"documents_predicted_{round(1 / options.mean)}"
        title = f"Steps with documents, with a mean of 1/{1 / options.mean:.0f} of a sequence, over whole sequences"
        words = "Predicted is the ratio of step times on cluster=local."
        save(name, result, rows, title, words, f"documents --predicted --mean {options.mean:g}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of processes")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192], help="tokens of a sequence")
    parser.add_argument("--rows", type=int, default=4, help="sequences, one after the other")
    parser.add_argument("--mean", type=float, default=1 / 8, help="mean length of documents, in sequences")
    parser.add_argument("--rounds", type=int, default=9, help="at most, for each length")
    parser.add_argument("--seconds", type=float, default=30, help="of a length, after 3 rounds")
    parser.add_argument("--predicted", action="store_true", help="steps with documents over whole sequences")
    parser.add_argument("--quick", action="store_true", help="2 rounds of short sequences; prints JSON, writes nothing")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args(argv)
    lengths, rounds = ([256], 2) if options.quick else (options.lengths, options.rounds)
    result: dict[str, Any] = {"benchmark": "documents", "machine": machine(), "model": MODEL, "worlds": {}}
    result["rows"], result["mean"] = options.rows, options.mean
    if options.predicted:
        with_whole(options, result, lengths, rounds)
        return
    with Pool(max(options.ranks), PRELOAD) as pool:
        for ranks in options.ranks:
            result["worlds"][ranks] = world = {"attention": {}, "step": {}, "imbalance": {}}
            for length in lengths:
                world["imbalance"][length] = imbalance(ranks, length, options.rows, options.mean)
                for kind, fn in (("attention", attention), ("step", training)):
                    print(f"{kind}, {ranks} processes, {length} tokens", file=sys.stderr, flush=True)
                    given = length, options.rows, options.mean, rounds, options.seconds
                    found = cell(pool.run(fn, ranks, *given, timeout=1200))
                    world[kind][length] = found
    if options.quick or options.json:
        print(json.dumps(result, indent=1))
    if not options.quick:
        words = "More processes than cores share them, so that a turn then measures the work of all ranks; "
        words += "the balance shows in the processor time of the busiest rank."
        name = "documents" if options.mean == 1 / 8 else f"documents_{round(1 / options.mean)}"
        title = f"Documents over context-parallel ranks, with a mean of 1/{1 / options.mean:.0f} of a sequence"
        save(name, result, table(result), title, words, f"documents --mean {options.mean:g}")


if __name__ == "__main__":
    sys.exit(main())
