"""The bytes of one block on a rank: what it saves for its backward pass, operator by operator (a view of
phalanx.blocks), and what its backward pass needs besides.

The list implies Korthikanti et al. 2022, table 2, for the GPT-2 kind with dropout (s tokens, b sequences, hidden size
h, a heads, t tensor ranks, 2 bytes per element): sbh (34 + 5as/h) without tp; sbh (10 + 24/t + 5as/ht) with tp; all of
it over t with sp; without the terms in a s with selective recomputation; 2sbh with full. As there, a norm's mean and
deviation (two bytes each) and attention's log-sum-exp (four bytes per head) are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf
from typing import NamedTuple

from phalanx.blocks.feed_forward import hidden_bytes, routed_rows
from phalanx.blocks.kinds import ATTENTION, HALVES, BlockKind, block, half_block
from phalanx.blocks.operator import Half, Operator, Place, SavedTensor, place_of
from phalanx.blocks.residual import A, is_adapter, layer_projection, norm_backward, norm_saved, saved_input
from phalanx.config.precision import SCALED
from phalanx.cost.held import BlockParameters, LayerKind, block_parameters, expert_ranks
from phalanx.cost.spec import StepSpec
from phalanx.cost.state_formulas import formulas_of
from phalanx.partition.derived import Mode, gathers_parameters, slices_of, splits_backward
from phalanx.partition.tensor_slices import head_tiles, layers_of


class Moment(NamedTuple):
    """A moment of the backward pass of a block."""

    size: float
    """Bytes of activations and of their gradients, less those that the block keeps for its backward pass."""
    own: int
    """Parameters whose gradients the operator at work has computed."""
    arrived: int
    """Parameters whose gradients the block has computed."""
    experts: int = 0
    """Whether the block's experts are still to come (0), begin (1), are at work (2), or done (3)."""


class _Held(NamedTuple):
    """A saved tensor in bytes, and the numbers of operators, in the order of the backward pass: from the first one on
    all of it is there, until after the last one."""

    size: float
    kept: float
    """The part that is there all the time."""
    first: int
    last: int


_HIDDEN = "mlp", "experts", "shared"
"""Tensors between the matrices of an MLP: the last matrix reads one of them, its activation the others."""
_BY_CORE = "queries", "keys, values", "keys", "values", "latents", "index queries", "index keys"
"""Tensors that attention reads, and not the matrices that have written them."""


@lru_cache(maxsize=4096)
def backward_moments(
    place: Place, kind: LayerKind, *, splits: bool = False, tiles: int = 1, tiled: frozenset[str] = frozenset()
) -> tuple[Moment, ...]:
    """Returns the moments of the backward pass of a block, operator by operator, of a micro-batch or of the last of its
    slices. An operator has the gradient of its output, and one of its input for every matrix that reads it; then it
    gives up what it has saved, but with deferred weight gradients (`splits`) not what these need. The gradient of the
    residual stream is left out, but for what sequence parallelism gathers of it. Layers that are `tiled` send the
    gradient of each of their `tiles` when it is there."""
    model, scale, tokens = place.model, place.width / place.slices, place.tokens / place.slices
    operators = [(each, half) for half in HALVES[::-1] for each in _backward_order(place, kind.block, half)]
    held = _held(place, [each for each, _ in operators], kind.recompute)
    whole = place.hidden * scale if place.token_share > 1 else 0.0
    branch = place.hidden * scale / place.token_share if model.norms_outputs or model.dropout else 0.0
    live, found, last_half, mine = -sum(each.kept for each in held), list[Moment](), "", held
    waiting = arriving = 0.0  # gradients that wait for others of the same tensor, and those that come to an operator
    arrived, adapted, both, rows, experts, waits = 0, 0, 0.0, 0.0, 0, 0
    for number, (operator, half) in enumerate(operators):
        if half != last_half:
            waiting, last_half, arriving = arriving * model.parallel_block, half, whole + branch
            if place.folds and kind.block.routed and half == "feed_forward":  # each rank's own rows
                arriving = branch
            both = arriving if kind.block.routed and model.moe.n_shared and not place.folds else 0.0
        mine = [each for each in mine if each.last >= number]
        here = live + waiting + sum([each.size if each.first <= number else each.kept for each in mine])
        trained = [each for each in operator.weights if not each.frozen]
        in_tiles = tiles > 1 and any(each.tiled and layers_of(each.name) in tiled for each in trained)
        share = tiles if in_tiles else 1
        own = sum(each.size_on(place.tp, place.ep_shard) // share for each in trained)
        if operator.name.startswith("experts.") and not experts:
            before = live + waiting + sum([each.size if each.first < number else each.kept for each in mine])
            found.append(Moment(before + arriving, waits, arrived, 1))
        experts = 2 if operator.name.startswith("experts.") else 3 if experts else 0
        matrices = [each for each in operator.matrices if not is_adapter(each.name)]
        if matrices:
            shapes = [each.shape_on(place.tp, place.ep_shard) for each in matrices]
            row = operator.rows * scale
            if matrices[0].routed:
                row *= shapes[0][0] * (place.profile.imbalance if place.ep > 1 else 1)
            outputs, inputs, done = row * sum(shape[-2] for shape in shapes), row * shapes[0][-1], 0
            inputs *= not operator.detached
            if operator.name == "layer embedding":  # the gradient of its part is as large as of those of all layers
                here += tokens * (model.stream_width - model.d_model) * place.width / place.token_share
            if matrices[0].cut != "columns" or matrices[0].routed:
                arriving = outputs
            elif operator.name == "shared.down" and place.folds:  # rows' gradients are sent back meanwhile
                both = 2 * rows
                waiting, here = waiting + both - branch, here + both - branch
                arriving = whole + branch
            elif operator.name == "shared.down":
                waiting += both
                here += both - arriving * bool(both)
            if place.regathers and any(each.cut == "gathered" for each in operator.saved):
                here += whole
            # Beside an adapter's gradient and their sum.
            for times, (weight, shape) in enumerate(zip(matrices, shapes, strict=True), 1 + adapted * (1 + splits)):
                gradient = 0 if weight.frozen else weight.size_on(place.tp, place.ep_shard) // share
                done = gradient if in_tiles else done + gradient
                beside = max(arriving, inputs * adapted)  # the gradient of the output goes before the sum is made
                found.append(Moment(here + beside + times * inputs, waits + done, arrived + done, experts))
                arriving -= row * shape[-2] if len(shapes) > 1 else 0
            if splits and not (matrices[0].frozen or operator.detached):
                live += outputs + inputs
            arriving = inputs
        elif operator.name.endswith(".activation"):
            arriving *= 1 + model.gated
            found.append(Moment(here + arriving * (1 + 1 / (1 + model.gated)), waits, arrived, experts))
        elif core := operator.core:
            each = core.heads * core.head + core.kv_heads * (core.head + core.value_head)
            inputs = core.sequences * core.queries * each * scale
            found.append(Moment(here + max(operator.workspace, arriving + inputs), 0, arrived, experts))
            arriving = inputs
        elif operator.name in ("combine", "dispatch"):
            rows = routed_rows(place) * (model.moe.latent or model.d_model) * scale / place.routed_share
            if operator.name == "dispatch":
                waiting -= both * place.folds
            else:
                waiting += (arriving if model.moe.n_shared else 0.0) - both
            found.append(Moment(here + rows + arriving, 0, arrived, experts))
            arriving = rows
        elif operator.name == "experts.copies":  # their gradients, in place of the copies, and those that come back
            found.append(Moment(here + arriving + tokens * operator.saved[0].size, waits, arrived, experts))
            waits = 0
        elif operator.name.endswith("norm"):
            needed = tokens * norm_backward(place, model.d_model) / place.token_share
            needed -= sum(each.size for each in mine if each.first == each.last == number)
            found.append(Moment(here + max(arriving, needed), own, arrived + own, experts))
        waits += own * (place.redundant > 0 and experts == 2)  # an expert's gradients wait for those of its copies
        arrived, adapted = arrived + own * (not in_tiles), operator.name.endswith(A)
    return tuple(found)


def _experts_again(place: Place, kind: BlockKind) -> tuple[Moment, ...]:
    """Returns the fullest moment of the experts in a repeated forward pass, beside what the block saves but for what
    comes later: their outputs go back in both orders, beside those of shared experts and attention; or, without expert
    parallelism, both are joined, and tensor ranks sum them. On a device with streams also the moment before, in which
    FSDP2 has what it gathered of them."""
    moe, later, shares, sizes = place.model.moe, 0.0, _shares(place), list[tuple[float, int]]()
    if place.ep > 1:
        rows = routed_rows(place) * (moe.latent or place.model.d_model) / place.routed_share
        here = 2 * rows / len(place.halves) + place.hidden / place.token_share * (1 + (moe.n_shared > 0))
        sizes += [(here - rows / len(place.halves), 1)] * place.profile.keeps_gathered
    else:
        joined = 2 if moe.n_shared and moe.own_norms else 1
        here = place.hidden * joined * (1 + (place.token_share > 1 and place.profile.copies_sums))
        here += 2 * place.hidden * (moe.n_shared > 0)
    for operator in half_block(place, kind, "feed_forward")[::-1]:
        if operator.name.startswith(("combine", "shared", "experts")):
            break
        later += place.tokens * sum(each.size / shares[each.cut] for each in operator.saved)
    sizes.append((here, 2))
    return tuple(Moment((size * place.width - later) / place.slices, 0, 0, experts) for size, experts in sizes)


def _backward_order(place: Place, kind: BlockKind, half: Half) -> Sequence[Operator]:
    """Returns the operators of a half of a block in the order of its backward pass. Where tensor ranks hold whole
    experts, shared ones come before the rows' gradients go back."""
    found = half_block(place, kind, half)[::-1]
    if not place.folds:
        return found
    places = {"dispatch": 2, "router": 3, "mlp_norm": 4}
    return sorted(found, key=lambda each: 1 if each.name.startswith("shared.") else places.get(each.name, 0))


def _held(place: Place, operators: Sequence[Operator], mode: Mode) -> list[_Held]:
    """Returns what a block has saved. What recompute=products repeats comes back for the operator that needs it, what
    recompute=mlp repeats of an MLP with it; all else is there from the start."""
    shares, found, tokens = _shares(place), list[_Held](), place.tokens / place.slices
    core = next((number for number, each in enumerate(operators) if each.core), 0)
    # Where the outputs of norms come back; rows that other ranks have sent stay.
    ends = ".down", ".up", "qkv", "wkv_a", "index_k"
    reads = [
        number
        for number, each in enumerate(operators)
        if each.name.endswith(ends[mode != "mlp" :]) and not (place.ep > 1 and each.name.startswith("experts."))
    ]
    for number, operator in enumerate(operators):
        for tensor in operator.saved:
            size = tokens * tensor.size / shares[tensor.cut]
            kept = size - tokens * tensor.released(mode) / shares[tensor.cut]
            first = last = core if tensor.operator in _BY_CORE and core < number else number
            if mode not in ("products", "mlp"):
                kept, first = size, 0
            elif kept < size and first == number and tensor.operator not in _HIDDEN:
                first = min(next((each for each in reads if (each > core) == (number > core)), number), number)
            if tensor.operator in _HIDDEN:
                down = f"{tensor.operator}.down" if tensor.operator == "mlp" else f"moe.{tensor.operator}.down"
                part = size * saved_input(place, "feed_forward", down) / hidden_bytes(place, tensor.operator)
                # Only an adapter's matrix, whose backward pass comes before that of a frozen one, needs its input.
                before = number - (number > 0 and operators[number - 1].name.endswith(A))
                found.append(_Held(part, min(part, kept) if kept == size else 0.0, min(first, before), before))
                size, kept, last = size - part, kept - part if kept == size else kept, number + 1
            found.append(_Held(size, kept, first, last))
    return found


@lru_cache(maxsize=4096)
def saved(place: Place, kind: LayerKind) -> tuple[tuple[str, float], ...]:
    """Returns the operators of a block and the bytes per token that each saves on a rank.

    Without `sp_regather` the inputs of the matrices are saved whole; without dropout there are no masks, and
    torch's fused attention saves no scores. Of RMS norms see `profile.rms_copies`. Tokens are balanced over experts,
    times `profile.imbalance`.
    """
    profile, shares, operators = place.profile, _shares(place), block(place, kind.block)
    # With the embeddings that it joins; the head of the depth before counts hidden states of all tokens.
    inputs = 1 + (kind.block.predicts and place.token_share > 1)
    size = 0.0 if profile.inputs_leave else inputs * place.model.d_model * place.width / place.token_share
    alone = (("block input", size),)
    if kind.recompute == "full":
        several = place.slices > 1
        every = (tensor for operator in operators for tensor in operator.saved)
        every = (tensor for tensor in every if tensor.beyond or (several and tensor.across))
        return alone + tuple((each.operator, each.size / shares[each.cut]) for each in every)
    selective = profile.selective if kind.recompute == "selective" else ""
    tensors = (
        tensor for operator in operators for tensor in (operator.results if selective == "products" else operator.saved)
    )
    repeated = _repeated(place, kind.block) if profile.repeats else {}
    found = (
        (each.operator, (each.size - (each.released(kind.recompute) or repeated.get(each, 0))) / shares[each.cut])
        for each in tensors
        if not (selective == "core" and each.inside)
    )
    return tuple((name, size / 2) for name, size in (*alone, *found)) if selective == "layers" else tuple(found)


_MODULE_ENDS = "mlp_norm", "router", "up", "mlp dropout"
"""Tensors of the second half of a block outside of a recomputed MLP or mixture of experts, its input among them."""


def _repeated(place: Place, kind: BlockKind) -> dict[SavedTensor, float]:
    """Returns the bytes of saved tensors that recomputed modules (`profile.repeats`) give up after the forward pass:
    what they write, or what `moe` and `mlp` save (Megatron Core's transformer_config.py: recompute_modules). A norm
    before the attention of heads is part of its first matrix there, and stays."""
    found = {}
    for half in HALVES:
        for operator in half_block(place, kind, half):
            for tensor in operator.saved:
                whole = {
                    "core_attn": tensor.inside,
                    "mla_up_proj": operator.name == "wkv_b" and tensor.operator != "wkv_b",
                    "layernorm": tensor.operator == "router" or "wkv_a" in tensor.operator,
                    "moe": half == "feed_forward" and kind.routed and tensor.operator not in _MODULE_ENDS,
                    "mlp": half == "feed_forward" and not kind.routed and tensor.operator not in _MODULE_ENDS,
                }
                if any(whole.get(module) for module in place.profile.repeats):
                    found[tensor] = tensor.size
                elif "moe_act" in place.profile.repeats and operator.name == "experts.down":
                    found[tensor] = tensor.cheap
    return found


@lru_cache(maxsize=4096)
def deferred(place: Place, kind: BlockKind, *, chunked: bool = False) -> float:
    """Returns the bytes per token that a block keeps on a rank after the gradients of its inputs, until those of its
    weights are computed: the input of every trained matrix and the gradient of its output. All else is released then,
    scores and what norms and activations have saved among it. Inputs that tensor ranks gather are whole here.
    `chunked`: the loss computes the head's gradient."""
    computed = (each for each in block(place, kind) if not each.detached and not (chunked and "head" in each.name))
    products = (each.product(place.tp, place.ep_shard) for each in computed)
    numbers = sum(each.m * each.number * (each.n + each.k) for each in products if each and not each.frozen)
    return numbers * place.width / place.tokens


def _shares(place: Place) -> dict[str, int]:
    """Returns the number of tensor ranks that share a saved tensor, by the way in which they do."""
    gathered = place.token_share if place.regathers else 1
    return {"whole": 1, "tokens": place.token_share, "width": place.tp, "gathered": gathered}


TRANSIT = 2
"""Messages between two neighbouring stages that a rank has in transit at a time: one that arrives, one that leaves."""


class StepSizes:
    """Sizes of a micro-batch on one rank."""

    def __init__(self, spec: StepSpec):
        self.spec, self.memory_profile = spec, spec.framework.memory_profile
        if spec.products == SCALED:
            self.memory_profile = self.memory_profile.fp16 or self.memory_profile
        if spec.framework.attention == "unfused" and self.memory_profile.scores != "always":
            self.memory_profile = replace(self.memory_profile, scores="always")
        layout = spec.layout
        self.formulas = formulas_of(spec, self.memory_profile)
        copies = self.memory_profile.copies_sums and self.formulas.gradient == spec.width
        alone = layout.shard_ranks == 1
        self.waits = not copies or alone or layout.accumulate == "sharded" or layout.dp_replicate > 1
        """Whether no copy of the gradients that ZeRO-3 sends is left: NCCL makes none, gloo's goes at once where a cast
        or another sum waits for it."""
        self.tokens = spec.batch.micro_batch * spec.model.seq_len / layout.cp
        self.slices = slices_of(layout)
        self.splits = splits_backward(layout)
        self.pass_tokens = self.tokens / self.slices
        """Tokens of a micro-batch that pass a stage at a time."""
        self.share = layout.tp if layout.sp else 1
        self.stream = self.pass_tokens * spec.model.d_model * spec.width
        place = place_of(spec.model, layout, width=spec.width, profile=self.memory_profile)
        inputs = norm_saved(place, spec.model.d_model) + spec.model.d_model * spec.width
        self.head_reads = self.pass_tokens * inputs / self.share
        """Bytes that the final norm and the head save."""
        self.final_norm = self.pass_tokens * norm_backward(place, spec.model.d_model) / self.share
        """Bytes in the backward pass of the final norm, with its input."""
        beside = self.stream * (spec.model.stream_width / spec.model.d_model - 1) / self.share
        self.beside = beside * self.slices
        """Bytes of the projections of the embedding for all layers, of a micro-batch."""
        self.beside_saved = self.tokens * layer_projection(place).saved[0].size / self.share if beside else 0.0
        """Bytes that these save on the first stage."""
        self.beside_gradient = beside
        """Bytes of their gradient, from the backward pass of a stage's last block on, also where they are frozen."""
        self.under_way = TRANSIT * self.stream * spec.model.stream_width / spec.model.d_model / self.share
        """Bytes of messages between a stage and a neighbour on another rank."""
        # In place of an input that is gathered again, a parallel block has the gradient of the feed-forward layer's
        # input, of all tokens, while it computes that of attention's.
        again = layout.sp_regather or self.memory_profile.regathers or spec.model.parallel_block
        self.gathered = (2 if again else 1) * self.stream if layout.sp and layout.tp > 1 else 0
        """Bytes of inputs of matrices that a backward pass gathers."""


class KeptBytes:
    """Bytes that one block of a kind keeps on a rank for its backward pass."""

    def __init__(self, step: StepSizes, kind: LayerKind):
        model, layout = step.spec.model, step.spec.layout
        # Sequences take equal parts of all, but for capacities of runs of them, and for copies of experts.
        whole_batch = (layout.folds and model.moe.capacity) or layout.redundant_experts
        sequences = step.spec.batch.micro_batch if whole_batch else 1
        self.step, self.kind = step, kind
        self.place = place_of(
            *(model, layout, sequences),
            width=step.spec.width,
            narrow=step.spec.products in ("fp8", "fp4"),
            profile=step.memory_profile,
            slices=step.slices,
        )
        self.kept = step.tokens * sum([size for _, size in saved(self.place, kind)])


class BlockBytes(KeptBytes):
    """Bytes of one block of a kind on a rank."""

    def __init__(self, step: StepSizes, kind: LayerKind):
        super().__init__(step, kind)
        model, layout, width, place = step.spec.model, step.spec.layout, step.spec.width, self.place
        self.parameters: BlockParameters = block_parameters(model, layout, kind.block)
        self.trained = self.parameters.trained_dense + self.parameters.trained_experts
        whole_place = place._replace(profile=replace(place.profile, repeats=())) if place.profile.repeats else place
        if kind.recompute == "full":  # what it gathers once more, it has until the backward pass has been
            whole_place = whole_place._replace(sp_regather=False)
        whole = step.tokens * sum([size for _, size in saved(whole_place, kind._replace(recompute="none"))])
        borrows = "shared_keys" in ATTENTION[kind.block.attention].needs
        cores = (each.core for each in block(place, kind.block) if each.core and borrows)
        numbers = sum(each.sequences * each.queries * each.kv_heads * (each.head + each.value_head) for each in cores)
        self.borrowed = step.tokens / place.tokens * numbers * width
        """Bytes of keys and values of an earlier layer, of which it adds up a gradient."""
        chunked = bool(layout.logits_of(int(step.pass_tokens))) or head_tiles(model, layout) > 1
        self.deferred = step.tokens * deferred(place_of(model, layout, width=width), kind.block, chunked=chunked)
        """Bytes that wait for the weights' gradients where these are put off."""
        self.forward = whole / step.slices
        """Bytes of all that it computes for its backward pass, of the tokens that pass it at a time; with full
        recomputation of the half that has more, and of its input: the other half's is gone or yet to come."""
        if kind.recompute == "full":
            shares, inputs = _shares(whole_place), step.stream / step.share
            halves = (half_block(whole_place, kind.block, half) for half in HALVES)
            sizes = ((each for operator in half for each in operator.saved) for half in halves)
            numbers = max(sum(each.size / shares[each.cut] for each in half) for half in sizes)
            self.forward = step.pass_tokens * numbers + inputs
        again = 0.0 if kind.recompute in ("products", "mlp") else max(0.0, whole - self.kept) / step.slices
        adds = step.spec.batch.accumulation > 1 and layout.accumulate == "local"
        batch = whole_place._replace(sequences=step.spec.batch.micro_batch, documents=step.spec.documents is not None)
        # Where nothing in particular is repeated, all is there from the start.
        alike = kind if kind.recompute in ("products", "mlp") else kind._replace(recompute="none")
        tiles = layout.tiles if gathers_parameters(layout) and layout.reshard else 1
        moments = backward_moments(batch, alike, tiles=tiles, tiled=layout.tiled_layers)
        if kind.recompute == "full" and kind.block.routed and (layout.ep > 1 or layout.tp > 1):
            moments = (*(each for each in moments if each.experts != 1), *_experts_again(batch, kind.block))
        before = [(each.arrived - each.own, again + each.size + each.own * width) for each in moments]
        self.moments: dict[int, float] = {}
        """By how many parameters have their gradients in buckets at a moment of its backward pass, the most bytes
        inside the block then: before a gradient enters its bucket, and once it is there."""
        for arrived, size in before + [(each.arrived, again + each.size) for each in moments if each.own]:
            self.moments[arrived] = max(size, self.moments.get(arrived, size))
        self.first = again + max(each.size + each.arrived * width for each in moments)
        """Bytes inside the block whose gradients are the first."""
        self.adding = again + max(each.size + each.own * width for each in moments)
        """Bytes inside the block where gradients are added to those of earlier micro-batches one by one."""
        inside = again + max(each.size for each in moments)
        self.opening = self.inside = dict.fromkeys((False, True), (inside, -inf))
        """Bytes inside the block before and after its experts are sent on their own, if they are: if it is the first in
        the backward pass, and if it is not; and whether gradients are added to those of earlier micro-batches."""
        self.late = 0.0
        """Bytes of the first block's experts, less, before its backward pass."""
        if gathers_parameters(layout):
            self.opening, self.inside = {}, {}
            for more in (False, True):
                opening, others = self._experts_apart(more)
                self.late = opening[0]
                sizes = [
                    (each.experts, again + each.size + (each.own if more else each.arrived) * width) for each in moments
                ]
                self.opening[more], self.inside[more] = (
                    (
                        max(size + apart[experts] for experts, size in sizes if experts < 3 or layout.ep == 1),
                        max(
                            (size + apart[3] for experts, size in sizes if experts == 3 and layout.ep > 1), default=-inf
                        ),
                    )
                    for apart in (opening, others)
                )
        self.half = 0.0
        """Bytes inside the block in the first half of its backward pass, if it is split."""
        if step.splits:
            (*_, done), (*others, _) = self._experts_apart(True)
            sizes = backward_moments(batch, alike, splits=True, tiles=tiles, tiled=layout.tiled_layers)
            self.half = again + max(each.size + (*others, done)[each.experts] for each in sizes)
        self.backward = max(self.inside[adds]), step.stream / step.share
        """Bytes of the backward pass besides what is kept: inside the block, and of its residual stream."""

    def _experts_apart(self, adds: bool) -> tuple[tuple[float, float, float, float], ...]:
        """Returns the bytes by which ZeRO-3's experts, which are gathered and sent on their own, differ from what is
        counted with the rest of their block: before they are at work, when they begin, meanwhile, and afterwards, where
        the block is the first in the backward pass and where it is not. `adds`: gradients are not sent."""
        step, layout, same = self.step, self.step.spec.layout, (0.0, 0.0, 0.0, 0.0)
        if layout.ep == 1 or step.memory_profile.gathers_matrices or not gathers_parameters(layout):
            return same, same
        ranks, full = expert_ranks(layout.shard_ranks, layout.ep_shard), self.kind.recompute == "full"
        whole, trained = (n * step.spec.width for n in (self.parameters.experts, self.parameters.trained_experts))
        gone = whole * (ranks > 1)
        if step.formulas.keeps_whole(layout.pp, reshard=layout.reshard):
            whole, gone = 0.0, gone * (layout.pp == 1)
        # Experts of one rank are copied when they compute, and not counted; others are counted with their block. What
        # is recomputed leaves them whole.
        late, early = (0.0, whole) if ranks == 1 else (-whole, 0.0)
        first = early if full else late
        # Their shard, what they are sent in, and a collective's copy, which stays until the next block's are sent.
        copy = trained * (ranks > 1 and not step.waits)
        wider = max(0, step.formulas.gradient - step.spec.width)
        each = step.formulas.gradient / ranks + wider
        there = 0.0 if adds else self.parameters.trained_experts * each + copy
        others = early if ranks > 1 and layout.prefetch else first
        return (first, whole, early, there - gone), (others, whole, early, there - copy - gone)

    def kept_of(self, slices: int) -> float:
        """Returns the bytes that the block keeps of the first slices of a micro-batch, as many as of sequences of these
        alone, since later slices see more keys; and once the backward pass of a later slice has been, of the gradients
        of their keys and values. What is fully recomputed counts as the average slice."""
        step, kind = self.step, self.kind
        share, tokens = slices / step.slices, slices * step.pass_tokens
        if not slices or slices == step.slices or kind.recompute == "full":
            return share * self.kept
        model = replace(step.spec.model, seq_len=int(step.spec.model.seq_len * share))
        return tokens * sum(size for _, size in saved(self.place._replace(model=model, slices=slices), kind))

    def seen_gradients(self, slices: int) -> float:
        """Returns the bytes of the gradients of the keys and values of the first slices, which later ones have seen."""
        # Full recomputation keeps these beside the block's input.
        _, *seen = saved(self.place, self.kind._replace(recompute="full"))
        return slices * self.step.pass_tokens * sum(size for _, size in seen)


class BlockRun(NamedTuple):
    """Consecutive blocks of one kind in a stage."""

    block: BlockBytes
    many: int
    recompute: Mode
    leaves: bool
    """Whether their activations wait on the host."""

    @property
    def moved(self) -> float:
        """Bytes of one of the blocks that wait on the host: also its own copy of keys and values that it borrows."""
        return (self.block.kept + self.block.borrowed) * self.leaves
