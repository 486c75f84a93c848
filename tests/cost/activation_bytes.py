"""The bytes that a block keeps of a micro-batch, from the list of its operators."""

from phalanx.blocks.kinds import block_kinds
from phalanx.blocks.operator import PHALANX, MemoryProfile, place_of
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.cost.block_memory import saved
from phalanx.cost.held import LayerKind
from phalanx.partition.derived import recompute_of


def activation_bytes(
    model: ModelConfig,
    layout: Layout,
    micro_batch: int,
    width: int = 2,
    layer: int | None = None,
    memory_profile: MemoryProfile = PHALANX,
    narrow: bool = False,
) -> int:
    """Returns what block `layer` keeps on a rank of a micro-batch of so many sequences; by default the last block,
    which has experts where any has."""
    layer = model.n_layers - 1 if layer is None else layer
    tokens = micro_batch * model.seq_len / layout.cp
    kind = LayerKind(block_kinds(model)[layer], recompute_of(layout, layer, model.n_layers))
    every = saved(place_of(model, layout, width=width, narrow=narrow, profile=memory_profile), kind)
    return round(tokens * sum(size for _, size in every))
