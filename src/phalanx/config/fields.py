"""Every field of a Job by its dotted path, and the shorter names by which a user may call it."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections import Counter
from typing import Any

from phalanx.config.constraints import Constraint
from phalanx.config.job import Job
from phalanx.nearest import nearest

SECTION_SHORTHAND = {"model": "model.preset", "cluster": "cluster.preset", "data": "data.corpus"}
"""What a section given as one word means: `model: llama3-8b` is `model.preset: llama3-8b`."""

LAUNCHER_NAMES = {"nproc_per_node": "cluster.devices_per_node", "nnodes": "cluster.nodes"}
"""torchrun's names for things that have another name here."""

FOREIGN_NAMES = {
    # nanoGPT
    "batch_size": "layout.micro_batch",
    "gradient_accumulation_steps": "layout.accumulation",
    "block_size": "model.seq_len",
    "n_embd": "model.d_model",
    "n_layer": "model.n_layers",
    "n_head": "model.n_heads",
    "max_iters": "train.steps",
    "learning_rate": "optimizer.lr",
    "dtype": "train.precision",
    "dataset": "data.corpus",
    # torchtitan
    "tensor_parallel_degree": "layout.tp",
    "pipeline_parallel_degree": "layout.pp",
    "context_parallel_degree": "layout.cp",
    "expert_parallel_degree": "layout.ep",
    "data_parallel_replicate_degree": "layout.dp_replicate",
    "data_parallel_shard_degree": "layout.dp_shard",
    "pipeline_parallel_schedule": "layout.schedule",
    # Megatron-LM
    "tensor_model_parallel_size": "layout.tp",
    "pipeline_model_parallel_size": "layout.pp",
    "context_parallel_size": "layout.cp",
    "micro_batch_size": "layout.micro_batch",
    "global_batch_size": "train.global_batch",
    "num_layers": "model.n_layers",
    "hidden_size": "model.d_model",
    "num_attention_heads": "model.n_heads",
    "expert_model_parallel_size": "layout.ep",
    "num_experts": "model.moe.n_experts",
    "moe_router_topk": "model.moe.top_k",
    "train_iters": "train.steps",
    # USP (Fang and Zhao 2024)
    "ulysses_degree": "layout.cp_ulysses",
}
"""What users of other frameworks type, and what it is called here: offered as a suggestion, never accepted silently."""


@functools.cache
def leaves(cls: type = Job) -> dict[str, Any]:
    """The type of every leaf field of a (nested) dataclass, by dotted path, in order of definition."""
    return {path: _plain(kind) for path, kind in _annotated_leaves(cls).items()}


@functools.cache
def constraints(cls: type = Job) -> dict[str, tuple[Constraint, ...]]:
    """Returns the range of every leaf field that has one stated in its type (config/constraints.py), by dotted path."""
    found = {path: getattr(kind, "__metadata__", ()) for path, kind in _annotated_leaves(cls).items()}
    return {path: ranges for path, ranges in found.items() if ranges}


def _annotated_leaves(cls: type) -> dict[str, Any]:
    """Returns the types of leaf fields as they are written, with Annotated."""
    found: dict[str, Any] = {}
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            inner = _annotated_leaves(typing.cast(type, kind))
            found.update({f"{field.name}.{path}": leaf for path, leaf in inner.items()})
        else:
            found[field.name] = kind
    return found


def _plain(kind: Any) -> Any:
    return typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind


def sections() -> list[str]:
    """Every section that a job file may have, nested ones by dotted path: model, model.moe, train, ..."""
    return list(dict.fromkeys(path.rsplit(".", 1)[0] for path in leaves()))


@functools.cache
def short_names() -> dict[str, str]:
    """Names that need no section, because only one field has them: {"tp": "layout.tp", "lr": "optimizer.lr", ...}.

    Of several fields with one name the least nested wins, if it is alone there: d_ff is model.d_ff, not model.moe.d_ff.
    """
    by_name: dict[str, list[str]] = {}
    for path in leaves():
        by_name.setdefault(path.rsplit(".", 1)[-1], []).append(path)
    chosen = dict(LAUNCHER_NAMES)
    for name, paths in by_name.items():
        depth = Counter(path.count(".") for path in paths)
        shallowest = min(depth)
        if depth[shallowest] == 1:
            chosen[name] = next(path for path in paths if path.count(".") == shallowest)
    return chosen


def resolve(name: str) -> str | None:
    """The dotted path that a user's name means (`tp`, `layout.tp`, `dp-shard`, `model`), or None."""
    name = name.replace("-", "_")
    if name in leaves():
        return name
    return SECTION_SHORTHAND.get(name) or short_names().get(name)


def suggestion(name: str) -> str:
    """What to say about an unknown name: "; did you mean train.steps?", or nothing."""
    plain = name.replace("-", "_")
    last = plain.rsplit(".", 1)[-1]
    known = leaves()
    same = [path for path in known if path.rsplit(".", 1)[-1] == plain]
    if len(same) > 1:
        return f"; which one: {' or '.join(same)}?"
    target = FOREIGN_NAMES.get(last)
    if target is None and (alike := nearest(plain, known)):
        target = alike
    if target is None:
        # Right name in the wrong section, or a mistyped short name.
        names = {path.rsplit(".", 1)[-1]: path for path in reversed(list(known))}
        found = nearest(last, names)
        target = names[found] if found else None
    return f"; did you mean {target}?" if target else ""


def get(obj: Any, path: str) -> Any:
    """The value at a dotted path."""
    return functools.reduce(getattr, path.split("."), obj)


def replace(obj: Any, path: str, value: Any) -> Any:
    """A copy of a frozen dataclass with the value at a dotted path changed."""
    head, _, rest = path.partition(".")
    return dataclasses.replace(obj, **{head: replace(getattr(obj, head), rest, value) if rest else value})
