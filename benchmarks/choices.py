"""The planner against human experts: on published layouts, on awkward fabrics, and on layouts known to have mattered.

    python -m benchmarks.choices [--quick]

Experts' rows: Megatron-LM's ten and Llama 3's three (benchmarks/published.py), and, if the environment variable
PHALANX_TRUTH names a folder of published measurements, torchtitan's and NVIDIA's. The planner chooses under the same
model, machine, global batch, number format and framework, among the layouts that the framework supports
(benchmarks/abilities.py); both layouts are timed by the same simulation. --quick uses only Megatron's and Llama 3's.
Nothing runs on this machine; only the search is timed.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.abilities import abilities
from benchmarks.accuracy import rows_of
from benchmarks.fabrics import fabrics
from benchmarks.published import LLAMA3, MEGATRON, Published, predicted, published_case
from benchmarks.report import machine, save
from benchmarks.solar import assumptions, solar
from benchmarks.truth.report import markdown
from phalanx.config.job import PlanOptions
from phalanx.cost.prediction import predict
from phalanx.cost.spec import StepSpec
from phalanx.errors import JobError
from phalanx.plan.alternatives import differences, explain
from phalanx.plan.plan import Candidate
from phalanx.plan.planner import search
from phalanx.plan.simplicity import TIED, ranked, simpler_because
from phalanx.plan.space import PlanRequest
from phalanx.simulate.step import step_seconds
from phalanx.units import gib
from phalanx.validation.row import Reading, key_of, read, remark

SOURCES = ("torchtitan", "nemo_megatron_bridge", "nvidia_dgxc_benchmarking", "mlperf_training_llm")
"""Files of the truth whose rows are tuned results, each with its layout."""


@dataclass(frozen=True)
class Expert:
    """A published layout."""

    name: str
    source: str
    spec: StepSpec
    error: float | None
    """Predicted over published throughput, minus 1."""


@dataclass(frozen=True)
class Choice:
    """The planner's layout for the same case."""

    expert: Expert
    best: Candidate
    expert_seconds: float
    searched: int
    seconds: float
    """Seconds of the searches."""

    @property
    def factor(self) -> float:
        """The speed relative to the expert's layout."""
        return self.expert_seconds / self.best.seconds

    @property
    def published(self) -> str:
        """The expert's step time and memory."""
        found = predict(self.expert.spec)
        return f"{self.expert_seconds:.3g} s, {gib(found.fullest.needed)}, {found.verdict}"

    @property
    def judged(self) -> str:
        """The choice beside the expert's in a sentence."""
        mine, theirs = (replace(one, pp_cut="", accumulation=0) for one in (self.best.layout, self.expert.spec.layout))
        if not differences(mine, theirs):
            return "The choice is the published layout."
        simpler = simpler_because(self.best.spec, self.expert.spec)
        if self.factor < 1 + TIED.kinds:
            why = f": the simpler is taken, {simpler}" if simpler else ", another layout as good"
            return f"As fast within what predictions err against each other{why}."
        newer = " The framework recomputes less with smaller micro-batches." if theirs.recompute == "full" else ""
        return f"Worth a try: {(self.factor - 1):.0%} faster, more than predictions err against each other.{newer}"

    @property
    def why(self) -> str:
        return explain(self.best.prediction, predict(self.expert.spec), self.factor)


def printed() -> Iterator[Expert]:
    """Yields Megatron-LM's and Llama 3's layouts."""
    for row in (*MEGATRON, *LLAMA3):
        yield Expert(row.name, _paper(row), published_case(row), predicted(row) / row.tflops - 1)


def _paper(row: Published) -> str:
    return "Narayanan et al. 2021" if row.program == "megatron-2021" else "Llama Team 2024"


def tuned(truth: Path) -> Iterator[Expert]:
    """Yields the rows of the truth that state their layout, one per model and device: the one with the most tokens per
    second, as the result of someone's tuning."""
    best: dict[object, tuple[float, Expert]] = {}
    for source in SOURCES:
        path = truth / f"{source}.csv"
        for row in rows_of(path) if path.exists() else ():
            try:
                reading = read(row)
            except JobError:
                continue
            if not _ours(row, reading):
                continue
            spec = reading.spec
            expert = Expert(row["model_name"], source, spec, _error(reading))
            key = key_of(expert.name), spec.cluster.accelerator.name
            speed = reading.tokens_per_s(reading.measured_s or float("inf"))
            if key not in best or speed > best[key][0]:
                best[key] = speed, expert
    yield from (expert for _, expert in best.values())


def _ours(row: dict[str, str], reading: Reading) -> bool:
    """Returns whether a row states its layout, is a whole training step of the named model, of a known framework."""
    name = key_of(row["model_name"])
    return bool(
        row["tp"] and not reading.spec.model.lora.rank and name and not remark(name) and reading.measured_s
        and abilities(reading.framework)
    )  # fmt: skip


def _error(reading: Reading) -> float | None:
    measured = reading.measured_s
    return measured / predict(reading.spec).step_time_s - 1 if measured else None


def choose(expert: Expert) -> Choice | None:
    """Returns the planner's choice among all sets of the framework; None if nothing fits."""
    spec = expert.spec
    began = time.monotonic()
    found, searched = list[Candidate](), 0
    asked = PlanRequest(
        model=spec.model,
        cluster=spec.cluster,
        global_batch=spec.batch.global_batch,
        products=spec.products,
        width=spec.width,
        framework=spec.framework,
        worlds=(spec.layout.world,),
        headroom=PlanOptions.headroom,
        band=TIED,
    )
    for fixed in abilities(spec.framework.name):
        try:
            plan = search(replace(asked, fixed=fixed))
        except JobError:
            continue  # nothing in this set is legal
        searched += plan.searched
        found += plan.best
    if not found:
        return None
    roomy = [one for one in found if one.prediction.fullest.needed <= asked.limit]
    best = ranked(roomy or found, TIED)[0]
    return Choice(expert, best, step_seconds(spec), searched, time.monotonic() - began)


def _line(spec: StepSpec) -> str:
    """Returns the layout without the settings that equal the default for even stages."""
    return replace(spec.layout, pp_cut="", accumulation=0, sp_regather=False).line().replace(",", " ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only the rows of the two papers")
    options = parser.parse_args()
    truth = os.environ.get("PHALANX_TRUTH", "")
    experts = list(printed())
    if not truth or not Path(truth).is_dir():
        print("PHALANX_TRUTH names no folder of published measurements: torchtitan's and NVIDIA's rows are left out")
    elif not options.quick:
        experts += tuned(Path(truth))
    table = [
        (
            "model",
            "devices",
            "published layout",
            "predicted",
            "error",
            "planner's",
            "predicted",
            "factor",
            "judged",
            "why",
        )
    ]
    rows = []
    for expert in experts:
        choice = choose(expert)
        spec = expert.spec
        who = f"{expert.name}, {spec.cluster.accelerator.name}, {spec.products}"
        error = "" if expert.error is None else f"{expert.error:+.1%}"
        if choice is None:
            table.append((who, str(spec.layout.world), _line(spec), "", error, "nothing fits", "", "", "", ""))
            continue
        mine = choice.best.prediction
        table.append(
            (
                *(who, str(spec.layout.world), _line(spec), choice.published, error, _line(choice.best.spec)),
                f"{choice.best.seconds:.3g} s, {gib(mine.fullest.needed)}, {mine.verdict}",
                *(f"{choice.factor:.2f}", choice.judged, choice.why),
            )
        )
        print(" | ".join(table[-1]), f"{choice.searched} layouts in {choice.seconds:.1f} s", flush=True)
        rows.append(
            {
                "model": expert.name,
                "source": expert.source,
                "device": spec.cluster.accelerator.name,
                "devices": spec.layout.world,
                "error": expert.error,
                "published": _line(spec),
                "planned": _line(choice.best.spec),
                "factor": choice.factor,
                "judged": choice.judged,
                "why": choice.why,
                "searched": choice.searched,
                "seconds": choice.seconds,
            }
        )
    fabric_rows, fabric_text = fabrics()
    solar_rows, solar_table = solar()
    seen = "\n\n".join(
        ["## Fabrics", fabric_text, "## Solar", markdown(solar_table), "With other batches:", markdown(assumptions())]
    )
    result = {"machine": machine(), "experts": rows, "fabrics": fabric_rows, "solar": solar_rows}
    save("choices", result, table, "The planner's choices", seen)


if __name__ == "__main__":
    main()
