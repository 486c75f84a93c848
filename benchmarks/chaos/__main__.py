"""Injects faults into real training runs and reports what became of them.

    python -m benchmarks.chaos [--only 1,4/for-ever] [--quick] [--peer] [--fresh] [--json]
    python -m benchmarks.chaos --list

Results are kept after every fault: an interrupted bench goes on where it was. With all faults done it writes
benchmarks/results/chaos.json and chaos.md. See docs/guides/chaos.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.chaos import results as tables
from benchmarks.chaos.bench import Bench, ControlError
from benchmarks.chaos.fault import CLASSES, Fault
from benchmarks.chaos.faults import FAULTS
from benchmarks.chaos.machine import facts
from benchmarks.chaos.program import Peer, Phalanx
from benchmarks.chaos.results import Results
from benchmarks.chaos.story import INVALID, LOST
from benchmarks.report import RESULTS, without_places

STATE = Path("runs/chaos-state.json")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 if no fault was lost, 1 if one was, 2 if there is nothing to compare with."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="WHICH", help="classes or faults: 1,4/for-ever; tried again")
    parser.add_argument("--list", action="store_true", help="list the faults")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--quick", action="store_true", help="a few faults of the most important classes")
    parser.add_argument("--peer", action="store_true", help="also the same faults under torchrun with DCP")
    parser.add_argument("--fresh", action="store_true", help="forget the results of an earlier run")
    parser.add_argument("--keep", action="store_true", help="keep the folders of the faults")
    parser.add_argument("--state", type=Path, default=STATE, metavar="FILE", help="where results are kept")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for the page, also if faults are missing")
    options = parser.parse_args(argv)
    try:
        chosen = choose(options.only, options.quick)
    except ValueError as error:
        parser.error(str(error))
    if options.list:
        print("\n".join(listing(chosen)))
        return 0
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:  # by nohup or a shell's &: every program would inherit it
            signal.signal(number, lambda *_: None)
    results = Results.open(options.state, facts(), options.fresh)
    root = Path(tempfile.mkdtemp(prefix="phalanx_chaos_"))
    try:
        for program in (Phalanx(), Peer()) if options.peer else (Phalanx(),):
            mine = [fault for fault in chosen if fault.peer or isinstance(program, Phalanx)]
            run(Bench(program, root / program.name.split()[0], options.keep), mine, results, again=bool(options.only))
    except ControlError as error:
        say(f"benchmarks.chaos: {error}")
        return 2
    except KeyboardInterrupt:
        say(f"benchmarks.chaos: interrupted; the same command goes on from {options.state}")
        return 130
    finally:
        if options.keep:
            say(f"kept: {root}")
        else:
            shutil.rmtree(root, ignore_errors=True)
    return finish(results, chosen, options)


def choose(only: str, quick: bool) -> list[Fault]:
    """Returns the faults that --only and --quick name. Raises ValueError at a name that is no class and no fault."""
    wanted = [word.strip() for word in only.split(",") if word.strip()]
    for word in wanted:
        if not any(word in (fault.key, str(fault.number)) for fault in FAULTS):
            raise ValueError(f"--only: no class or fault {word!r}; --list shows them")
    return [
        fault
        for fault in FAULTS
        if (not wanted or fault.key in wanted or str(fault.number) in wanted) and (fault.quick or not quick)
    ]


def listing(faults: Sequence[Fault]) -> list[str]:
    """Returns a line per class and fault."""
    lines: list[str] = []
    for number, title in CLASSES.items():
        mine = [fault for fault in faults if fault.number == number]
        if mine:
            lines += [f"{number}  {title}", *(f"   {fault.key:<28} {fault.what}" for fault in mine)]
    return lines


def run(bench: Bench, faults: Sequence[Fault], results: Results, again: bool) -> None:
    """Injects the faults that have no result yet."""
    name = bench.program.name
    known = results.of(name)
    todo = [fault for fault in faults if again or known.get(fault.key, {}).get("verdict") in (None, INVALID)]
    if todo:
        say(f"{name}: runs without a fault ...")
        bench.control({})
    for number, fault in enumerate(todo, 1):
        began = time.monotonic()
        result = bench.run(fault)
        results.controls[name] = {"seconds": {key: round(value, 1) for key, value in bench.seconds.items()}}
        results.add(name, fault, result)
        figures = "  ".join(
            f"{key}: {result[key]}" for key in ("exit_code", "detect_s", "back_s", "steps_lost") if key in result
        )
        took = f"({time.monotonic() - began:.0f} s)"
        say(f"{name} {number}/{len(todo)} {fault.key}: {result['verdict']}  {figures}  {took}")
        for reason in [*result["reasons"], *result["remarks"]]:
            say(f"    {reason}")


def finish(results: Results, chosen: Sequence[Fault], options: argparse.Namespace) -> int:
    """Writes the page if every fault has a result, prints what was asked for, and returns the exit code."""
    own, faults = results.of(Phalanx.name), {fault.key: fault for fault in FAULTS}
    own_order = {fault.key: own[fault.key] for fault in FAULTS if fault.key in own}
    results.programs[Phalanx.name] = own_order
    text = tables.page(results, faults, Phalanx.name, Peer.name)
    folder = options.out or (RESULTS if own_order.keys() == faults.keys() else None)
    if folder:
        tables.write(folder / "chaos.json", without_places(json.dumps(results.document(), indent=1)) + "\n")
        tables.write(folder / "chaos.md", text)
        say(f"results: {folder / 'chaos.md'}")
    print(json.dumps(results.document(), indent=1) if options.json else tables.summary(own_order))
    return 1 if any(own[fault.key]["verdict"] == LOST for fault in chosen) else 0


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
