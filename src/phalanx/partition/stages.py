"""The contents of a pipeline stage: its range of layers, and the parameters that belong to them.

A stage has at least one layer. The first stage also has the embedding and the learned positions, the last the final
norm and the head.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from phalanx.blocks.parameters import Shapes, parameter_shapes
from phalanx.config.model import ModelConfig
from phalanx.errors import JobError


def parse_cut(text: str) -> tuple[int, ...]:
    """Parses `layout.pp_cut`, the layers of each stage, such as "3+5+4+4". Raises JobError for any other form."""
    plain = text.replace(" ", "")
    if not re.fullmatch(r"[0-9]{1,9}(\+[0-9]{1,9})*", plain):
        raise JobError(
            f"{text!r} is not a list of layers per stage; write them with a plus between them, such as 3+5+4+4"
        )
    return tuple(int(layers) for layers in plain.split("+"))


def written_stages(text: str, stages: int, layers: int) -> tuple[range, ...]:
    """Returns the layers of each stage by `layout.pp_cut`, for a pipeline of `stages` stages and a model of `layers`
    layers. Raises JobError with every reason why it does not match them."""
    sizes = parse_cut(text)
    problems = []
    if len(sizes) != stages:
        problems.append(f"{text} are {len(sizes)} stages, the pipeline has {stages}")
    if 0 in sizes:
        problems.append(
            f"{text} leaves stage {sizes.index(0)} without a layer: embedding and head belong to the stages of the "
            "first and the last layer, so it would have no weights and only pass on its input"
        )
    if sum(sizes) != layers:
        problems.append(f"{text} = {sum(sizes)} layers, the model has {layers}")
    if problems:
        fair = "+".join(str(len(part)) for part in even(layers, stages)) if stages <= layers else ""
        raise JobError([f"{problem}{f'; legal: {fair}' if fair else ''}" for problem in problems])
    return ranges(sizes)


def even(layers: int, stages: int) -> tuple[range, ...]:
    """Distributes layers evenly, with one more in the later stages, which have fewer micro-batches in flight."""
    return tuple(range(s * layers // stages, (s + 1) * layers // stages) for s in range(stages))


def ranges(sizes: Sequence[int]) -> tuple[range, ...]:
    """Returns the layers of each stage, if stage s has `sizes[s]` of them."""
    return tuple(range(start, end) for start, end in pairwise(accumulate(sizes, initial=0)))


def stage_shapes(model: ModelConfig, stages: Iterable[range], vocab_size: int | None = None) -> Shapes:
    """Returns name and whole shape of every parameter on a rank with these stages, in the order of the module tree. If
    the head is tied, the last stage holds `embed.weight` too: a copy whose gradient the two ranks sum."""
    layers = {layer for stage in stages for layer in stage}
    first, last = 0 in layers, model.n_layers - 1 in layers
    outside = {"embed": first or (last and model.tied), "positions": first, "final_norm": last, "head": last}
    return {
        name: shape
        for name, shape in parameter_shapes(model, vocab_size).items()
        if outside.get(name.split(".")[0], False) or (name.startswith("blocks.") and int(name.split(".")[1]) in layers)
    }
