"""The report of an export, as text and as a document."""

from __future__ import annotations

from typing import Any

from phalanx.exchange.export import ExportResult
from phalanx.units import counted, gib


def text(done: ExportResult) -> str:
    """Returns a line with the model, one per file, and how to load them."""
    width = max(map(len, done.files))
    size = f"{counted(done.tensors, 'tensor')}, {gib(done.bytes)}"
    lines = [f"{done.target}: {done.model_type}, step {done.step:,}, {size}"]
    lines += [f"  {name:<{width}}  {gib(size):>9}" for name, size in done.files.items()]
    return "\n".join([*lines, f'  load:  AutoModelForCausalLM.from_pretrained("{done.target}", dtype="auto")'])


def document(done: ExportResult) -> dict[str, Any]:
    """Returns the document of `export --json`."""
    return {
        "target": str(done.target),
        "form": "hf",
        "model_type": done.model_type,
        "step": done.step,
        "tensors": done.tensors,
        "bytes": done.bytes,
        "files": done.files,
        "notes": list(done.notes),
    }
