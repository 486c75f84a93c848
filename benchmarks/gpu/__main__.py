"""Parity, memory, throughput, several GPUs, kernels and state on a machine with NVIDIA GPUs, in one command.

    python -m benchmarks.gpu [--only parity,memory,throughput,several,kernels,state,compute] [--minutes 12] [--quick]
    python -m benchmarks.gpu --device cpu --quick

Writes benchmarks/results/gpu-NAME.json and .md after every case, NAME being the device's. An interrupted run resumes:
cases with figures are not measured again, unless --fresh. `--quick` uses tiny sizes; on a CPU they exercise the same
code, and the results go to a temporary folder. `--minutes` takes the cases in the order of their worth, and stops in
time; the same command goes on. See docs/guides/gpu.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks.gpu import commands, compute, kernels, memory, parity, several, state, throughput
from benchmarks.gpu.commands import CaseError, TimeUpError
from benchmarks.gpu.part import Case, Part, SkippedError
from benchmarks.gpu.results import Outcome, Results
from benchmarks.gpu.setting import NoGpuError, Setting, facts, find
from benchmarks.report import RESULTS

PARTS: dict[str, Part] = {
    part.name: part
    for part in (
        *(parity.PART, memory.PART, throughput.PART, several.PART),
        *(kernels.PART, state.PART, compute.PART),
    )
}
WORTH = (
    "throughput: *Llama*, compiled",
    "parity: attention over blocks*",
    "throughput: *Qwen*",
    "throughput: 350M, p*, compiled",
    "several: *",
    "kernels: *",
    "state: *",
    "parity: training in fp32*",
    "memory: 350M, *",
    "throughput: 1.3B, p*, compiled",
    "compute: compute, bf16",
    "throughput: *Llama*",
    "parity: *",
)
"""Patterns of cases, the first of most worth where time is short; the others follow in the order of the parts."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 if every case was measured or does not apply here, 1 if one failed or did not hold."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PARTS), metavar="PARTS", help=f"of {','.join(PARTS)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, help="take the cases in the order of their worth, and stop in time")
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
        held = run(names, setting, results, options.minutes)
    except KeyboardInterrupt:
        say(f"benchmarks.gpu: interrupted; the same command goes on from {results.path}.json")
        return 130
    page = write_page(results)
    print(page.read_text(encoding="utf-8"), end="")
    say(f"results: {page}")
    return 0 if held else 1


def write_page(results: Results) -> Path:
    """Writes the page with a table for every part that has cases. Returns its path."""
    known = [part for name, part in PARTS.items() if name in results.parts]
    return results.write_page({part.title: part.table(results.parts[part.name]) for part in known})


def run(names: Sequence[str], setting: Setting, results: Results, minutes: float | None) -> bool:
    """Measures the cases of these parts that have no figures yet. Returns whether none failed or did not hold."""
    cases = [(PARTS[name], case) for name in names for case in PARTS[name].cases(setting)]
    if minutes is not None:
        commands.end_after(60 * minutes)
        cases.sort(key=lambda each: worth(*each))
    for number, (part, case) in enumerate(cases):
        title = f"{part.name} {number + 1}/{len(cases)}: {case.name}"
        if results.has(part.name, case.name):
            say(f"{title}: measured before")
            continue
        say(f"{title} ...")
        began = time.perf_counter()
        try:
            outcome = attempt(case)
        except TimeUpError:
            say(f"the {minutes:g} minutes are over: the same command goes on with {len(cases) - number} cases")
            break
        results.add(part.name, case.name, outcome)
        write_page(results)
        word = next((f"{word}: {outcome[word]}" for word in ("skipped", "failed") if word in outcome), "done")
        say(f"{title}: {word} ({time.perf_counter() - began:.0f} s)")
    outcomes = [outcome for name in names for outcome in results.parts.get(name, {}).values()]
    return not any("failed" in found or found.get("ok") is False for found in outcomes)


def worth(part: Part, case: Case) -> int:
    """Returns the place of a case's pattern in WORTH."""
    name = f"{part.name}: {case.name}"
    return next((place for place, pattern in enumerate(WORTH) if fnmatchcase(name, pattern)), len(WORTH))


def attempt(case: Case) -> Outcome:
    """Returns a case's figures, or why there are none."""
    try:
        return case.measure()
    except SkippedError as error:
        return {"skipped": str(error)}
    except CaseError as error:
        return {"failed": str(error)}
    except TimeUpError:
        raise
    except Exception as error:  # an error in one case must not end hours of others
        return {"failed": f"{type(error).__name__}: {error}"}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
