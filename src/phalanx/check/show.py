"""A job as YAML, for the run directory (config.yaml) and for --print-config."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import yaml

from phalanx.check.load import RESOLVED, LoadedJob
from phalanx.config.fields import name_of
from phalanx.config.job import Job
from phalanx.config.yaml_file import SET_FIELDS
from phalanx.partition.derived import solve


def as_dict(job: Job) -> dict[str, Any]:
    """Returns the job as nested plain values, with tuples as lists, for JSON and YAML."""
    return json.loads(json.dumps(dataclasses.asdict(job, dict_factory=_named)))


def _named(values: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name_of(attribute): value for attribute, value in values}


def as_yaml(loaded: LoadedJob) -> str:
    """Returns every value of the job as YAML with its origin as a comment. Reading it back gives the same job. A layout
    that is left to the planner has only the fields that are set; a cluster that was not measured has no calibration."""
    job, document = loaded.job, as_dict(loaded.job)
    if not job.cluster.calibration.is_known:
        del document["cluster"]["calibration"]  # two dozen empty values
    if job.layout.auto:
        lines = []
        document["layout"] = {
            name: v for name, v in document["layout"].items() if loaded.origins[f"layout.{name}"] != "default"
        }
    else:
        lines = [f"# {solve(job.train.global_batch, job.layout).equation()}"]
    was_set = [path for path, origin in loaded.origins.items() if not origin.startswith(RESOLVED)]
    lines.append(f"{SET_FIELDS}: [{', '.join(was_set)}]  # all other values were resolved")
    _section(document, "", loaded.origins, lines)
    return "\n".join(lines) + "\n"


def _section(values: dict[str, Any], prefix: str, origins: dict[str, str], lines: list[str]) -> None:
    indent = "  " * prefix.count(".")
    for name, value in values.items():
        if isinstance(value, dict):
            lines.append(f"{indent}{name}:")
            _section(value, f"{prefix}{name}.", origins, lines)
        else:
            text = (
                yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
                .removesuffix("...\n")
                .strip()
            )
            origin = origins.get(f"{prefix}{name}", "default").replace("\n", " ")
            lines.append(f"{indent}{name}: {text}  # {origin}")
