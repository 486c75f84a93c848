"""The problems of a model's kinds of layers: names, the fields that a kind needs, and the kind's own rules."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.blocks.kinds import TABLES, chosen_kinds
from phalanx.config.fields import get
from phalanx.config.model import ModelConfig
from phalanx.nearest import did_you_mean


def model_problems(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yields the dotted path of each wrong field, and the message."""
    for half, table in TABLES.items():
        names = chosen_kinds(model, half)
        unknown = [name for name in names if name not in table]
        for name in unknown:
            known = ", ".join(table)
            yield f"model.{half}", f"no {table.kind} {name!r}{did_you_mean(name, table)} (known: {known})"
        if unknown:
            continue
        kinds = [table[name] for name in names]
        needed = {path for kind in kinds for path in kind.needs}
        for kind in kinds:
            missing = [path for path in kind.needs if not get(model, path)]
            for path in missing:
                yield f"model.{path}", f"{table.kind} {kind.name} needs it above 0, is {get(model, path)}"
            if not missing:
                yield from kind.problems(model)
        for other in table.values():
            for path in other.needs:
                if get(model, path) and path not in needed:
                    yield (
                        f"model.{half}",
                        f"{table.kind} {', '.join(names)} does not use model.{path} {get(model, path)}; nearest legal: "
                        f"{half}={other.name}, or {path}=0",
                    )
