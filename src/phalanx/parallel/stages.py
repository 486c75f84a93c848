"""One rank's part of a pipeline: one or several stages, in one module with the plain model's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from phalanx.config.model import ModelConfig
from phalanx.model.transformer import Transformer
from phalanx.partition.derived import stage_shapes
from phalanx.schedule.schedule import Schedule


@dataclass(frozen=True)
class Stage:
    """Consecutive layers. The first stage has the embeddings as well, the last one the final norm, head and loss."""

    layers: tuple[str, ...]
    """Names of its blocks."""
    first: bool
    last: bool


@dataclass
class Stages:
    """The stages of a pipeline as seen by one of its ranks."""

    schedule: Schedule
    rank: int
    config: ModelConfig
    vocab: int
    cut: Sequence[range]
    """The layers of every stage."""
    local_stages: dict[int, Stage] = field(init=False)
    """The stages that this rank holds, by number."""
    names: list[frozenset[str]] = field(init=False)
    """The parameters that each stage computes with."""

    def __post_init__(self) -> None:
        last = self.schedule.stages - 1
        self.local_stages = {
            number: Stage(tuple(map(str, self.cut[number])), number == 0, number == last)
            for number in self.schedule.stages_on(self.rank)
        }
        self.names = [frozenset(stage_shapes(self.config, [layers], self.vocab)) for layers in self.cut]

    def users(self, name: str) -> list[int]:
        """Returns the stages here that compute with a parameter: several where a tied embedding is both ends'."""
        return [number for number in self.local_stages if name in self.names[number]]

    def holders(self, name: str) -> list[int]:
        """Returns the ranks that hold a parameter; the first one counts it."""
        stages = [number for number, names in enumerate(self.names) if name in names]
        ranks = [placement[number] for placement in self.schedule.placements for number in stages]
        return list(dict.fromkeys(ranks))

    def keep(self, model: Transformer) -> None:
        """Removes everything from `model` that no stage here computes with."""
        here = {layer for stage in self.local_stages.values() for layer in stage.layers}
        for layer in [name for name in model.blocks if name not in here]:
            del model.blocks[layer]
        for part in ("embed", "positions", "layer_inputs", "final_norm", "head"):
            names = [f"{part}.{name}" for name, _ in (getattr(model, part) or nn.Identity()).named_parameters()]
            if names and not any(map(self.users, names)):
                setattr(model, part, nn.Identity())
