"""The file from which `cluster=local` comes: written by one measurement after the other, each keeping the rest.

It is a job file with nothing but a `cluster` section, so it can be given to any verb, or pasted into a job.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from phalanx.config import local_cluster
from phalanx.config.cluster import Accelerator, Cluster
from phalanx.errors import JobError

HEADER = "# What `phalanx bench` measured on this machine: the cluster that `cluster=local` means."
MEASURED = ("accelerator.", "intra.", "inter.", "sharing.", "devices_per_node")
"""Fields, or beginnings of them, that belong to the device they were measured on."""


def fields_of(path: Path) -> dict[str, Any]:
    """What the file says so far, by dotted path; nothing where there is none. Raises JobError for a file that is wrong,
    which one wants to know before the measurement."""
    if not path.exists():
        return {}
    try:
        return local_cluster.read_fields(path)
    except JobError as error:
        raise JobError([*error.problems, f"mend or delete {path}, or write elsewhere: --out FILE"]) from None


def of_device(known: Mapping[str, Any], device: str, name: str = "") -> dict[str, Any]:
    """What the file says, without figures of another kind of device, or of an accelerator of another name."""
    if known.get("device", device) != device:
        return {key: value for key, value in known.items() if not key.startswith(MEASURED)}
    if name and known.get("accelerator.name", name) != name:
        return {key: value for key, value in known.items() if not key.startswith("accelerator.")}
    return dict(known)


def write(path: Path, fields: Mapping[str, Any], what: str, fact: str) -> None:
    """Replace the file by these fields, under the facts of this measurement (`what`: compute or comm) and those of the
    other one, where there was one. Raises JobError where it cannot be written."""
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
    """What the comments at the top say of each measurement."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = (line.removeprefix("# ").partition(": ") for line in lines if line.startswith("# "))
    return {name: text for name, _, text in found if name in ("compute", "comm")}


def _nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Sections in the order in which a Cluster has its fields."""
    order = list(asdict(Cluster())) + list(asdict(Accelerator()))
    found: dict[str, Any] = {}
    for path in sorted(
        fields, key=lambda path: [order.index(part) if part in order else 99 for part in path.split(".")]
    ):
        *sections, name = path.split(".")
        at = found
        for section in sections:
            at = at.setdefault(section, {})
        at[name] = fields[path]
    return found
