"""Parity, memory, throughput and kernels on a machine with NVIDIA GPUs, in one command.

    python -m benchmarks.gpu [--only parity,memory,throughput,compute] [--quick] [--fresh]
    python -m benchmarks.gpu --device cpu --quick

Writes benchmarks/results/gpu-NAME.json and .md after every case, NAME being the device's. An interrupted run resumes:
cases with figures are not measured again, unless --fresh. `--quick` uses tiny sizes; on a CPU they exercise the same
code, and the results go to a temporary folder. See docs/gpu.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import compute, memory, parity, throughput
from benchmarks.gpu.commands import CaseError
from benchmarks.gpu.part import Case, Part, SkippedError
from benchmarks.gpu.results import Outcome, Results
from benchmarks.gpu.setting import NoGpuError, Setting, facts, find
from benchmarks.report import RESULTS

PARTS: dict[str, Part] = {part.name: part for part in (parity.PART, memory.PART, throughput.PART, compute.PART)}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 if every case was measured or does not apply here, 1 if one failed or did not hold."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PARTS), metavar="PARTS", help=f"of {','.join(PARTS)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run at all?")
    parser.add_argument("--fresh", action="store_true", help="measure what is in the results file again")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for the results")
    options = parser.parse_args(argv)
    names = [name.strip() for name in options.only.split(",")]
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--only: no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if options.device == "cpu" and not options.quick:
        parser.error("--device cpu rehearses tiny sizes: add --quick")
    try:
        setting = find(options.device, options.quick)
        folder = options.out or (RESULTS if setting.device == "cuda" else Path(tempfile.mkdtemp(prefix="phalanx_gpu_")))
        results = Results.open(folder / setting.file_name, facts(setting), options.fresh)
    except (NoGpuError, CaseError) as error:
        say(f"benchmarks.gpu: {error}")
        return 2
    try:
        held = [run(PARTS[name], setting, results) for name in names]
    except KeyboardInterrupt:
        say(f"benchmarks.gpu: interrupted; the same command goes on from {results.path}.json")
        return 130
    page = write_page(results)
    print(page.read_text(encoding="utf-8"), end="")
    say(f"results: {page}")
    return 0 if all(held) else 1


def write_page(results: Results) -> Path:
    """Writes the page with a table for every part that has cases. Returns its path."""
    known = [part for name, part in PARTS.items() if name in results.parts]
    return results.write_page({part.title: part.table(results.parts[part.name]) for part in known})


def run(part: Part, setting: Setting, results: Results) -> bool:
    """Measures the cases of a part that have no figures yet. Returns whether none failed or did not hold."""
    cases = part.cases(setting)
    for number, case in enumerate(cases, 1):
        title = f"{part.name} {number}/{len(cases)}: {case.name}"
        if results.has(part.name, case.name):
            say(f"{title}: measured before")
            continue
        say(f"{title} ...")
        began = time.perf_counter()
        outcome = attempt(case)
        results.add(part.name, case.name, outcome)
        write_page(results)
        word = next((f"{word}: {outcome[word]}" for word in ("skipped", "failed") if word in outcome), "done")
        say(f"{title}: {word} ({time.perf_counter() - began:.0f} s)")
    outcomes = results.parts.get(part.name, {})
    return not any("failed" in found or found.get("ok") is False for found in outcomes.values())


def attempt(case: Case) -> Outcome:
    """Returns a case's figures, or why there are none."""
    try:
        return case.measure()
    except SkippedError as error:
        return {"skipped": str(error)}
    except CaseError as error:
        return {"failed": str(error)}
    except Exception as error:  # an error in one case must not end hours of others
        return {"failed": f"{type(error).__name__}: {error}"}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
