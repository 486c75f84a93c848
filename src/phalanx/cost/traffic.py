"""Bytes that a rank sends in one optimizer step, by formula: exactly those that the ledger of a real run counts.

Beside the messages of each technique there are a pipeline's messages, and three numbers over all
ranks: loss, gradient norm, and whether to stop. No byte depends on the data, except between experts without a capacity,
for which a balanced load is predicted, and in attention within documents, for which it is the mean over a sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from phalanx.axes.catalogue import agreement
from phalanx.blocks.feed_forward import routed_rows, tokens_reaching
from phalanx.blocks.kinds import BlockKind, block
from phalanx.blocks.operator import EXPERT_NUMBER, Operator, Place, place_of
from phalanx.blocks.parameters import weight_of
from phalanx.blocks.residual import boundary, embedding, head
from phalanx.config.corpora import Compared
from phalanx.config.job import Optimizer
from phalanx.config.layout import Layout, Recompute
from phalanx.config.model import ModelConfig
from phalanx.config.precision import FP8_UNITS, Fp8Scaling
from phalanx.cost.communication import Collective, sent_bytes, state_messages
from phalanx.cost.held import LayerKind, kinds_of
from phalanx.cost.traffic_parameters import HeldParameter, LayerRun, RankPasses, held_parameters, pipeline_work
from phalanx.optimizers.catalogue import granularity_of
from phalanx.optimizers.entry import Granularity, is_hidden_matrix, matrix_elements
from phalanx.partition import derived
from phalanx.partition.document_sample import DocumentSample, document_work
from phalanx.partition.matrices import Piece, ShardRanges, SharedMatrix, granular_cut, rounds, sent_elements
from phalanx.partition.tensor_slices import PUSH_BYTES, REPLY_BYTES, STOP_MESSAGE_BYTES, cp_coordinates, in_buckets

Traffic = dict[str, dict[str, float]]
"""Bytes that a rank sends per step, {axis: {collective: bytes}}, as the ledger names them."""


@dataclass
class Table:
    """Bytes that one rank sends; zeros have no entry."""

    entries: dict[tuple[str, Collective], float] = field(default_factory=dict)

    def add(self, axis: str, collective: Collective, payload: float, ranks: int, times: float = 1) -> None:
        """Adds `times` collectives over `payload` bytes (see sent_bytes) and `ranks` ranks."""
        if ranks > 1:
            self.note(axis, collective, times * sent_bytes(collective, payload, ranks))

    def note(self, axis: str, collective: Collective, sent: float) -> None:
        """Adds `sent` bytes."""
        if sent:
            self.entries[axis, collective] = self.entries.get((axis, collective), 0.0) + sent

    def take(self, other: Table, times: float = 1) -> None:
        """Adds another table, `times` over."""
        for (axis, collective), sent in other.entries.items():
            self.note(axis, collective, times * sent)

    def traffic(self) -> Traffic:
        """Returns the bytes by axis, then by collective, in the order of the ledger."""
        traffic: Traffic = {}
        for (axis, collective), sent in sorted(self.entries.items()):
            traffic.setdefault(axis, {})[collective] = sent
        return traffic


def around_traffic(place: Place, *, first: bool, last: bool) -> Table:
    """Returns the traffic after the embedding on the rank of the `first` stage, and from the final norm to the loss on
    that of the `last`. None of these payloads depends on the vocabulary."""
    operators = [*([embedding(place, 1)] if first else []), *(head(place, 1) if last else [])]
    return _traffic(place, operators, "none")


@cache
def block_traffic(place: Place, kind: BlockKind, recompute: Recompute) -> Table:
    """Returns the traffic of one block, without the rows exchanged between experts."""
    return _traffic(place, block(place, kind), recompute)


@cache
def row_traffic(place: Place, kind: BlockKind, recompute: Recompute) -> tuple[Table, Table]:
    """Returns the traffic of one row that a rank sends to experts on another rank, and of one that it gets from there
    and sends back: once, once more for its gradient, and again if blocks are recomputed. A token that is sent once has
    its gates with it, and its experts' numbers, which have no gradient."""
    out, back = Table(), Table()
    for operator in block(place, kind):
        for message in (each for each in operator.messages if each.copies):
            there = operator.name == "dispatch"
            beside = place.model.moe.top_k if place.once and there else 0
            row = place.bytes_of(message._replace(elements=place.model.d_model + beside))
            sent, returned = (out, back) if there else (back, out)
            times = message.forward + message.again(recompute)
            sent.note("ep", message.collective, times * (row + EXPERT_NUMBER * beside))
            returned.note("ep", message.collective, message.back(recompute) * row)
    return out, back


def balanced_rows(place: Place) -> float:
    """Returns the rows that a rank sends to experts on other ranks in a block with experts: with a capacity every slot,
    without one the same number to every rank; or the tokens, if each is sent once."""
    if place.once:
        moe, each = place.model.moe, place.tokens // place.routed_share // place.sequences
        halves = (tokens_reaching(half * each, moe.n_experts, moe.top_k, place.ep) for half in place.halves)
        return (place.ep - 1) * sum(halves)
    nodes, near = place.ep_nodes, place.ep // place.ep_nodes
    hops = (near - 1) / near + (nodes - 1) / nodes
    return routed_rows(place) / (place.tp if place.folds else 1) * hops


def _traffic(place: Place, operators: Iterable[Operator], recompute: Recompute) -> Table:
    table = Table()
    for operator in operators:
        for message in operator.messages:
            ranks = place.ranks_of(message)
            if not message.copies and ranks > 1:
                times = message.times(operator.mode(recompute))
                table.add(message.ledger_axis, message.collective, place.bytes_of(message), ranks, times)
    return table


class Instance(NamedTuple):
    """One parameter of one layer, or one tile of it, as a rank holds it, with the ranks that share it."""

    layer: int
    """Number of the layer among those of the rank; the parameters outside the blocks have one of their own."""
    held: HeldParameter
    axis: str
    ranks: int
    rank: int
    """This rank's place among them."""
    ranges: ShardRanges


def instances_of(runs: Sequence[LayerRun]) -> list[tuple[int, HeldParameter]]:
    """Returns every parameter of a rank with the number of its layer, in the order of the module tree: `runs` have
    equal layers once."""
    layers = (run.held for run in runs for _ in range(run.times))
    return [(layer, parameter) for layer, held in enumerate(layers) for parameter in held]


def matrix_traffic(
    table: Table, instances: Iterable[Instance], model: ModelConfig, width: int, tp: int, tp_rank: int
) -> None:
    """Adds what a rank, tensor rank `tp_rank` of `tp`, sends for one update in numbers of `width` bytes."""
    groups: dict[tuple[str, int, int, int], list[Instance]] = {}
    for each in instances:
        if is_hidden_matrix(each.held.name, each.held.shape):
            # What every tensor rank holds whole does not travel between them.
            copies = each.held.copies if each.held.cut and tp > 1 else 0
            groups.setdefault((each.axis, each.ranks, each.rank, copies), []).append(each)
    for (axis, ranks, rank, copies), group in groups.items():
        pieces: dict[tuple[int, str, int], list[Piece]] = {}
        for layer, held, *_, ranges in group:
            size = matrix_elements(held.name, held.shape, held.shape)
            for number, start in enumerate(range(0, ranges.elements, size)):
                pieces.setdefault((layer, held.name, number), []).append(Piece(ranges, start, start + size))
        shared = []
        for (_, name, _), parts in pieces.items():
            rows, columns = weight_of(model, name).shape[-2:]
            shared.append(SharedMatrix((rows, columns), tuple(parts)))
        matrices, between = shared, (tp, tp_rank, copies) if copies else (1, 0, 1)
        for owners in rounds(matrices, ranks, between[0]):
            sent = sent_elements(matrices, owners, rank, *between)
            table.note(axis, "all_to_all", sent.shards * width)
            table.note("tp", "all_to_all", sent.tp * width)


@dataclass(frozen=True)
class Spread:
    """The sharding of one rank's state, and the bytes per element in which it is sent."""

    layout: Layout
    width: int
    """Bytes per element of a parameter."""
    gradient_width: int
    """Bytes per element of a gradient while it is summed over data ranks."""
    master_width: int
    """Bytes per element of the optimizer's copy of a parameter."""
    shard_rank: int
    """Index of the rank in dp_shard × cp."""
    tp_rank: int
    granularity: Granularity
    """Where the optimizer lets shards end."""
    serves: bool
    """Whether the rank is of the first replica, which serves parameters with sync=asp."""
    share: float
    """How many parts of a step its replica computes."""
    unit: int = 16
    """Of which the sizes of a matrix are multiples, if it is gathered in fp8."""

    @classmethod
    def of(
        cls,
        layout: Layout,
        precision: str,
        gradients: str,
        rank: int,
        *,
        optimizer: Optimizer,
        share: float = 1,
        unit: int = 16,
    ) -> Spread:
        """Returns the spread of a rank of all of the layout's; `precision` and `gradients` are `train`'s."""
        width = derived.PARAMETER_BYTES[precision]
        # Half precisions have fp32 master weights.
        widths = width, 4 if gradients == "fp32" else width, max(width, 4)
        place = rank // layout.tp % layout.shard_ranks, rank % layout.tp
        serves = rank // (layout.tp * layout.shard_ranks) % layout.dp_replicate == 0
        return cls(layout, *widths, *place, granularity_of(optimizer), serves, share, unit)

    @property
    def shard(self) -> tuple[str, int]:
        """The axis that shards state, and its number of ranks."""
        return derived.shard_axis(self.layout), self.layout.shard_ranks

    @property
    def replicas(self) -> int:
        """Number of replicas that sum their gradients."""
        return self.layout.summed_replicas

    def over(self, parameter: HeldParameter) -> tuple[str, int, int]:
        """Returns the axis that shards a parameter's state, its number of ranks, and this rank's index among them."""
        if parameter.expert and self.layout.ep > 1:
            return "edp", self.layout.edp, self.shard_rank // self.layout.ep_shard
        return *self.shard, self.shard_rank

    def near(self, axis: str) -> int:
        """Returns the number of ranks of an axis that keep a second copy of its parameters together; 0 without one."""
        return derived.near_ranks(self.layout, experts=axis == "edp") if derived.is_copied(self.layout) else 0


def state_traffic(runs: Sequence[LayerRun], spread: Spread, work: RankPasses, model: ModelConfig) -> Table:
    """Returns the bytes that a rank with `runs` sends in one step for all of its state."""
    table, layout = Table(), spread.layout
    instances: list[Instance] = []
    if derived.shards_parameters(layout):
        updated, width = _fsdp(table, runs, spread, work, model), spread.width
        if spread.granularity == "matrix":
            instances = [_by_rows(layer, parameter, spread) for layer, parameter in instances_of(runs)]
    elif layout.shard_ranks * spread.replicas > 1:
        instances, width = _buckets(table, runs, spread, work), spread.gradient_width
        updated = Counter[HeldParameter]()
        for each in instances:
            updated[each.held] += each.ranges.held(each.rank)
    else:
        updated, width = Counter[HeldParameter](), spread.width
        for run in runs:
            for parameter in run.held:
                updated[parameter] += 0 if parameter.frozen else run.times * parameter.size
        if spread.granularity == "matrix":
            instances = [_by_rows(layer, parameter, spread) for layer, parameter in instances_of(runs)]
    _partials(table, updated, layout, width)
    if spread.granularity == "matrix":
        matrix_traffic(table, instances, model, spread.master_width, layout.tp, spread.tp_rank)
    if layout.sync == "asp":
        every = Table()
        every.take(table, spread.share)
        if spread.serves:
            answered = layout.dp_replicate - spread.share
            every.note("dp_replicate", "send", answered * (REPLY_BYTES + updated.total() * spread.width))
        else:
            every.note("dp_replicate", "send", spread.share * (PUSH_BYTES + updated.total() * spread.gradient_width))
        return every
    if layout.independent_replicas > 1:
        # Now and then all replicas synchronize and average their optimizers' parameters.
        replicas, axis, (share, messages) = layout.independent_replicas, layout.replica_axis, agreement(layout)
        table.add(axis, "all_gather", replicas * STOP_MESSAGE_BYTES, replicas, share)
        for collective, numbers in messages:
            table.add(axis, collective, numbers * updated.total() * spread.master_width, replicas, share)
    return table


def _by_rows(layer: int, parameter: HeldParameter, spread: Spread) -> Instance:
    """Returns a parameter that FSDP shards, or that is not sharded."""
    axis, ranks, rank = spread.over(parameter)
    return Instance(layer, parameter, axis, ranks, rank, parameter.ranges(ranks))


def _fsdp(
    table: Table, runs: Sequence[LayerRun], spread: Spread, work: RankPasses, model: ModelConfig
) -> Counter[HeldParameter]:
    """Adds FSDP's and HSDP's traffic. Returns, for each parameter, the elements that this rank updates, summed over
    equal layers and tiles."""
    updated, layout = Counter[HeldParameter](), spread.layout
    lost = _mistargeted(runs, layout, work)
    for run in runs:
        again = len(lost & set(run.layers))
        for parameter in run.held:
            axis, ranks, rank = spread.over(parameter)
            ranges = parameter.ranges(ranks)
            gathers = run.times * _gathers(parameter, spread, work, run.full)
            gathers += again if parameter.group in ("block", "experts") else 0
            often = {"gather": run.times, "regather": gathers - run.times}
            if not parameter.frozen:
                often |= {"reduce": run.times * _reductions(parameter, layout, work)}
                often |= {"sum": run.times} if layout.compression == "none" else {}
            gathered = parameter.sent_as(model, layout.quantise_weights, spread.unit)
            columns = parameter.shape[-1] if gathered == "fp8" else 0
            formats = gathered, derived.sent_as(parameter.shape, layout.quantise_gradients)
            _send(table, spread, axis, ranges.each, ranks, formats, columns, **often)
            if parameter.frozen:
                continue
            updated[parameter] += run.times * ranges.held(rank)
    if layout.compression != "none":
        trained = [held for _, held in instances_of(runs) if not held.frozen]
        own = [
            (held, held.ranges(over[1]).held(over[2]))
            for held, over in zip(trained, map(spread.over, trained), strict=True)
        ]
        least = derived.bucket_bytes(layout) / spread.gradient_width
        for bucket in _filled(tuple(elements for _, elements in own), least):
            _compressed(table, spread, [own[n] for n in bucket])
    return updated


def _compressed(table: Table, spread: Spread, own: Sequence[tuple[HeldParameter, int]]) -> None:
    """Adds a bucket's compressed sum over replicas, of so many elements of each parameter."""
    layout, ranks, width = spread.layout, spread.replicas, spread.gradient_width
    plain, codes, factors = 0, 0, 0
    for held, elements in own:
        rows, columns = elements // held.shape[-1], held.shape[-1]
        if len(held.shape) > 1 and layout.compression != "powersgd":
            codes += elements
        elif len(held.shape) > 1 and derived.has_factors(rows, columns, layout.compression_rank, width):
            factors += (rows + columns) * layout.compression_rank
        else:
            plain += elements
    each = ranks * derived.wire_bytes(-(-codes // ranks), derived.codes_of(layout), width) if codes else 0
    for collective in ("all_to_all", "all_gather"):
        table.add("dp_replicate", collective, each, ranks)
    table.add("dp_replicate", "all_reduce", plain * width + factors * max(4, width), ranks)


def _gathers(parameter: HeldParameter, spread: Spread, work: RankPasses, full: bool) -> int:
    """Returns how often FSDP gathers a parameter in a step; `full`: its block is fully recomputed. A pipeline without
    resharding keeps it until the end of the step."""
    layout = spread.layout
    if parameter.group == "around":
        return work.renewals if layout.pp == 1 or layout.reshard else 1
    passes = work.passes[parameter.users[0]]
    if not layout.reshard:
        return passes.forward if layout.pp == 1 else 1
    if parameter.group == "rows":
        return passes.forward
    # Recomputation of a block reshards its tiles once more, except the last one, at which it ends.
    repeated = full and parameter.group == "tile"
    return passes.forward + passes.backward * (2 if repeated else 1)


def _reductions(parameter: HeldParameter, layout: Layout, work: RankPasses) -> int:
    """Returns how often its gradients are reduced. Outside a pipeline's blocks they wait for several stages."""
    if layout.accumulate == "local" or (parameter.group == "around" and layout.pp > 1):
        return 1
    passes = work.passes[parameter.users[0]]
    # Tiles of embedding and head have their gradients at once, also where the backward pass is split.
    early = parameter.group in ("tile", "rows") and not parameter.name.startswith("blocks.")
    return passes.renewed if early else passes.ends


def _mistargeted(runs: Sequence[LayerRun], layout: Layout, work: RankPasses) -> frozenset[int]:
    """Returns the layers that are prefetched once too often: a neighbour in another stage computes last."""
    if len(work.passes) == 1 or not layout.reshard:
        return frozenset()
    of_layer = {layer: work.passes[run.held[0].users[0]] for run in runs for layer in run.layers}
    layers, mistargeted = list(of_layer), set[int]()
    for here, layer in enumerate(layers):
        before = layers[max(0, here - layout.prefetch) : here]
        after = layers[here + 1 : here + 1 + layout.prefetch]
        ahead = [of_layer[other].last_forward for other in before] + [of_layer[other].last_backward for other in after]
        if max(ahead, default=0) > of_layer[layer].last_backward:
            mistargeted.add(layer)
    return frozenset(mistargeted)


def _buckets(table: Table, runs: Sequence[LayerRun], spread: Spread, work: RankPasses) -> list[Instance]:
    """Adds the traffic of DDP, ZeRO-1 and ZeRO-2 over flat buckets. Returns every trained parameter with the ranges
    that ranks update."""
    every = [pair for pair in instances_of(runs) if not pair[1].frozen]
    found: dict[int, Instance] = {}
    together: dict[tuple[tuple[int, ...], tuple[int, ...], tuple[str, int, int]], list[int]] = {}
    for number in reversed(range(len(every))):  # the backward pass reaches the last layers first
        parameter = every[number][1]
        together.setdefault((parameter.users, parameter.holders, spread.over(parameter)), []).append(number)
    for (users, _, over), numbers in together.items():
        axis, ranks, rank = over
        each_pass = spread.layout.accumulate == "sharded" and len(users) == 1 and ranks > 1
        reductions = work.passes[users[0]].ends if each_pass else 1
        least = derived.bucket_bytes(spread.layout) / spread.width
        sizes = tuple(every[number][1].size for number in numbers)
        for bucket in _filled(sizes, least):
            here = [numbers[n] for n in bucket]
            named = [(every[number][1].name, every[number][1].shape) for number in here]
            starts, share = granular_cut(spread.granularity, [sizes[n] for n in bucket], named, ranks)
            # Replicas sum their shares once, when all gradients are there.
            compressed = spread.layout.compression != "none"
            _send(table, spread, axis, share, ranks, gather=1, reduce=reductions, sum=not compressed)
            for number, start in zip(here, starts, strict=True):
                layer, parameter = every[number]
                ranges = ShardRanges(parameter.size, share, -start)
                found[number] = Instance(layer, parameter, axis, ranks, rank, ranges)
            if compressed:
                _compressed(table, spread, [(found[number].held, found[number].ranges.held(rank)) for number in here])
    return [found[number] for number in range(len(every))]


def _send(
    table: Table,
    spread: Spread,
    axis: str,
    share: int,
    ranks: int,
    formats: tuple[derived.Format, derived.Format] = ("none", "none"),
    columns: int = 0,
    **often: int,
) -> None:
    """Counts the messages of parameters of which each of `ranks` ranks has `share` elements, gathered and reduced in
    these `formats`, fp8 of rows of so many `columns`, each message as `often` as its purpose
    (phalanx.cost.communication) says, 0 if it is not named."""
    near, inside = spread.near(axis), "edp_hpz" if axis == "edp" else "hpz"
    where = {
        "shard": (axis, ranks),
        "near": (inside, near),
        "across": (f"{inside}_across", ranks // max(1, near)),
        "replicas": ("dp_replicate", spread.replicas),
    }
    for message in state_messages(
        ranks,
        gathered=derived.wire_bytes(share, formats[0], spread.width, columns),
        reduced=derived.wire_bytes(share, formats[1], spread.gradient_width),
        summed=share * spread.gradient_width,
        near=near,
        coded=spread.layout.quantise_gradients != "none",
    ):
        among, size = where[message.among]
        table.add(among, message.collective, message.size, size, often.get(message.purpose, 0))


@cache
def _filled(sizes: tuple[int, ...], least: float) -> tuple[tuple[int, ...], ...]:
    """Returns the buckets of parameters of these sizes, at least `least` elements in each but the last."""
    return tuple(map(tuple, in_buckets(sizes, least)))


def _partials(table: Table, updated: Counter[HeldParameter], layout: Layout, width: int) -> None:
    """Adds the sums of the gradients of parameters that several ranks hold, each of which has computed a part."""
    for parameter, elements in updated.items():
        if parameter.cut or parameter.summed:
            table.add("tp", "all_reduce", elements * width, parameter.copies)
        table.add("pp", "all_reduce", elements * width, len(parameter.holders))


ADAMW = Optimizer()
STATUS = 3 * 8
"""Bytes of loss, squared gradient norm, and whether to stop, in fp64."""
MTP_STATUS = 8
"""Bytes of the loss of modules for further tokens beside them."""
PAIR_STATUS = 4 * 8
"""Bytes of the sums over preference pairs, or completions, beside them."""
SEQUENCE_SUM = 8
"""Bytes of the log-probability of a sequence, which context-parallel ranks sum."""
TICKET = 8
"""Bytes of a gradient's place in the order of arrival, which asynchronous SGD tells all ranks of a replica."""


def step_traffic(
    model: ModelConfig,
    layout: Layout,
    batch: derived.Batch,
    *,
    precision: str = "fp32",
    gradients: str = "same",
    vocab: int | None = None,
    stages: Sequence[range] | None = None,
    rank: int = 0,
    rows: tuple[float, float] | None = None,
    optimizer: Optimizer = ADAMW,
    compared: Compared = "",
    conversations: int = 1,
    documents: DocumentSample | None = None,
    share: float = 1,
    fp8_scaling: Fp8Scaling = "rowwise",
) -> Traffic:
    """Returns the bytes that `rank` (of all of `layout.world`) sends in one optimizer step, by mesh axis and
    collective, named as in the ledger. By default it is rank 0, whose ledger `phalanx train` reports.

    Pipeline ranks differ; so do positions of a ring in layers with a window, and ranks of the shard axis, if tp or pp
    sums gradients of parameters that they shard unevenly. `precision`, `gradients` and `fp8_scaling` are `train`'s,
    `vocab` the tokenizer's vocabulary size if the model leaves it open. `stages` are the layers of each pipeline stage
    (phalanx.partition.cut.stages_of); None: those of `layout.pp_cut`. `rows` are those that this rank sent to other
    ranks' experts, and as an expert's rank back to theirs, in the forward passes of all layers and micro-batches, if
    known: each layer counts an equal share of them, which matters if layers recompute differently. An `optimizer` that
    updates whole matrices sends pieces of them. `compared`: what the loss compares. `conversations`: the most that
    are packed into a sequence, known once the data are read. Where attention stays within `documents`, what cp sends is
    the mean over their micro-batches: exact if they are a step's own.

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
    unit = FP8_UNITS[fp8_scaling]
    spread = Spread.of(layout, precision, gradients, rank, optimizer=optimizer, share=share, unit=unit)
    table = state_traffic(runs, spread, work, model)
    ring_rank, _ = cp_coordinates(layout, rank // layout.tp % layout.cp)
    place = place_of(
        model,
        layout,
        batch.micro_batch,
        width=derived.PARAMETER_BYTES[precision],
        slices=plan.slices,
        ring_rank=ring_rank,
        conversations=conversations,
        work=document_work(model, layout, batch.micro_batch, documents),
    )
    last, passed, routed = len(plan.cut) - 1, Table(), Counter[LayerKind]()
    for stage, passes in work.passes.items():
        here = around_traffic(place, first=stage == 0, last=stage == last)
        for kind, number in kinds_of(model, derived.written(layout), plan.cut[stage]):
            here.take(block_traffic(place, *kind), number)
            if not kind.block.routed:
                continue
            routed[kind] += number * passes.forward
            if rows is None:
                for each in row_traffic(place, *kind):
                    here.take(each, number * balanced_rows(place))
        if compared == "pairs" and stage == last:
            here.add("cp", "all_reduce", batch.micro_batch * SEQUENCE_SUM, layout.cp)
        passed.take(here, passes.forward / plan.slices)
    if rows is not None:
        for kind, blocks in routed.items():
            for each, moved in zip(row_traffic(place, *kind), rows, strict=True):
                passed.take(each, moved * (blocks / routed.total()))
    passed.note("pp", "send", work.sends * place.bytes_of(boundary(place)))
    table.take(passed, share / work.steps)
    more = PAIR_STATUS if compared else MTP_STATUS if model.mtp else 0
    _status(table, layout, STATUS + TICKET if layout.sync == "asp" else STATUS + more, share)
    return table.traffic()


def _status(table: Table, layout: Layout, size: int, share: float) -> None:
    """Adds the numbers that decide about a step, of `size` bytes. Independent replicas do not share theirs."""
    if layout.independent_replicas == 1:
        table.add("world", "all_reduce", size, layout.world)
        return
    summed = "dp_replicate", layout.summed_replicas
    for axis, ranks in (("tp", layout.tp), (derived.shard_axis(layout), layout.shard_ranks), summed, ("pp", layout.pp)):
        table.add(axis, "all_reduce", size, ranks, share)
