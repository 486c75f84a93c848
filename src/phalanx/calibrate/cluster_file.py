"""Writes the file of `cluster=local`. Each measurement replaces its own fields and keeps the others.

The file is a job file with a `cluster` section and nothing else, so it can be given to any verb, or pasted into a job.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from phalanx.config import clusters
from phalanx.config.cluster import Cluster
from phalanx.config.fields import leaves
from phalanx.errors import JobError

HEADER = "# This machine as `phalanx bench` measured it: the cluster that `cluster=local` means."
MEASURED = ("accelerator.", "host.", "intra.", "inter.", "sharing.", "calibration.", "devices_per_node")
"""Prefixes of the fields that belong to the device they were measured on."""


def fields_of(path: Path) -> dict[str, Any]:
    """Returns the fields of the file by dotted path; none where there is no file. Raises JobError for a file that is
    wrong, before anything is measured."""
    if not path.exists():
        return {}
    try:
        return clusters.local_fields(path)
    except JobError as error:
        raise JobError([*error.problems, f"correct or delete {path}, or write elsewhere: --out FILE"]) from None


def of_device(known: Mapping[str, Any], device: str, name: str = "") -> dict[str, Any]:
    """Returns the fields without those measured on another kind of device, or on an accelerator of another name."""
    if known.get("device", device) != device:
        return {key: value for key, value in known.items() if not key.startswith(MEASURED)}
    if name and known.get("accelerator.name", name) != name:
        return {
            k: value
            for k, value in known.items()
            if not k.startswith(("accelerator.", "host.", "calibration.compute."))
        }
    return dict(known)


def write(path: Path, fields: Mapping[str, Any], what: str, fact: str) -> None:
    """Replaces the file by these fields, under the facts of this measurement (`what`: compute or comm) and those of the
    other one. Raises JobError where it cannot be written."""
    facts = {**_facts(path), what: fact}
    lines = [HEADER, *(f"# {name}: {text}" for name, text in sorted(facts.items()))]
    body = yaml.safe_dump({"cluster": _nested(fields)}, sort_keys=False, allow_unicode=True, width=1000)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text("\n".join(lines) + "\n" + body, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror}") from None


def _facts(path: Path) -> dict[str, str]:
    """Returns the comment at the top for each measurement."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    comments = (line.removeprefix("# ").partition(": ") for line in lines if line.startswith("# "))
    return {name: text for name, _, text in comments if name in ("compute", "comm")}


def _nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Nests the fields in the order of the dataclasses."""
    nested: dict[str, Any] = {}
    for path in sorted(fields, key=list(leaves(Cluster)).index):
        *sections, name = path.split(".")
        at = nested
        for section in sections:
            at = at.setdefault(section, {})
        at[name] = fields[path]
    return nested
