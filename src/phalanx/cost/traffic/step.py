"""Bytes that a rank sends in one optimizer step, by formula: exactly those that the ledger of a real run counts.

Beside the messages of each technique (state.py, blocks.py) there are a pipeline's messages, and three numbers over all
ranks: loss, gradient norm, and whether to stop. No byte depends on the data, except between experts without a capacity,
for which a balanced load is predicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from phalanx.blocks.ends import boundary
from phalanx.blocks.place import place_of
from phalanx.config.job import Optimizer
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.cost.held import LayerKind, kinds_of
from phalanx.cost.memory.state import WIDTHS
from phalanx.cost.traffic.blocks import around_traffic, balanced_rows, block_traffic, row_traffic
from phalanx.cost.traffic.parameters import held_parameters
from phalanx.cost.traffic.passes import pipeline_work
from phalanx.cost.traffic.state import Spread, state_traffic
from phalanx.cost.traffic.table import Table, Traffic
from phalanx.partition.batch import Batch
from phalanx.partition.recompute import written
from phalanx.partition.sequence import cp_coordinates

ADAMW = Optimizer()
STATUS = 3 * 8
"""Bytes of loss, squared gradient norm, and whether to stop, in fp64."""
PAIR_STATUS = 4 * 8
"""Bytes of the sums over preference pairs beside them."""
SEQUENCE_SUM = 8
"""Bytes of the log-probability of a sequence, which context-parallel ranks sum."""
TICKET = 8
"""Bytes of a gradient's place in the order of arrival, which asynchronous SGD tells all ranks of a replica."""


def step_traffic(
    model: ModelConfig,
    layout: Layout,
    batch: Batch,
    *,
    precision: str = "fp32",
    gradients: str = "same",
    vocab: int | None = None,
    stages: Sequence[range] | None = None,
    rank: int = 0,
    rows: float | None = None,
    optimizer: Optimizer = ADAMW,
    pairs: bool = False,
    conversations: int = 1,
    share: float = 1,
) -> Traffic:
    """Returns the bytes that `rank` (of all of `layout.world`) sends in one optimizer step, by mesh axis and
    collective, named as in the ledger. By default it is rank 0, whose ledger `phalanx train` reports.

    Pipeline ranks differ; so do positions of a ring in layers with a window, and ranks of the shard axis, if tp or pp
    sums gradients of parameters that they shard unevenly. `precision` and `gradients` are `train`'s, `vocab` the
    tokenizer's vocabulary size if the model leaves it open. `stages` are the layers of each pipeline stage
    (phalanx.partition.cut.stages_of); None: those of `layout.pp_cut`. `rows` are those that this rank sent to other
    ranks' experts, or as an expert's rank back to theirs, in the forward passes of all layers and micro-batches, if
    known: each layer counts an equal share of them, which matters if layers recompute differently. An `optimizer` that
    updates whole matrices sends pieces of them. `pairs`: the loss compares preference pairs. `conversations`: the most
    that are packed into a sequence, known once the data are read.

    Replicas that synchronize every sync_every steps (local_sgd, diloco) send a share of it per step. A pipeline without
    a flush sends the mean over a run of steps. With sync=asp a step's parts go to whichever replica is ready: `share`
    is how many its replica computes per step, by default one, as replicas of equal speed do. Raises JobError if the
    vocabulary size or the stages are not known, and as schedule_of does.
    """
    if layout.processes == 1:
        return {}
    plan = pipeline_work(layout, model.n_layers, batch.accumulation, stages)
    pp = rank // (layout.world // layout.pp)
    work = plan.work[pp]
    runs = held_parameters(model, layout, vocab, plan, pp)
    spread = Spread.of(layout, precision, gradients, rank, optimizer=optimizer, share=share)
    table = state_traffic(runs, spread, work, model)
    ring_rank, _ = cp_coordinates(layout, rank // layout.tp % layout.cp)
    place = place_of(
        model,
        layout,
        batch.micro_batch,
        width=WIDTHS[precision],
        slices=plan.slices,
        ring_rank=ring_rank,
        conversations=conversations,
    )
    last, passed, routed = len(plan.cut) - 1, Table(), Counter[LayerKind]()
    for stage, passes in work.passes.items():
        here = around_traffic(place, first=stage == 0, last=stage == last)
        for kind, number in kinds_of(model, written(layout), plan.cut[stage]):
            here.take(block_traffic(place, *kind), number)
            if not kind.block.routed:
                continue
            routed[kind] += number * passes.forward
            if rows is None:
                here.take(row_traffic(place, *kind), number * balanced_rows(place))
        if pairs and stage == last:
            here.add("cp", "all_reduce", batch.micro_batch * SEQUENCE_SUM, layout.cp)
        passed.take(here, passes.forward / plan.slices)
    if rows is not None:
        for kind, blocks in routed.items():
            passed.take(row_traffic(place, *kind), rows * (blocks / routed.total()))
    passed.note("pp", "send", work.sends * place.bytes_of(boundary(place)))
    table.take(passed, share / work.steps)
    _status(table, layout, STATUS + TICKET if layout.sync == "asp" else STATUS + pairs * PAIR_STATUS, share)
    return table.traffic()


def _status(table: Table, layout: Layout, size: int, share: float) -> None:
    """Adds the numbers that decide about a step, of `size` bytes. Independent replicas do not share theirs."""
    if layout.independent_replicas == 1:
        table.add("world", "all_reduce", size, layout.world)
        return
    shard = "dp_shard" if layout.cp == 1 else "dp_shard_cp"
    for axis, ranks in (("tp", layout.tp), (shard, layout.shard_ranks), ("pp", layout.pp)):
        table.add(axis, "all_reduce", size, ranks, share)
