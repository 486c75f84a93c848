"""Capacity of experts: loss at equal steps, dropped choices and slots of experts, for each factor.

    python -m benchmarks.capacity [--steps 400] [--seeds 1,2] [FIELD=VALUE ...]

The mixture of examples/experts.yaml on Shakespeare in one process, the same samples, learning rate and, by seed,
initial weights for all; with the auxiliary loss of that job and without any balancing. Validations drop choices as
training does, with the same capacity.
"""

from __future__ import annotations

import argparse
import statistics
import sys

from benchmarks.report import machine, save
from benchmarks.sync import ROOT, measure
from phalanx.check.load import load_file
from phalanx.launch.pool import Pool

JOB = ROOT / "examples" / "experts.yaml"
BALANCES = {"aux_loss 0.01": "0.01", "no balancing": "0"}
CAPACITIES = {"none": "0", "2": "2", "1.25": "1.25", "1": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", default="1,2", help="initial weights and samples, one run each")
    parser.add_argument("words", nargs="*", help="further fields of the job")
    options = parser.parse_args()
    argv = [
        *("data=shakespeare_char", "layout.dp_shard=1", "layout.ep=1", "run.threads=1", "checkpoint.every=0"),
        *(f"train.steps={options.steps}", f"train.eval_every={options.steps}", "train.log_every=10000"),
        *("run.sample_tokens=0", "cluster.device=cpu", "cluster.peak_tflops=1", *options.words),
    ]
    measured = {}
    with Pool(1) as pool:
        for balance, aux in BALANCES.items():
            for name, capacity in CAPACITIES.items():
                words = [f"model.moe.aux_loss={aux}", f"model.moe.capacity={capacity}"]
                jobs = [load_file(JOB, [*argv, *words, f"train.seed={seed}"]).job for seed in options.seeds.split(",")]
                measured[f"{balance}, {name}"] = runs = [measure(pool, job, 1, 0.0) for job in jobs]
                losses = " ".join(f"{run['val_loss']:.4f}" for run in runs)
                print(f"{balance}, capacity {name}: val_loss {losses}", file=sys.stderr, flush=True)
    asked = {name: value for name, value in vars(options).items() if name != "words"}  # which say where the text lies
    result = {"benchmark": "capacity", "machine": machine(), "options": asked, "runs": measured}
    rows = [("balancing", "capacity", "validation loss", "beside none", "choices dropped")]
    for balance in BALANCES:
        plain = measured[f"{balance}, none"]
        for name in CAPACITIES:
            runs = measured[f"{balance}, {name}"]
            losses, others = ([run["val_loss"] for run in each] for each in (runs, plain))
            beside = [one - other for one, other in zip(losses, others, strict=True)]
            dropped = statistics.fmean(run["dropped"] for run in runs)
            rows.append(
                (
                    *(balance, name, f"{statistics.fmean(losses):.4f}"),
                    "" if name == "none" else f"{statistics.fmean(beside):+.4f}",
                    f"{dropped:.1%}",
                )
            )
    save("capacity", result, rows, "Capacity of experts: loss and dropped choices at equal steps on Shakespeare")


if __name__ == "__main__":
    main()
