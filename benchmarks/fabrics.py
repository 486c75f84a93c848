"""The planner on machines with awkward links: its choice compared with that for an H100 machine, and why.

    python -m benchmarks.fabrics

192 devices each. `kept` is the layout chosen on the DGX H100, timed on the other machine, and `factor` the speed-up of
that machine's own choice. Models and global batch are the same everywhere, the framework is this one, the pipeline's
schedule 1F1B.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from benchmarks.truth.report import markdown
from phalanx.config.cluster import Cluster, Link
from phalanx.config.clusters import cluster_of
from phalanx.config.layout import Layout
from phalanx.config.presets import PRESETS
from phalanx.cost.frameworks import PHALANX
from phalanx.cost.prediction import predict
from phalanx.cost.spec import StepSpec
from phalanx.errors import JobError
from phalanx.plan.alternatives import explain
from phalanx.plan.plan import Plan
from phalanx.plan.planner import search
from phalanx.plan.space import PlanRequest
from phalanx.simulate.step import step_seconds
from phalanx.units import gib

MODELS = (("llama3-8b", 192), ("llama3-70b", 384), ("solar-open-100b", 1536), ("deepseek-v3", 1536))
"""Names and sequences per step."""
HOME = "DGX H100"


@cache
def machines() -> dict[str, Cluster]:
    """Returns clusters of 192 devices of each kind."""
    h100 = cluster_of("dgx-h100:24")
    ethernet = Link(100 / 8 / 8, 30, 0.8)
    return {
        HOME: h100,
        "H100, 100 Gb/s Ethernet a node": replace(h100, preset="", inter=ethernet),
        # Jobs use 64 of the 72 devices of a rack (NVIDIA's own recipes).
        "GB200 NVL72, 64 of a rack": replace(cluster_of("gb200-nvl72:48"), domain=64),
        "Polaris": cluster_of("polaris:48"),
        "Aurora": cluster_of("aurora:16"),
    }


def request(model: str, sequences: int, cluster: Cluster) -> PlanRequest:
    """Returns the planner's request. It has one schedule, so that links decide and not bubbles."""
    return PlanRequest(PRESETS[model], cluster, sequences, framework=PHALANX, fixed={"schedule": "1f1b"})


def fabrics() -> tuple[list[dict[str, Any]], str]:
    """Returns figures, and tables with the planner's reasons for each choice."""
    rows, text = list[dict[str, Any]](), list[str]()
    for model, sequences in MODELS:
        table = [("machine", "choice", "tokens/s a device", "MFU", "factor", "beside the choice for H100")]
        notes = list[str]()
        home: Layout | None = None
        for name, cluster in machines().items():
            asked = request(model, sequences, cluster)
            plan = search(asked)
            if not plan.best:
                table.append((name, "nothing fits", "", "", "", _least(plan)))
                continue
            best = plan.best[0]
            home = home or best.layout
            factor, why = _kept(asked, home, plan)
            line = _line(best.layout)
            rate, mfu = f"{best.tokens_per_s_per_device:,.0f}", f"{best.mfu:.1%}"
            table.append((name, line, rate, mfu, f"{factor:.2f}" if factor else "", why))
            notes += [f"- {name}: {' '.join(plan.notes)}"] if plan.notes else []
            print(" | ".join(table[-1]), *plan.notes, sep="\n  ", flush=True)
            rows.append(
                {"model": model, "machine": name, "layout": line, "factor": factor, "why": why, "mfu": best.mfu}
            )
        text += [f"### {model}, {sequences} sequences a step", markdown(table), *(["\n".join(notes)] if notes else [])]
    return rows, "\n\n".join(text)


def _kept(asked: PlanRequest, home: Layout, plan: Plan) -> tuple[float | None, str]:
    """Returns the speed-up of the machine's own choice over the H100's, and why."""
    best = plan.best[0]
    if replace(best.layout, pp_cut="") == replace(home, pp_cut=""):
        return 1.0, "the same"
    try:
        spec: StepSpec = asked.spec(home)
        kept, seconds = predict(spec), step_seconds(spec)
    except (JobError, ValueError) as error:
        return None, f"not legal here: {error}"
    factor = seconds / best.seconds
    return (factor if kept.fits else None), explain(best.prediction, kept, factor)


def _least(plan: Plan) -> str:
    nearest = plan.nearest
    if not nearest:
        return ""
    needed = nearest.prediction.fullest.needed
    return f"least is {gib(needed)} of {gib(nearest.prediction.memory_limit)}: {_line(nearest.layout)}"


def _line(layout: Layout) -> str:
    return replace(layout, pp_cut="", accumulation=0).line().replace(",", " ")


def main() -> None:
    print(fabrics()[1])


if __name__ == "__main__":
    main()
