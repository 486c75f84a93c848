"""Every field of a job as its readers need it: type, default, range, meaning and an example, from the dataclasses.

The help pages, docs/reference/job.md and the JSON schema are views of it. The meaning of a field is the text below it
in its dataclass; the meaning of a section is the dataclass's docstring.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import sys
import typing
from dataclasses import dataclass
from typing import Any

from phalanx.config.constraints import Constraint
from phalanx.config.fields import constraints, get, leaves, name_of, short_names
from phalanx.config.job import Job
from phalanx.config.values import row_of

MEASURED = "cluster.calibration"
"""The section that `phalanx bench` writes: help leaves it out."""

EXAMPLES: dict[str, str] = {
    "model.preset": "llama3.1-8b",
    "model.from": "runs/smollm2",
    "model.n_layers": "12",
    "model.d_model": "768",
    "model.n_heads": "12",
    "model.n_kv_heads": "4",
    "model.head_dim": "64",
    "model.d_ff": "2048",
    "model.vocab_size": "32000",
    "model.seq_len": "2048",
    "model.window": "1024",
    "model.full_every": "6",
    "model.attention": "latent",
    "model.feed_forward": "experts",
    "model.rope_theta": "500000",
    "model.window_rope_theta": "10000",
    "model.norm_eps": "1e-6",
    "model.rope_scaling.factor": "8",
    "model.moe.n_experts": "8",
    "model.moe.d_ff": "1024",
    "model.moe.n_shared": "1",
    "model.moe.n_dense_layers": "1",
    "model.moe.aux_loss": "0.01",
    "model.moe.z_loss": "0.001",
    "model.moe.capacity": "1.25",
    "model.mla.q_rank": "1536",
    "model.mla.kv_rank": "512",
    "model.lora.rank": "8",
    "model.lora.targets": "attention",
    "cluster.preset": "dgx-h100:4",
    "cluster.nodes": "2",
    "cluster.devices_per_node": "8",
    "cluster.peak_tflops": "989.4",
    "cluster.domain": "72",
    "cluster.pod": "32",
    "cluster.accelerator.name": "h100-80gb",
    "cluster.accelerator.memory_gib": "79.1",
    "cluster.accelerator.bandwidth_gbs": "3350",
    "cluster.accelerator.cores": "132",
    "layout.tile": "mlp+attention",
    "layout.schedule": "zb_v",
    "layout.pp_cut": "3+5+4+4",
    "layout.recompute_cut": "2+1+0+0",
    "layout.offload": "optimizer",
    "layout.micro_batch": "4",
    "layout.accumulation": "8",
    "layout.loss_chunk": "1024",
    "layout.sync_every": "50",
    "data.corpus": "shakespeare_char",
    "data.path": "corpus.jsonl",
    "data.mix": "[{path: books, weight: 3}, {path: code.jsonl, weight: 1}]",
    "data.text_field": "content",
    "data.tokenizer": "bpe",
    "data.template": "chatml",
    "data.dir": "/scratch/data",
    "data.limit_mb": "100",
    "optimizer.name": "muon",
    "optimizer.lr": "3e-4",
    "optimizer.betas": "[0.9, 0.98]",
    "optimizer.options": "rho=0.04",
    "optimizer.warmup_steps": "100",
    "optimizer.decay_steps": "1000",
    "optimizer.base_batch": "256",
    "train.steps": "1000",
    "train.global_batch": "256",
    "train.eval_every": "100",
    "train.profile.steps": "[10, 12]",
    "train.profile.ranks": "[0, 3]",
    "checkpoint.every": "500",
    "checkpoint.every_minutes": "30",
    "checkpoint.keep_every": "5000",
    "checkpoint.remote": "s3://bucket/runs",
    "guard.repeat_every": "100",
    "run.name": "first",
    "run.dir": "/scratch/runs",
    "run.device_budget_mib": "512",
    "run.nnodes": '"1:2"',
    "run.rdzv_endpoint": "node-a:29400",
    "run.trackers": "[tensorboard]",
    "run.sample_prompt": '"def "',
}
"""Values for the examples of fields whose kind alone gives no telling one."""


@dataclass(frozen=True)
class FieldReference:
    """One field of a job."""

    path: str
    """Dotted path: layout.tp."""
    kind: Any
    default: Any
    ranges: tuple[Constraint, ...]
    about: str

    @property
    def section(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def short(self) -> str:
        """The shortest name that the command line takes for it."""
        return next(
            (name for name, path in short_names().items() if path == self.path and name == self.name), self.path
        )

    @property
    def choices(self) -> tuple[Any, ...]:
        """All legal values, if the type lists them."""
        return typing.get_args(self.kind) if typing.get_origin(self.kind) is typing.Literal else ()

    @property
    def type_words(self) -> str:
        """The type with its range: "integer, ≥ 1"."""
        limits = [words for each in self.ranges if (words := each.words)]
        return ", ".join([type_words(self.kind), *limits])

    @property
    def example(self) -> str:
        """A value as YAML that is legal for the field alone, and not its default where there is another."""
        return EXAMPLES.get(self.path) or _example(self.kind, self.default)


@functools.cache
def fields() -> dict[str, FieldReference]:
    """Returns every field of a job by dotted path, in order of definition."""
    job, ranges = Job(), constraints()
    texts = {
        f"{section}.{name_of(name)}": text
        for section, cls in _classes().items()
        for name, text in texts_below(cls).items()
    }
    return {
        path: FieldReference(path, kind, get(job, path), ranges.get(path, ()), texts.get(path, ""))
        for path, kind in leaves().items()
    }


@functools.cache
def section_texts() -> dict[str, str]:
    """Returns the meaning of every section that has fields, by dotted path, in order of definition."""
    return {
        section: " ".join((inspect.getdoc(kind) or "").split())
        for section, kind in _classes().items()
        if any(field.section == section for field in fields().values())
    }


def shown(value: Any) -> str:
    """Returns a value as a job file has it: true, [0.9, 0.95], '' for an empty text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return repr(value) if isinstance(value, str) and (not value or not value.strip()) else f"{value}"


@functools.cache
def _classes() -> dict[str, type]:
    """Returns the dataclass of every section by dotted path."""
    found: dict[str, type] = {}

    def walk(cls: type, prefix: str) -> None:
        hints = typing.get_type_hints(cls)
        for each in dataclasses.fields(cls):
            kind = hints[each.name]
            if dataclasses.is_dataclass(kind):
                found[f"{prefix}{each.name}"] = typing.cast(type, kind)
                walk(typing.cast(type, kind), f"{prefix}{each.name}.")

    walk(Job, "")
    return found


def texts_below(cls: type) -> dict[str, str]:
    """Returns the text below every field of a dataclass."""
    body = next(
        statement.body
        for statement in _module(cls.__module__).body
        if isinstance(statement, ast.ClassDef) and statement.name == cls.__name__
    )
    found: dict[str, str] = {}
    for statement, below in itertools.pairwise(body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            found[statement.target.id] = " ".join(below.value.value.split())
    return found


@functools.cache
def _module(name: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[name]))


def type_words(kind: Any) -> str:
    """Returns a type in words: "integer", or the choices."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return ", ".join(str(choice) for choice in arguments if choice != "")
    if row := row_of(kind):
        return f"list of mappings: {', '.join(field.name for field in dataclasses.fields(row))}"
    if origin is tuple:
        inner = type_words(arguments[0])
        return f"list of {inner}s" if arguments[1:] == (...,) else f"{len(arguments)} {inner}s"
    if arguments:
        return " or ".join(map(type_words, arguments))
    return {int: "integer", float: "number", bool: "true or false", str: "text"}[kind]


def _example(kind: Any, default: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return shown(next((choice for choice in reversed(typing.get_args(kind)) if choice != default), default))
    if kind is bool or bool in typing.get_args(kind):
        return shown(not default or default == "auto")
    if kind is int:
        return shown(2 * default if default > 1 else 2)
    if kind is float:
        return f"{default / 2 if 0 < default <= 1 else default * 2 or 0.1:g}"
    return shown(default)
