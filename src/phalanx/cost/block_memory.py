"""The bytes of one block on a rank: what it saves for its backward pass, operator by operator (a view of
phalanx.blocks), and what its backward pass needs besides.

The list implies Korthikanti et al. 2022, table 2, for the GPT-2 kind with dropout (s tokens, b sequences, hidden size
h, a heads, t tensor ranks, 2 bytes per element): sbh (34 + 5as/h) without tp; sbh (10 + 24/t + 5as/ht) with tp; all of
it over t with sp; without the terms in a s with selective recomputation; 2sbh with full. As there, a norm's mean and
deviation (two bytes each) and attention's log-sum-exp (four bytes per head) are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from operator import sub
from typing import NamedTuple

from phalanx.blocks.kinds import FEED_FORWARD, HALVES, BlockKind, block, half_block
from phalanx.blocks.operator import Operator, Place, SavedTensor, place_of
from phalanx.blocks.residual import norm_backward, norm_saved, saved_input
from phalanx.config.precision import SCALED
from phalanx.cost.held import BlockParameters, LayerKind, block_parameters
from phalanx.cost.spec import StepSpec
from phalanx.partition.derived import Mode, gathers_parameters, slices_of, splits_backward


@lru_cache(maxsize=4096)
def workspace(place: Place, kind: BlockKind, *, splits: bool = False, gathers: bool = False) -> float:
    """Returns the bytes that the backward pass of attention needs for a moment, of a micro-batch or of the last of its
    slices, less those that the second half of the block has saved and released by then, all or with deferred weight
    gradients (`splits`) all but what these need; 0 where fused kernels need none. With ZeRO-3 (`gathers`) the gradients
    of the second half wait for those of the first, unless they are added to those of earlier micro-batches."""
    needed = sum(operator.workspace for operator in half_block(place, kind, "attention"))
    if not needed and not gathers:
        return 0.0
    second = half_block(place, kind, "feed_forward")
    released = sum(tensor.size / _shares(place)[tensor.cut] for operator in second for tensor in operator.saved)
    released -= _deferred(place, second) if splits else 0.0
    weights = (weight for operator in second for weight in operator.weights if gathers and not weight.frozen)
    needed += sum(weight.size_on(place.tp, place.ep_shard) for weight in weights) * place.width
    return max(0.0, needed - place.tokens / place.slices * released)


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
def deferred(place: Place, kind: BlockKind) -> float:
    """Returns the bytes per token that a block keeps on a rank after the gradients of its inputs, until those of its
    weights are computed: the input of every trained matrix and the gradient of its output. All else is released then,
    scores and what norms and activations have saved among it. Inputs that tensor ranks gather are whole here."""
    return _deferred(place, block(place, kind))


def _deferred(place: Place, operators: Iterable[Operator]) -> float:
    products = (operator.product(place.tp, place.ep_shard) for operator in operators)
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
        self.under_way = TRANSIT * self.stream * spec.model.stream_width / spec.model.d_model / self.share
        """Bytes of messages between a stage and a neighbour on another rank."""
        # In place of an input that is gathered again, a parallel block has the gradient of the feed-forward layer's
        # input, of all tokens, while it computes that of attention's.
        again = layout.sp_regather or self.memory_profile.regathers or spec.model.parallel_block
        self.gathered = (2 if again else 1) * self.stream if layout.sp and layout.tp > 1 else 0
        """Bytes of inputs of matrices that a backward pass gathers."""


class BlockBytes:
    """Bytes of one block of a kind on a rank."""

    def __init__(self, step: StepSizes, kind: LayerKind):
        model, memory_profile, width = step.spec.model, step.memory_profile, step.spec.width
        layout = step.spec.layout
        place = place_of(
            *(model, layout),
            width=width,
            narrow=step.spec.products in ("fp8", "fp4"),
            profile=memory_profile,
            slices=step.slices,
        )
        self.parameters: BlockParameters = block_parameters(model, layout, kind.block)
        whole_place = place._replace(profile=replace(memory_profile, repeats=())) if memory_profile.repeats else place
        parts, every = (
            [size for _, size in saved(*one)] for one in ((place, kind), (whole_place, kind._replace(recompute="none")))
        )
        self.kept, whole = step.tokens * sum(parts), step.tokens * sum(every)
        if kind.recompute == "products":  # each comes back when it is needed, and goes before the next
            whole = self.kept + step.tokens * max(map(sub, every, parts), default=0.0)
        elif kind.recompute == "mlp":  # what stands around the activation comes back with it
            half = half_block(place, kind.block, "feed_forward")
            mlp = {tensor.operator for operator in half if operator.name != "mlp_norm" for tensor in operator.saved}
            again = [*map(sub, every, parts)]
            together = sum(size for (name, _), size in zip(saved(place, kind), again, strict=True) if name in mlp)
            whole = self.kept + step.tokens * max(together, *again)
        self.step, self.kind, self.place = step, kind, place
        self.again = max(0.0, whole - self.kept) / step.slices
        self.deferred = step.tokens * deferred(place_of(model, layout, width=width), kind.block)
        """Bytes that wait for the weights' gradients where these are put off."""
        # Gradients as wide as the MLP, of what its activation reads: that of what it wrote takes the place of what it
        # wrote, which the last matrix does not need any longer, if it has saved it. Of experts also those of rows.
        last = "moe.experts.down" if kind.block.routed else "mlp.down"
        reads = saved_input(place, "feed_forward", last) > 0
        # With deferred weight gradients it needs it still.
        tensors = (2 if model.gated else 1) + (0 if reads and not step.splits else 1)
        hidden = FEED_FORWARD[kind.block.feed_forward].width(model) / layout.tp
        rows = model.moe.top_k * (memory_profile.imbalance if layout.ep > 1 else 1) if kind.block.routed else 1
        within = wide = rows * hidden * tensors
        if kind.block.routed:
            spread = step.share if memory_profile.routes_shards or layout.folds else 1
            wide += rows * (model.moe.latent or model.d_model) / spread
        # What is computed again ends with an output that nothing needs.
        outputs = 2 if kind.recompute == "full" else 1
        batch = place._replace(sequences=step.spec.batch.micro_batch, documents=step.spec.document_mask)
        adds = step.spec.batch.accumulation > 1 and layout.accumulate == "local"
        gathers = gathers_parameters(layout) and not adds
        attention = workspace(batch, kind.block, splits=step.splits, gathers=gathers)
        self.backward = self.again + max(step.pass_tokens * wide * width, attention), outputs * step.stream / step.share
        """Bytes of the backward pass besides what is kept: inside the block, and of its residual stream."""
        whole = (weight for each in half_block(place, kind.block, "feed_forward") for weight in each.weights)
        matrix = sum(
            weight.size_on(place.tp, place.ep_shard)
            for weight in whole
            if weight.name == f"{last}.weight" and not weight.frozen
        )
        # The gradients of rows of experts have gone when those of the hidden units are there; the input of the first
        # matrices is not gathered again yet.
        later = max(0, step.gathered - step.stream)
        self.first = max(self.backward[0], self.again + (step.pass_tokens * within + matrix) * width - later)
        """Bytes inside the block whose gradients are the first, with that of the MLP's last matrix."""
        rows = model.moe.top_k if kind.block.routed else 1
        self.adding = max(self.backward[0], self.again + (step.pass_tokens * rows * hidden + matrix) * width)
        """Bytes inside the block where gradients are added to those of earlier micro-batches: that of the MLP's last
        matrix is there beside that of what it reads, until it is added."""

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
