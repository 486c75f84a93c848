"""The cost of sharded training: layouts of two processes × one thread against the peers that pip or a folder gives.

    python -m benchmarks.sharding [--rounds 5] [--steps 40] [--only REGEX]

A GPT of 10.7 million parameters (benchmarks/sharding.yaml), fp32; peers that have their own Llama only are compared
with ours of the same shape. Data-parallel contenders process one micro-batch of 4
× 256 tokens per rank, tensor-parallel ones and single processes one together. Round 0 runs every contender for its
warm-up only: it finds those that cannot run, fills caches, and gives the processor time of the start-up, which is
subtracted later. Then rounds are interleaved: every contender once per round, in turn. A round's figure is the median
step after the warm-up, results are medians over rounds, and ratios are taken round by round. benchmarks/contenders.py
describes how one run is measured. Peers compute on torch's default matrix library; ours chooses the faster one, and the
lines "MKL" show the result without that choice. NANOGPT and PICOTRON name the folders of their repositories.

With `--only`, contenders whose name does not match are skipped, and nothing is written to benchmarks/results.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import contenders as c
from benchmarks.contenders import Contender, NotRunError, Run
from benchmarks.report import machine, save
from phalanx.blocks.parameters import train_flops_per_step
from phalanx.check.load import load_file
from phalanx.config.job import Job
from phalanx.data.prepare import prepare

STARTUP_MARK_S = 6.0

Rounds = dict[Contender, list[Run]]
"""The runs of every contender, round by round; none for those that cannot run."""


@dataclass(frozen=True)
class Ratio:
    """The tokens/s of a contender relative to the fastest of some others in the same round."""

    name: str
    contender: Contender
    others: Sequence[Contender]
    mark: float | None = None
    """The required minimum; None if the ratio is only shown."""


RATIOS = [
    Ratio("one process / nanoGPT", c.ONE, [c.NANOGPT], 2.0),
    Ratio("DDP / best data-parallel peer", c.DDP, c.DATA_PARALLEL_PEERS, 2.0),
    Ratio("ZeRO-3 / best peer that shards parameters", c.ZERO[3], c.SHARDED_PEERS, 2.0),
    Ratio("ZeRO-3, Llama / torchtitan", c.ZERO3_LLAMA, [c.TORCHTITAN], 2.0),
    Ratio("TP / best of Megatron-core and parallelize_module", c.TP, [c.MEGATRON, c.TORCH_TP], 2.2),
    Ratio("CP / picotron", c.CP, [c.PICOTRON_CP], 1.9),
    Ratio("PP / picotron", c.PP, [c.PICOTRON_PP], 2.0),
    Ratio("one process on MKL / nanoGPT", c.MKL[c.ONE.name], [c.NANOGPT], 1.1),
    Ratio("DDP on MKL / best data-parallel peer", c.MKL[c.DDP.name], c.DATA_PARALLEL_PEERS, 1.2),
    Ratio("ZeRO-3 on MKL / best peer that shards parameters", c.MKL[c.ZERO[3].name], c.SHARDED_PEERS, 1.25),
    Ratio("TP on MKL / best of Megatron-core and parallelize_module", c.MKL[c.TP.name], [c.MEGATRON, c.TORCH_TP], 1.5),
    Ratio("CP on MKL / picotron", c.MKL[c.CP.name], [c.PICOTRON_CP], 1.3),
    Ratio("PP on MKL / picotron", c.MKL[c.PP.name], [c.PICOTRON_PP], 1.15),
    Ratio("ZeRO-1 / best data-parallel peer", c.ZERO[1], c.DATA_PARALLEL_PEERS),
    Ratio("ZeRO-2 / best data-parallel peer", c.ZERO[2], c.DATA_PARALLEL_PEERS),
    Ratio("TP + SP / parallelize_module", c.TP_SP, [c.TORCH_TP_SP]),
    Ratio("TP / one process", c.TP, [c.ONE], 1.2),
    Ratio("one process / plain loop", c.ONE, [c.LOOP]),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", default="", metavar="REGEX")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: it takes one at least")
    if options.steps <= c.WARM_UP:
        parser.error(f"--steps {options.steps}: the first {c.WARM_UP} are the warm-up, so it takes more")
    job = load_file(c.ROOT / c.JOB).job
    prepare(job.data)  # not part of anyone's start-up
    chosen = [contender for contender in c.ALL if re.search(options.only, contender.name)]
    peaks = {ranks: gemm_peak(ranks) for ranks in (1, 2)}
    warm_ups, not_run = first_round(chosen)
    rounds: Rounds = {contender: [] for contender in warm_ups}
    for number in range(1, options.rounds + 1):
        for contender in list(rounds) if number % 2 else list(reversed(rounds)):
            try:
                rounds[contender].append(c.run(contender, options.steps))
                say(f"round {number}: {contender.name}: {tokens_per_s(job, contender, rounds[contender][-1]):,.0f}")
            except NotRunError as error:
                not_run[contender] = f"round {number}: {error}"
                say(f"{contender.name}: {not_run[contender]}")
        rounds = {contender: runs for contender, runs in rounds.items() if contender not in not_run}
    result: dict[str, Any] = {
        "benchmark": "sharding",
        "machine": machine(),
        "gemm_gflops": {f"{ranks} ranks at once, each": peak / 1e9 for ranks, peak in peaks.items()},
        "contenders": {
            contender.name: figures(job, contender, warm_ups[contender], runs, peaks[contender.ranks])
            for contender, runs in rounds.items()
        },
        "not_run": {contender.name: why for contender, why in not_run.items()},
        "marks": [*(judged(job, ratio, rounds) for ratio in RATIOS), *startup_marks(rounds)],
    }
    for ratio, mark in zip(RATIOS, result["marks"], strict=False):
        mark["processor"] = processor_ratio(ratio, result["contenders"])
    table = [*contenders_table(result, chosen), *marks_table(result["marks"])]
    if options.only:
        print("\n".join(" | ".join(row) for row in table))
    else:
        save("sharding", result, table, "What sharded training costs, against peers")


def first_round(chosen: Sequence[Contender]) -> tuple[dict[Contender, Run], dict[Contender, str]]:
    """Runs the warm-up of every contender; returns the runs, and why some could not run."""
    warm_ups: dict[Contender, Run] = {}
    not_run: dict[Contender, str] = {}
    for contender in chosen:
        try:
            warm_ups[contender] = c.run(contender, c.WARM_UP)
            say(f"round 0: {contender.name} runs")
        except NotRunError as error:
            not_run[contender] = str(error)
            say(f"round 0: {contender.name}: not run: {error}")
    return warm_ups, not_run


def gemm_peak(ranks: int) -> float:
    """Returns FLOP/s of one thread in a large fp32 matrix product while `ranks` processes do the same."""
    with tempfile.TemporaryDirectory() as folder:
        return float(c.launch(c.torchrun("benchmarks.gemm_peak", ranks=ranks), Path(folder)).stdout)


def step_tokens(job: Job, contender: Contender) -> int:
    """Returns the tokens of one step, over all ranks."""
    return contender.batches * job.layout.micro_batch * job.model.seq_len


def tokens_per_s(job: Job, contender: Contender, run: Run) -> float:
    return step_tokens(job, contender) / run.step_s


def figures(job: Job, contender: Contender, warm_up: Run, runs: Sequence[Run], peak: float) -> dict[str, Any]:
    """Returns medians over the rounds, and every round's tokens/s."""
    rates = [tokens_per_s(job, contender, run) for run in runs]
    flops = train_flops_per_step(job.model, contender.batches * job.layout.micro_batch)
    tokens = step_tokens(job, contender)
    startups = [run.startup_s for run in runs if run.startup_s is not None]
    return {
        "tokens_per_s": statistics.median(rates),
        "gemm_fraction": statistics.median(rates) / tokens * flops / (contender.ranks * peak),
        "cpu_s_per_1000_tokens": statistics.median(
            1000 * (run.cpu_s - warm_up.cpu_s) / ((run.steps - warm_up.steps) * tokens) for run in runs
        ),
        "peak_mib": statistics.median(run.peak_bytes for run in runs) / 2**20,
        "startup_s": statistics.median(startups) if startups else None,
        "tokens_per_s_by_round": rates,
    }


def judged(job: Job, ratio: Ratio, rounds: Rounds) -> dict[str, Any]:
    """Returns the ratio round by round, its median, and whether that reaches the mark."""
    others = [other for other in ratio.others if other in rounds]
    verdict: dict[str, Any] = {"name": ratio.name, "mark": ratio.mark and f"≥ {ratio.mark}"}
    if ratio.contender not in rounds or not others:
        return verdict | {"value": None, "passed": None}
    values = [
        tokens_per_s(job, ratio.contender, run) / max(tokens_per_s(job, other, rounds[other][i]) for other in others)
        for i, run in enumerate(rounds[ratio.contender])
    ]
    value = statistics.median(values)
    return verdict | {"value": value, "by_round": values, "passed": None if ratio.mark is None else value >= ratio.mark}


def processor_ratio(ratio: Ratio, found: Mapping[str, Any]) -> float | None:
    """Returns the processor time per token of the thriftiest of the others relative to the contender's."""
    used = [found[other.name]["cpu_s_per_1000_tokens"] for other in ratio.others if other.name in found]
    own = found.get(ratio.contender.name)
    return min(used) / own["cpu_s_per_1000_tokens"] if used and own else None


def startup_marks(rounds: Rounds) -> list[dict[str, Any]]:
    """Returns the slowest start of ours: the median over the rounds of the layout that takes longest."""
    starts = [
        statistics.median(run.startup_s for run in runs if run.startup_s is not None)
        for contender, runs in rounds.items()
        if contender.kind == "ours" and runs
    ]
    if not starts:
        return []
    name, mark = "slowest start-up of ours, s", f"≤ {STARTUP_MARK_S:g}"
    return [{"name": name, "mark": mark, "value": max(starts), "passed": max(starts) <= STARTUP_MARK_S}]


def contenders_table(result: dict[str, Any], chosen: Sequence[Contender]) -> list[tuple[str, ...]]:
    table = [("contender", "tokens/s", "of GEMM peak", "CPU-s / 1000 tokens", "peak MiB a rank", "start-up s")]
    for contender in chosen:
        if why := result["not_run"].get(contender.name):
            table.append((contender.name, f"not run: {why.replace('|', '/')}", "", "", "", ""))
            continue
        found = result["contenders"][contender.name]
        startup = "–" if found["startup_s"] is None else f"{found['startup_s']:.1f}"
        row = f"{found['tokens_per_s']:,.0f}", f"{found['gemm_fraction']:.0%}", f"{found['cpu_s_per_1000_tokens']:.3f}"
        table.append((contender.name, *row, f"{found['peak_mib']:,.0f}", startup))
    table += [
        (f"matrix product, {name}", f"{value:,.0f} GFLOP/s", "", "", "", "")
        for name, value in result["gemm_gflops"].items()
    ]
    return table


def marks_table(marks: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    words = {True: "pass", False: "FAIL", None: ""}
    table = [("**ratio or mark**", "**median**", "**asked**", "", "**by CPU-s**", "")]
    for mark in marks:
        value = "not run" if mark["value"] is None else f"{mark['value']:.3f}"
        processor = f"{mark['processor']:.3f}" if mark.get("processor") else ""
        table.append((mark["name"], value, mark["mark"] or "", words[mark["passed"]], processor, ""))
    return table


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
