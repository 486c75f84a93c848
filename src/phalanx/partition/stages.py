"""What a pipeline stage has of a model: a run of layers as a user writes it, and the parameters that go with it.

A stage is the range of its layers, at least one. The first has the embedding and the learned positions besides, the
last the final norm and the head.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from phalanx.blocks.parameters import Shapes, parameter_shapes
from phalanx.config.model import ModelConfig
from phalanx.errors import JobError


def parse_cut(text: str) -> tuple[int, ...]:
    """Layers of each stage from `layout.pp_cut`: "3+5+4+4". Raises JobError where it is something else."""
    plain = text.replace(" ", "")
    if not re.fullmatch(r"[0-9]{1,9}(\+[0-9]{1,9})*", plain):
        raise JobError(f"{text!r} is no list of layers a stage; write them with a plus between them, such as 3+5+4+4")
    return tuple(int(layers) for layers in plain.split("+"))


def written_stages(text: str, stages: int, layers: int) -> tuple[range, ...]:
    """The layers of each stage by `layout.pp_cut`, for a pipeline of `stages` stages and a model of `layers` layers.

    Raises JobError with every reason why it does not fit them."""
    sizes = parse_cut(text)
    problems = []
    if len(sizes) != stages:
        problems.append(f"{text} are {len(sizes)} stages, the pipeline has {stages}")
    if 0 in sizes:
        problems.append(f"{text} leaves stage {sizes.index(0)} without a layer; each needs at least one")
    if sum(sizes) != layers:
        problems.append(f"{text} = {sum(sizes)} layers, the model has {layers}")
    if problems:
        fair = "+".join(str(len(part)) for part in even(layers, stages)) if stages <= layers else ""
        raise JobError([f"{problem}{f'; legal: {fair}' if fair else ''}" for problem in problems])
    return ranges(sizes)


def even(layers: int, stages: int) -> tuple[range, ...]:
    """Layers dealt out as evenly as whole numbers allow, one more to the later stages, which keep fewer micro-batches
    in flight."""
    return tuple(range(s * layers // stages, (s + 1) * layers // stages) for s in range(stages))


def ranges(sizes: Sequence[int]) -> tuple[range, ...]:
    """The layers of each stage, where stage s has `sizes[s]` of them."""
    return tuple(range(start, end) for start, end in pairwise(accumulate(sizes, initial=0)))


def stage_shapes(model: ModelConfig, stages: Iterable[range], vocab_size: int | None = None) -> Shapes:
    """Name and whole shape of every parameter that a rank with these stages holds, in the order of the module tree.

    Where the head is tied, the last stage holds `embed.weight` too: a copy, whose gradient the two ranks add up."""
    layers = {layer for stage in stages for layer in stage}
    first, last = 0 in layers, model.n_layers - 1 in layers
    outside = {"embed": first or (last and model.tied), "positions": first, "final_norm": last, "head": last}
    return {
        name: shape
        for name, shape in parameter_shapes(model, vocab_size).items()
        if outside.get(name.split(".")[0], False) or (name.startswith("blocks.") and int(name.split(".")[1]) in layers)
    }
