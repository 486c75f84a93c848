"""The time of `--help`, for the program and every verb. Mark: under 0.4 s each; torch is never imported.

python -m benchmarks.startup [--rounds 9]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from benchmarks.report import machine, save
from phalanx.cli.main import VERBS


def seconds(argv: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(argv, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options, _ = parser.parse_known_args()
    command = [sys.executable, "-m", "phalanx"]
    contenders = {"python -c pass": [sys.executable, "-c", "pass"], "phalanx --help": [*command, "--help"]}
    contenders |= {f"phalanx {verb} --help": [*command, verb, "--help"] for verb in VERBS}
    rounds = [{name: seconds(argv) for name, argv in contenders.items()} for _ in range(options.rounds)]
    median = {name: statistics.median(r[name] for r in rounds) for name in contenders}
    result = {"benchmark": "startup", "machine": machine(), "seconds": median, "rounds": rounds}
    table = [("command", "seconds (median)"), *((f"`{name}`", f"{value:.3f}") for name, value in median.items())]
    save("startup", result, table, "How long help takes")


if __name__ == "__main__":
    main()
