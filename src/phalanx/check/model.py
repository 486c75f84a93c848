"""The problems of a model's blocks: the place of norms, the names of kinds, and the fields and rules of each kind."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.blocks.kinds import TABLES, chosen_kinds
from phalanx.config.fields import get
from phalanx.config.model import ModelConfig
from phalanx.nearest import did_you_mean


def model_problems(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yields the dotted path of each wrong field, and the message."""
    if model.parallel_block and model.norms_outputs:
        yield (
            "model.norm_place",
            "a parallel block adds the outputs of attention and MLP before one sum over tensor ranks, so neither can "
            f"be normalised by itself: must be before, is {model.norm_place}; nearest legal: before, or "
            "parallel_block=false",
        )
    for half, table in TABLES.items():
        names = chosen_kinds(model, half)
        unknown = [name for name in names if name not in table]
        for name in unknown:
            known = ", ".join(table)
            yield f"model.{half}", f"no {table.kind} {name!r}{did_you_mean(name, table)} (known: {known})"
        if unknown:
            continue
        needed = {path for name in names for path in table[name].needs}
        for name in dict.fromkeys(names):
            missing = [path for path in table[name].needs if not get(model, path)]
            yield from (
                (f"model.{path}", f"{table.kind} {name} needs it above 0, is {get(model, path)}") for path in missing
            )
            if not missing:
                yield from table[name].problems(model)
        for other, kind in table.items():
            for path in kind.needs:
                if get(model, path) and path not in needed:
                    yield (
                        f"model.{half}",
                        f"{table.kind} {', '.join(names)} does not use model.{path} {get(model, path)}; nearest legal: "
                        f"{half}={other}, or {path}=0",
                    )
