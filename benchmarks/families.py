"""Every model family under every kind of parallelism, each compared with one process in float64.

    python -m benchmarks.families [--only gemma3-27b,gpt-oss-20b]

A preset stands for its family, in the small form of `phalanx verify`. A cell is the largest relative difference of
losses, gradients and parameters over two steps. Marks: 1e-9, which `phalanx verify` asks for. About eight minutes.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.report import machine, save
from phalanx.check.load import load_words
from phalanx.config import overrides
from phalanx.config.layout_line import parse
from phalanx.echo import echo
from phalanx.verify import run as verify
from phalanx.verify.measure import TOLERANCE
from phalanx.verify.select import select

FAMILIES = (
    *("llama3.2-1b", "mistral-7b", "mixtral-8x7b", "qwen2.5-7b", "qwen3-8b", "qwen3-30b-a3b", "gemma2-27b"),
    *("gemma3-27b", "olmo2-32b", "gpt-neox-20b", "gpt-oss-20b", "kimi-k2", "glm-4.5", "glm-5", "deepseek-v3.2"),
    *("gemma4-26b-a4b", "gemma4-e2b", "qwen3-next-80b-a3b", "llama4-scout-17b-16e"),
)
LAYOUTS = {
    "tp": "tp=2",
    "tp, sp": "tp=2,sp=true",
    "ring": "cp=2",
    "Ulysses": "cp=2,cp_ulysses=2",
    "pp": "pp=2",
    "ep": "dp_shard=2,ep=2",
    "ZeRO-2": "dp_shard=2,zero=2",
    "ZeRO-3": "dp_shard=2",
    "recompute": "dp_shard=2,recompute=full",
    "tp, pp, ZeRO-1": "dp_shard=2,zero=1,tp=2,sp=true,pp=2",
    "ring, Ulysses, tp": "cp=4,cp_ulysses=2,tp=2,sp=true,recompute=selective",
}
"""Layouts of up to 8 ranks by what they test. One that is not legal for a family is left out, with its reason."""


_REFUSED = "not legal"


def compare(name: str) -> dict[str, float | str]:
    """Returns the largest relative difference for each layout, or why there is none."""
    job = load_words(overrides.parse(f"model={name}".split())).job
    selection = select(job, lines=list(LAYOUTS.values()))
    report = verify.run(selection, 2, lambda case: echo(f"  {case.layout}: {case.seconds:.1f} s"), lambda _: None)
    found: dict[str, float | str] = {}
    cases = {case.layout: case for case in report.cases}
    for kind, line in LAYOUTS.items():
        if (case := cases.get(parse(line).line())) is None:
            found[kind] = next(f"{_REFUSED}: {why}" for why in selection.refused if why.startswith(f"layout {line!r}"))
            continue
        differences = (case.loss_max_rel, case.grad_max_rel, case.param_max_rel)
        worst = max((each for each in differences if each is not None), default=None)
        found[kind] = case.error or "no result" if worst is None else worst
        assert worst is None or case.ok == (worst <= TOLERANCE), case
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="families, with commas between them")
    options, _ = parser.parse_known_args()
    results: dict[str, dict[str, float | str]] = {}
    for name in options.only.split(",") if options.only else FAMILIES:
        echo(name)
        results[name] = compare(name)
    cells = {name: {kind: _shown(value) for kind, value in row.items()} for name, row in results.items()}
    table = [("family", *LAYOUTS), *((name, *(row[kind] for kind in LAYOUTS)) for name, row in cells.items())]
    worst = max(value for row in results.values() for value in row.values() if isinstance(value, float))
    wrong = [f"{name} {kind}: {value}" for name, row in results.items() for kind, value in row.items() if _bad(value)]
    seen = f"largest relative difference: {worst:.1e}" + "".join(f"\nFAILED {each}" for each in wrong)
    result = {"benchmark": "families", "machine": machine(), "layouts": LAYOUTS, "differences": results}
    save("families", result, table, "Families and layouts: the largest relative difference from one process", seen)
    return 1 if wrong else 0


def _bad(value: float | str) -> bool:
    return not value.startswith(_REFUSED) if isinstance(value, str) else value > TOLERANCE


def _shown(value: float | str) -> str:
    if not isinstance(value, str):
        return f"{value:.0e}"
    return _REFUSED if value.startswith(_REFUSED) else "failed"


if __name__ == "__main__":
    sys.exit(main())
