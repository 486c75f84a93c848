"""Preparing conversations (`phalanx data prepare`) with one process and with several that render them (data.workers).

    python -m benchmarks.preparing [--rows 8000] [--rounds 3]

Made-up conversations of four messages, with a chat template from a file, which is rendered in a confined process, and
the tokenizer of bytes. In every round each number of processes prepares all of it. "alone" is the processor time of the
preparing process itself: what no further process takes from it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.report import machine, save
from phalanx.config.job import Data
from phalanx.data.prepare import prepare
from phalanx.units import seconds as as_time

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}<|end|>\n{% endfor %}"
WORKERS = (1, 2, 4)


def conversation(number: int) -> str:
    text = f"Number {number} of the conversations that are prepared here. " * 8
    turns = [{"role": role, "content": f"{role}: {text}"} for role in ("user", "assistant") * 2]
    return json.dumps({"messages": turns}) + "\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.preparing", description=__doc__)
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    found: dict[int, list[tuple[float, float]]] = {workers: [] for workers in WORKERS}
    with tempfile.TemporaryDirectory() as name:
        rows, template = Path(name) / "rows.jsonl", Path(name) / "template.jinja"
        template.write_text(TEMPLATE)
        rows.write_text("".join(map(conversation, range(options.rows))))
        size = rows.stat().st_size
        for number in range(options.rounds + 1):
            for workers in WORKERS:
                data = Data(corpus="chat", path=str(rows), template=str(template), tokenizer="byte", dir=name)
                began, own = time.perf_counter(), time.process_time()
                prepare(replace(data, workers=workers), force=True)
                if number:  # the first round loads modules
                    found[workers].append((time.perf_counter() - began, time.process_time() - own))
    medians = {
        workers: [statistics.median(each) for each in zip(*turns, strict=True)] for workers, turns in found.items()
    }
    table = [("data.workers", "seconds", "alone", "rows per second of it")]
    table += [
        (str(workers), as_time(wall), as_time(own), f"{options.rows / own:,.0f}")
        for workers, (wall, own) in medians.items()
    ]
    seen = (
        f"{options.rows:,} conversations, {size / 1e6:.0f} MB; medians of {options.rounds} rounds; load of the machine "
        f"{os.getloadavg()[1]:.1f}, so that the seconds say little where it is above the cores."
    )
    save("preparing", {"machine": machine(), "bytes": size, "turns": found}, table, "Preparing conversations", seen)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
