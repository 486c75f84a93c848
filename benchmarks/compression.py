"""Compressed sums of gradients: loss against steps and against bytes sent, for numbers, codes and PowerSGD.

    python -m benchmarks.compression [--replicas 2] [--steps 300] [--every 30] [FIELD=VALUE ...]

The main job's model on Shakespeare, the same samples, seed and learning rate for all, one thread per replica.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.report import machine, save
from benchmarks.sync import ROOT, measure
from benchmarks.sync_picture import JOB, compression_picture
from phalanx.check.load import load_file
from phalanx.launch.pool import Pool

PICTURE = ROOT / "docs" / "pictures" / "compression.svg"
FORMS = {
    "numbers": [],
    "int8": ["layout.compression=int8"],
    "int4": ["layout.compression=int4"],
    **{f"PowerSGD, rank {n}": ["layout.compression=powersgd", f"layout.compression_rank={n}"] for n in (1, 4, 16)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=30, help="steps between validations")
    parser.add_argument("words", nargs="*", help="further fields of the job")
    options = parser.parse_args()
    argv = [
        *("data=shakespeare_char", f"layout.dp_replicate={options.replicas}", "run.threads=1", "checkpoint.every=0"),
        *(f"train.steps={options.steps}", f"train.eval_every={options.every}", "train.log_every=1000"),
        *("run.sample_tokens=0", "cluster.device=cpu", "cluster.peak_tflops=1", *options.words),
    ]
    measured = {}
    with Pool(options.replicas) as pool:
        for name, words in FORMS.items():
            measured[name] = measure(pool, load_file(JOB, [*argv, *words]).job, options.replicas, 0.0)
            print(f"{name}: val_loss {measured[name]['val_loss']:.4f}", file=sys.stderr, flush=True)
    del options.words  # where the text lies
    result = {"benchmark": "compression", "machine": machine(), "options": vars(options), "runs": measured}
    rows = [("gradients sent as", "validation loss", "rank 0 sends a step", "of numbers")]
    whole = measured["numbers"]["sent_bytes_per_step"]
    for name, run in measured.items():
        sent = run["sent_bytes_per_step"]
        rows.append((name, f"{run['val_loss']:.4f}", f"{sent / 2**20:.3f} MiB", f"{sent / whole:.1%}"))
    save("compression", result, rows, "Gradients in fewer bytes: loss against traffic on Shakespeare")
    PICTURE.write_text(compression_picture(result), encoding="utf-8")


if __name__ == "__main__":
    main()
