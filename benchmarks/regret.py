"""The planner's regret: every layout of 1, 2 and 4 processes of this machine, predicted and measured.

    PHALANX_HOME=/tmp/home python -m benchmarks.regret [--resume] [--models small wide] [--most 20] [--rounds 5]

Three small models (benchmarks/regret_layouts.py), each with the same tokens per step under every layout. First a
survey: each layout starts in warm processes (launch/pool.py), makes a warm-up step and then a few that count, the
layouts in random order. Then the fastest and the planner's choice take turns for some rounds: top-1 regret is the
median of the rounds' ratios of the chosen one to the fastest, less 1. One process has as many threads as the machine
has cores, two share them, four have one each, as in `phalanx train`.

The cluster is `local`, as `phalanx bench compute` and `phalanx bench comm` measured it: run them right before, into a
PHALANX_HOME of your own, on an otherwise idle machine. With --resume, steps already in the file are not measured again;
--keep measures nothing and only reports.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.regret_layouts import MODELS, WORLDS, family, job_of, layouts
from benchmarks.regret_record import Entry, Record, kendall
from benchmarks.regret_steps import seconds_of
from benchmarks.report import RESULTS, machine, save
from benchmarks.truth.picture import AccuracyPanel, scatter
from phalanx.config import clusters
from phalanx.config.cluster import Cluster
from phalanx.config.layout import Layout
from phalanx.cost.job_spec import step_spec
from phalanx.cost.prediction import predict
from phalanx.launch.pool import Pool
from phalanx.plan.planner import search
from phalanx.plan.space import plan_request

MAX_REGRET = 0.10
"""Allowed top-1 regret."""
FINALISTS = 7
"""Number of the survey's fastest layouts that take part in the final rounds."""
STEPS = {"survey": 2, "final": 4}
"""Steps that count, of each layout in each round. Steps of a tenth of a second vary by a third here: five final rounds
of two steps found differences between layouts that twelve of four find equally fast."""
ROUNDS = 12
STEPS_FILE = Path(tempfile.gettempdir()) / "phalanx_regret.jsonl"


def predicted(name: str, layout: Layout, machine: Cluster) -> float:
    """Returns seconds of a step, on as many processes of the measured machine as the layout needs."""
    job = replace(job_of(name, layout), cluster=replace(machine, devices_per_node=layout.world))
    return predict(step_spec(job, job.model.vocab_size)).step_time_s


def choice(name: str, machine: Cluster) -> Layout:
    """Returns the planner's layout for 1, 2 or 4 processes of the measured machine."""
    job = replace(job_of(name, Layout()), cluster=replace(machine, devices_per_node=max(WORLDS)))
    request = replace(plan_request(job, job.model.vocab_size), worlds=WORLDS)
    return search(request).best[0].layout


def survey(pool: Pool, record: Record, found: dict[str, list[Layout]], rounds: int) -> None:
    """Measures every layout of every model, all in one random order, in `rounds` rounds."""
    for number in range(rounds):
        turns = [(name, layout) for name, those in found.items() for layout in those]
        random.Random(number).shuffle(turns)
        _take(pool, record, "survey", number, turns)


def finals(pool: Pool, record: Record, name: str, chosen: Layout, rounds: int) -> None:
    """Measures the fastest layout of a model and the chosen one, in turns."""
    seconds = record.seconds(name, "survey")
    best = sorted(seconds, key=seconds.__getitem__)[:FINALISTS]
    among = list(dict.fromkeys([*best, chosen]))
    for number in range(rounds):
        _take(pool, record, "final", number, [(name, one) for one in (among if number % 2 else among[::-1])])


def _take(pool: Pool, record: Record, phase: str, number: int, turns: Sequence[tuple[str, Layout]]) -> None:
    left = [turn for turn in turns if not record.has(phase, number, *turn)]
    for place, (name, layout) in enumerate(left):
        steps = seconds_of(pool, name, layout, STEPS[phase])
        record.add(Entry(phase, number, name, layout, tuple(steps)))
        if place % 20 == 0:
            told = f"{name}, {layout.line()}: {1e3 * min(steps):.0f} ms"
            print(f"{phase} {number + 1}: {place + 1} of {len(left)}, {told}", file=sys.stderr, flush=True)


def outcome(record: Record, name: str, machine: Cluster) -> dict[str, Any]:
    """Returns the results of one model. The chosen layout must be in the final rounds."""
    measured = record.seconds(name, "survey")
    guessed = {layout: predicted(name, layout, machine) for layout in measured}
    chosen = choice(name, machine)
    final = record.seconds(name, "final")
    best = min(final, key=final.__getitem__)
    ratios = [guessed[layout] / measured[layout] for layout in measured]
    return {
        "model": name,
        "layouts": len(measured),
        "best": best.line(),
        "best_s": final[best],
        "chosen": chosen.line(),
        "chosen_s": final[chosen],
        "regret": record.ratio(name, chosen, best) - 1,
        "kendall_tau": kendall(list(guessed.values()), list(measured.values())),
        "predicted_over_measured": statistics.median(ratios),
        "points": [
            {"layout": one.line(), "family": family(one), "measured_s": measured[one], "predicted_s": guessed[one]}
            for one in measured
        ],
    }


def table(outcomes: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    rows = [("model", "layouts", "Kendall's tau", "fastest", "", "chosen", "", "regret", "")]
    for one in outcomes:
        verdict = "pass" if one["regret"] <= MAX_REGRET else "FAIL"
        times = [f"{1e3 * one[which]:.0f} ms" for which in ("best_s", "chosen_s")]
        rows.append(
            (
                *(one["model"], str(one["layouts"]), f"{one['kendall_tau']:.2f}"),
                *(f"`{one['best']}`", times[0], f"`{one['chosen']}`", times[1]),
                *(f"**{one['regret']:+.1%}**", verdict),
            )
        )
    return rows


def picture(outcomes: Sequence[dict[str, Any]]) -> str:
    """Returns predicted against measured step times, a panel per model, a colour for the axes that a layout uses."""
    panels = []
    for one in outcomes:
        points: dict[str, list[tuple[float, float]]] = {}
        for point in one["points"]:
            points.setdefault(point["family"], []).append((point["measured_s"], point["predicted_s"]))
        panels.append(AccuracyPanel(one["model"], "s", dict(sorted(points.items()))))
    return scatter(panels, "Steps of every layout of 1, 2 and 4 processes: predicted against measured")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--most", type=int, default=0, help="of each number of processes, a random sample (0: all)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="final rounds")
    parser.add_argument("--surveys", type=int, default=1, help="rounds of the survey")
    parser.add_argument("--steps", type=Path, default=STEPS_FILE, help="file of measured steps, JSON lines")
    parser.add_argument("--resume", action="store_true", help="keep what the file of steps has")
    parser.add_argument("--keep", action="store_true", help="report what the file of steps has, measure nothing")
    options = parser.parse_args(argv)
    cluster = clusters.read_local()
    record = Record(options.steps, resume=options.resume or options.keep)
    if not options.keep:
        found = {
            name: [one for n in WORLDS for one in _sample(layouts(name, n), options.most)] for name in options.models
        }
        with Pool(max(WORLDS)) as pool:
            survey(pool, record, found, options.surveys)
            for name in found:
                finals(pool, record, name, choice(name, cluster), options.rounds)
    outcomes = [outcome(record, name, cluster) for name in options.models]
    result = {"benchmark": "regret", "machine": machine(), "asked": MAX_REGRET, "models": outcomes}
    (RESULTS / "regret.svg").write_text(picture(outcomes), encoding="utf-8")
    save("regret", result, table(outcomes), "Top-1 regret: the chosen layout beside the fastest of all")


def _sample(among: list[Layout], most: int) -> list[Layout]:
    """Returns `most` of the layouts in their order, the same in every run; all if `most` is 0."""
    kept = set(random.Random(0).sample(among, most)) if 0 < most < len(among) else set(among)
    return [layout for layout in among if layout in kept]


if __name__ == "__main__":
    sys.exit(main())
