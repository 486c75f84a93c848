"""Writes docs/reference/api.md, the Python API, from the docstrings of what it lists.

python docs/api_reference.py
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from markdown_table import table

import phalanx.api
from phalanx import errors, extend
from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.shard_file import Reader
from phalanx.config.reference import texts_below
from phalanx.cost.prediction import Parts, Prediction
from phalanx.cost.rank_memory import RankMemory
from phalanx.plan.plan import Alternative, Candidate, Plan
from phalanx.report.run import Metrics, RunRecord
from phalanx.simulate.timeline import Span, Timeline, TimeShares
from phalanx.verify.locate import Divergence
from phalanx.verify.run import LayoutCase, VerifyReport

PAGE = Path(__file__).with_name("reference") / "api.md"
RESULTS: dict[type, tuple[str, ...]] = {
    Plan: ("best", "nearest", "alternatives", "rejected", "searched", "seconds", "notes"),
    Alternative: ("name", "candidate", "why"),
    Candidate: ("layout", "seconds", "prediction", "tokens_per_s", "tokens_per_s_per_device", "mfu"),
    Prediction: (
        *("step_time_s", "spread", "tokens_per_s", "tokens_per_s_per_device", "tflops_per_device", "mfu", "hfu"),
        *("bubble", "parts", "fits", "memory", "fullest", "memory_limit", "model_flops", "hardware_flops", "tokens"),
    ),
    Parts: (
        *("products", "streams", "recompute", "host", "exposed", "bubble", "optimizer", "copies", "files", "forward"),
        *("backward", "total"),
    ),
    RankMemory: (
        *("peak", "needed", "parameters", "gradients", "optimizer", "activations", "logits", "communication"),
        *("reserved", "moment", "host", "disk"),
    ),
    Timeline: ("seconds", "schedule", "device", "network", "host", "shares"),
    Span: ("start", "seconds", "kind", "stage", "micro", "exposed", "to"),
    TimeShares: ("busy", "communication", "idle", "host"),
    VerifyReport: ("ok", "cases", "seconds", "as_dict"),
    LayoutCase: (
        *("layout", "world", "ok", "loss_max_rel", "grad_max_rel", "param_max_rel", "first_difference", "error"),
        *("divergence", "not_located", "seconds"),
    ),
    Divergence: ("module", "direction", "step", "ranks", "rel", "what", "axis", "collective", "between", "table"),
    RunRecord: (
        *("path", "name", "state", "alive", "total", "loaded", "metrics", "checkpoints", "attempts", "environment"),
        "notes",
    ),
    Metrics: ("steps", "times", "columns", "events", "last_step", "points", "values", "of", "last"),
    Reader: ("manifest", "names", "read"),
    Manifest: ("step", "path", "meta", "tensors", "finite"),
}
"""The objects that the functions return, with the attributes that a program may rely on."""
HEAD = """\
# The Python API

<!-- `make reference` writes this page from docstrings, mostly those of src/phalanx/api.py; edit those. -->

"""
JOBS = """\
A `Job` is a frozen dataclass of sections, with the [fields of a job file](job.md): `job.layout.tp`, `job.train.steps`.
`dataclasses.replace` makes a changed one, which is checked again where it is used; `load_job` checks at once. Seconds,
bytes and FLOPs are plain numbers in these units, never scaled.
"""
WIDTH = 110
"""Longest signature on one line."""
_SECTION = re.compile(r"^(Args|Raises|Example):$", flags=re.MULTILINE)


def page() -> str:
    """Returns the page."""
    return "\n".join(_lines()).rstrip() + "\n"


def _lines() -> Iterator[str]:
    about, parts = _parts(phalanx.api)
    names = [name for name in vars(phalanx.api) if name in phalanx.api.__all__]  # in the order of the file
    yield HEAD + about.replace("The Python API: ", "", 1)
    yield from ("", *_code(parts["Example"]), "", JOBS)
    yield from table(("function", "what it does"), [(_link(name), _first(_function(name))) for name in names])
    for name in names:
        yield from ("", f"## {name}", "", *_described(_function(name)))
    yield from ("", "## What they return", "", "Other attributes may change.", "")
    for kind, listed in RESULTS.items():
        yield from (f"### {kind.__name__}", "", _plain(inspect.getdoc(kind) or ""), "")
        yield from (*table(("attribute", "type", "meaning"), [_attribute(kind, name) for name in listed]), "")
    yield from (
        "## phalanx.extend",
        "",
        "Adds entries to tables that jobs name ([extending.md](extending.md)).",
        "",
    )
    yield from (*table(("function", "what it does"), [*_extensions()]), "")
    yield from ("## phalanx.errors", "", "Each has the verb's message as its text, and its exit code.", "")
    yield from table(("error", "exit code", "meaning"), [*_errors()])


def _function(name: str) -> Any:
    return getattr(phalanx.api, name)


def _link(name: str) -> str:
    return f"[`{name}`](#{name})"


def _parts(described: Any) -> tuple[str, dict[str, str]]:
    """Returns the text of a docstring before its sections, and every section, without its indentation."""
    about, *rest = _SECTION.split(inspect.getdoc(described) or "")
    sections = dict(zip(rest[::2], (inspect.cleandoc(f"\n{text}") for text in rest[1::2]), strict=True))
    return about.strip(), sections


def _first(described: Any) -> str:
    return f"{_plain(_parts(described)[0]).partition('. ')[0].rstrip('.')}."


def _described(function: Any) -> Iterator[str]:
    about, sections = _parts(function)
    yield from (*_code(_signature(function)), "", about, "")
    if "Args" in sections:
        yield from (*table(("argument", "meaning"), [*_entries(sections["Args"])]), "")
    yield from (*table(("raises", "when"), [*_entries(sections["Raises"])]), "", *_code(sections["Example"]))


def _signature(function: Any) -> str:
    """Returns how a function is called, with a line per argument if it is long."""
    whole = f"phalanx.{function.__name__}{inspect.signature(function)}".replace("'", "")
    if len(whole) <= WIDTH:
        return whole
    signature = inspect.signature(function)
    lines: list[str] = []
    for each in signature.parameters.values():
        if each.kind is each.KEYWORD_ONLY and "    *," not in lines:
            lines.append("    *,")
        lines.append(f"    {each},".replace("'", ""))
    return "\n".join([f"phalanx.{function.__name__}(", *lines, f") -> {signature.return_annotation}"])


def _entries(text: str) -> Iterator[tuple[str, str]]:
    """Yields the names of a section with their meanings."""
    for entry in re.split(r"\n(?=\S)", text):
        name, _, meaning = entry.partition(": ")
        meaning = _plain(meaning)
        yield f"`{name}`", meaning[:1].upper() + meaning[1:]


def _code(text: str) -> Iterator[str]:
    return (f"    {line}".rstrip() for line in text.splitlines())


def _attribute(kind: type, name: str) -> tuple[str, str, str]:
    """Returns the row of a field, a property or a method. Raises LookupError if it has no text."""
    value = inspect.getattr_static(kind, name, None)
    if inspect.isfunction(value):
        signature = inspect.signature(value)
        shown = ", ".join(str(each) for each in [*signature.parameters.values()][1:]).replace("'", "")
        found = f"{name}({shown})", str(signature.return_annotation), value.__doc__
    elif isinstance(value, property | cached_property):
        getter = value.fget if isinstance(value, property) else value.func
        found = name, str(inspect.signature(getter).return_annotation), value.__doc__
    else:
        kind = next((base for base in kind.__mro__ if name in inspect.get_annotations(base)), kind)
        annotation = inspect.get_annotations(kind).get(name, "")  # of a NamedTuple a ForwardRef
        found = name, str(getattr(annotation, "__forward_arg__", annotation)), texts_below(kind).get(name)
    if not found[2]:
        raise LookupError(f"{kind.__name__}.{name} has no text")
    return f"`{found[0]}`", f"`{found[1]}`", _plain(found[2])


def _extensions() -> Iterator[tuple[str, str]]:
    for name in extend.TABLES:
        function = getattr(extend, name)
        yield f"`{name}{inspect.signature(function)}`".replace("'", ""), _plain(function.__doc__)


def _errors() -> Iterator[tuple[str, str, str]]:
    for name, error in vars(errors).items():
        if inspect.isclass(error) and issubclass(error, errors.PhalanxError) and error.__module__ == errors.__name__:
            yield f"`{name}`", f"`{error.exit_code}`", _plain(error.__doc__ or "")


def _plain(text: str | None) -> str:
    return " ".join((text or "").split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
