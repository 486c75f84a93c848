"""The bytes that a block keeps of a micro-batch, from the list of its operators."""

from phalanx.blocks.kinds import block_kinds
from phalanx.blocks.operator import PHALANX, MemoryProfile
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.cost.block_memory import saved
from phalanx.partition.derived import recompute_of, uniform_recompute


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
    layout = uniform_recompute(layout, recompute_of(layout, layer, model.n_layers))
    tokens = micro_batch * model.seq_len / layout.cp
    every = saved(model, layout, width, block_kinds(model)[layer], memory_profile, narrow)
    return round(tokens * sum(size for _, size in every))
