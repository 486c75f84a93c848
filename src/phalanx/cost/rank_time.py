"""The seconds of one micro-batch on each pipeline rank: its blocks, the ends of the model, and communication inside."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import ceil
from operator import add, attrgetter, sub

from phalanx.blocks.kinds import HALVES, BlockKind, Half, half_block
from phalanx.blocks.operator import MemoryBound, Message, Operator
from phalanx.blocks.parameters import weight_of
from phalanx.blocks.residual import embedding, head, layer_projection
from phalanx.config.cluster import Accelerator
from phalanx.cost.communication import NO_MESSAGES, MessageSeconds, collectives, messages_seconds, place
from phalanx.cost.exposed import added, block_state, pass_seconds
from phalanx.cost.held import Content, ParameterCounts, block_parameters, parameter_counts, table
from phalanx.cost.kernels import HOST_BACKWARD, Seconds, operator_seconds
from phalanx.cost.spec import Framework, Graphs, StepSpec
from phalanx.cost.step_state import exposed_swaps, fetch_seconds, interference, state_seconds, summing_seconds
from phalanx.partition.derived import Mode, gathers_parameters, splits_backward, uniform_recompute
from phalanx.partition.tensor_slices import head_tiles, is_tiled

GRAPHED: dict[Graphs, float] = {
    "none": 0.0,
    "router": 0.15,
    "attention": 0.35,
    "attention and router": 0.5,
    "layers": 1.0,
    "iteration": 1.0,
}
"""Share of the host's time for a block with experts that CUDA graphs save: that of the modules they hold."""
PLAIN_DISPATCH, TWO_STREAMS = 1.1, 1.2
"""The host's time for a block with experts over that with DeepEP or HybridEP and without overlap: if it reads from the
device how many rows each rank gets, and sorts them in kernels of their own (NCCL's all-to-all); and if it switches
between two micro-batches on two streams."""
REPEATED: dict[str, tuple[str, ...]] = {
    "mla_up_proj": ("wq_b", "wkv_b", "q_norm", "kv_norm"),
    "layernorm": ("attn_norm", "mlp_norm"),
    "core_attn": ("attention",),
    "moe_act": ("experts.activation",),
    "moe": ("router", "dispatch", "experts.up", "experts.activation", "experts.down", "combine"),
    "mlp": (),
}
"""Modules of Megatron Core's selective recomputation (recompute_modules), and their operators of a block with experts;
mlp are the dense blocks' own."""


def launch_seconds(spec: StepSpec) -> tuple[float, float] | None:
    """Returns the seconds in which the host launches both passes of a block with experts; None: as its kernels. With a
    capacity there are no sizes to read."""
    framework, reads = spec.framework, not (spec.framework.ep_once or spec.model.moe.capacity)
    if not framework.moe_host_ms:
        return None
    host = framework.moe_host_ms * 1e-3 * (1 - GRAPHED[framework.graphs])
    host *= (PLAIN_DISPATCH if reads else 1) * (TWO_STREAMS if framework.ep_overlaps else 1)
    forward = host / (1 + HOST_BACKWARD)
    return forward, host - forward


def repeated_seconds(spec: StepSpec, kind: BlockKind) -> tuple[float, float]:
    """Returns the seconds of computation and of messages that recomputed modules repeat in a block's backward pass."""
    framework, layout, here = spec.framework, spec.layout, place(spec)
    names = {name for module in framework.memory_profile.repeats for name in REPEATED[module]}
    again = [operator for half in HALVES for operator in half_block(here, kind, half) if operator.name in names]
    if not again:
        return 0.0, 0.0
    slowdown = framework.block_slowdown(kind)
    device, tp, ep = spec.cluster.accelerator, layout.tp, layout.ep_shard
    seconds = operator_seconds(device, again, framework, spec.products, tp, ep, slowdown=slowdown)
    return seconds.forward, messages_seconds(spec, here, again)[0].get("ep", NO_MESSAGES).forward


def exposed_share(spec: StepSpec, traffic: float, computation: float) -> float:
    """Returns the share of `traffic` seconds to and from experts that `computation` seconds of another micro-batch do
    not hide. The first micro-batch has none before it, the last none after it, and the dispatcher's cores are busy."""
    framework = spec.framework
    if not framework.ep_overlaps or not traffic:
        return 1.0
    beside = added(traffic, computation, framework.ep_cores / spec.cluster.accelerator.cores)
    alone = 1 / spec.batch.accumulation
    return alone + (1 - alone) * beside / traffic


HOST_OPS = {"tp": 35, "sp": 110, "ring": 80, "ulysses": 45, "ep": 35, "shard": 90}
"""Operations of the host around a block's collectives in a forward pass, by their cause (ring: per message, with the
attention of its blocks and their merging; shard: FSDP's hooks). They are exposed only on a CPU: the processor time of
two processes over that of data parallelism alone, in times of launching an operation."""

SOCKET_DEVICES = 4
"""Devices of one processor of a node; the hosts of more tensor ranks launch kernels more slowly (across_sockets)."""


@dataclass(frozen=True)
class RankTime:
    """Seconds of one micro-batch on a rank, both passes."""

    products: float = 0.0
    streams: float = 0.0
    recompute: float = 0.0
    host_forward: float = 0.0
    """Seconds in which the host launches the forward pass."""
    host_backward: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    shard: float = 0.0
    """Seconds of gathering parameters and reducing gradients in every micro-batch (ZeRO-3)."""
    copies: float = 0.0
    """Exposed copies of activations between device and host."""
    waits_forward: float = 0.0
    """Seconds for which the device waits for its host in the forward pass."""
    waits_backward: float = 0.0
    forward: float = 0.0
    """The part of the device's seconds in the forward pass."""
    weights: float = 0.0
    """The part of the device's seconds in gradients of weights."""
    forward_communication: float = 0.0
    """The part of the exposed communication and copies in the forward pass."""

    @property
    def device(self) -> float:
        """Seconds of the device, without waiting for its host."""
        return self.products + self.streams + self.recompute + self.communication + self.copies

    @property
    def host(self) -> float:
        """Seconds for which the device waits for its host to launch kernels."""
        return self.waits_forward + self.waits_backward

    @property
    def total(self) -> float:
        return self.device + self.host

    @property
    def forward_seconds(self) -> float:
        """Seconds of the forward pass, with the device's waiting for its host."""
        return self.forward + self.waits_forward

    @property
    def backward_seconds(self) -> float:
        return self.total - self.forward_seconds

    @property
    def communication(self) -> float:
        """Seconds of exposed communication."""
        return self.tp + self.cp + self.ep + self.shard

    def settled(self, *, ahead: bool = True) -> RankTime:
        """Returns the same part with the seconds for which the device waits for its host, which has launched nothing
        `ahead` where the device made it wait before."""
        forward, backward = self.forward, self.device - self.forward
        there = _waits(forward, self.host_forward) if ahead else self.host_forward
        back = _waits(backward, self.host_backward) if ahead else self.host_backward
        return replace(self, waits_forward=there, waits_backward=back)

    @property
    def passes(self) -> tuple[float, float, float, float, float]:
        """Seconds by which a step is bounded from below (exposed.compose): forward and backward on the device, forward
        and backward of the host, and those of weight gradients."""
        return self.forward, self.device - self.forward, self.host_forward, self.host_backward, self.weights

    @property
    def waited(self) -> tuple[float, float, float, float, float]:
        """The `passes` of a step as it is: each part of a pass has waited for its host, which needs no more."""
        return self.forward_seconds, self.backward_seconds, 0.0, 0.0, self.weights

    def scaled(self, factor: float) -> RankTime:
        return RankTime(*(factor * part for part in _PARTS(self)))

    def __add__(self, other: RankTime) -> RankTime:
        return RankTime(*map(add, _PARTS(self), _PARTS(other)))


_PARTS = attrgetter(*(field.name for field in fields(RankTime)))


def _waits(device: float, host: float) -> float:
    """Returns the seconds that a pass of `device` seconds waits for a host that needs `host` seconds to launch it."""
    return pass_seconds(device, host) - device if host else 0.0


def held_by(spec: StepSpec, content: Content) -> ParameterCounts:
    """Returns the parameters of a rank before data ranks shard them."""
    return parameter_counts(spec.model, spec.layout, content.of_kind.items(), content.embedding, content.head)


def block_held(spec: StepSpec, kind: BlockKind) -> ParameterCounts:
    """Returns the parameters of one block."""
    return parameter_counts(spec.model, spec.layout, [(kind, 1)], False, False)


@lru_cache(50_000)
def block_time(spec: StepSpec, kind: BlockKind) -> RankTime:
    """Returns the time of one block with its communication, recomputed as `layout.recompute` says."""
    mode, half = spec.layout.mode, place(spec).halves[0]
    parts = spec.batch.micro_batch / half if kind.routed else 1
    if parts > 1:
        spec = replace(spec, batch=replace(spec.batch, micro_batch=half))
    halves = [half_times(spec, kind, half, (mode,))[0] for half in HALVES]
    block = halves[0] + halves[1]
    if parts > 1:
        block = _beside_other(spec, kind, *halves).scaled(parts)
    if kind.routed:
        block = _with_experts(spec, kind, block)
    return _sharded(spec, kind, block).settled()


def _with_experts(spec: StepSpec, kind: BlockKind, block: RankTime) -> RankTime:
    """Returns the time of a block with experts as its recipe runs it: with what its host needs, with modules that are
    computed again, and its tokens' traffic beside another micro-batch's computation."""
    if host := launch_seconds(spec):
        block = replace(block, host_forward=host[0], host_backward=host[1])
    again, messages = repeated_seconds(spec, kind)
    block = replace(block, recompute=block.recompute + again, ep=block.ep + messages)
    exposed = exposed_share(spec, block.ep, block.products + block.streams + block.recompute)
    hidden = (1 - exposed) * (block.ep - messages) / 2
    return replace(
        block,
        ep=exposed * block.ep,
        forward=block.forward - hidden,
        forward_communication=block.forward_communication - hidden,
    )


def _beside_other(spec: StepSpec, kind: BlockKind, attention: RankTime, experts: RankTime) -> RankTime:
    """Returns the time of a block for half a micro-batch, on average over both halves: while the first one's tokens
    travel to their experts the second attends; while the second's do, and the first one's come back, experts compute;
    and shared experts while the second's come back."""
    layout, framework, device = spec.layout, spec.framework, spec.cluster.accelerator
    here, block = place(spec), attention + experts
    work = half_block(here, kind, "feed_forward")
    slowdown = framework.block_slowdown(kind)
    routed, shared = (
        operator_seconds(
            *(device, [each for each in work if each.name.startswith(part)], framework, spec.products),
            *(layout.tp, layout.ep_shard),
            slowdown=slowdown,
        )
        for part in ("experts.", "shared.")
    )
    # A CPU moves bytes and computes with the same cores; dispatchers' kernels take cores of an accelerator.
    slowed = framework.interference - 1 if device.host_us else framework.ep_cores / device.cores
    messages = messages_seconds(spec, here, work, (layout.mode,))[0].get("ep", NO_MESSAGES)
    attends = attention.forward - attention.forward_communication
    attends_back = attention.products + attention.streams + attention.recompute - attends
    back = [attends_back, routed.backward, routed.backward, shared.backward]
    if splits_backward(layout):  # gradients of weights come later, when nothing travels
        back = [work - part.weights for work, part in zip(back, (attention, routed, routed, shared), strict=True)]
    hidden = []
    for travels, beside in (
        (messages.forward, (attends, routed.forward, routed.forward, shared.forward)),
        (messages.backward, back),
    ):
        # Of the two halves' four all-to-alls, each takes half of what one half's two take.
        hidden.append(travels - sum(added(travels / 2, work, slowed) for work in beside) / 2)
    return replace(
        block,
        ep=block.ep - sum(hidden),
        forward=block.forward - hidden[0],
        forward_communication=block.forward_communication - hidden[0],
    )


def half_times(spec: StepSpec, kind: BlockKind, half: Half, modes: Sequence[Mode]) -> list[RankTime]:
    """Returns the time of half a block for each recomputation mode, without ZeRO-3's collectives."""
    layout, framework, device = spec.layout, spec.framework, spec.cluster.accelerator
    here = place(spec)
    work = half_block(here, kind, half)
    slowdown = framework.block_slowdown(kind)
    if half == "attention" and kind.attention == "mamba":
        slowdown *= framework.recurrent_slowdown
    seconds = operator_seconds(device, work, framework, spec.products, layout.tp, layout.ep_shard, slowdown=slowdown)
    if framework.wide_blocks:
        wide = operator_seconds(device, work, framework, "bf16", layout.tp, layout.ep_shard, slowdown=slowdown)
        seconds = seconds.mixed(wide, framework.wide_blocks)
    handling = {axis: handling_seconds(device, ops) for axis, ops in _host_operations(spec, kind, work).items()}
    starts = framework.kernel_us * 1e-6 * collectives(here, work)
    every = messages_seconds(spec, here, work, modes)
    by_mode = dict.fromkeys(modes, seconds)
    if "mlp" in by_mode:
        by_mode["mlp"] = _with_repeated(seconds, [each for each in work if each.repeated], spec, slowdown)
    if "full" in by_mode and framework.unrepeated:
        kept = [each for each in work if each.name in framework.unrepeated]
        saved = operator_seconds(device, kept, framework, spec.products, layout.tp, slowdown=slowdown).forward
        by_mode["full"] = replace(by_mode["full"], unrepeated=saved)
    if layout.tp > SOCKET_DEVICES:
        by_mode = {mode: each.launched(framework.across_sockets) for mode, each in by_mode.items()}
    return [
        _half_time(spec, by_mode[mode], messages, mode, handling, starts)
        for mode, messages in zip(modes, every, strict=True)
    ]


def _with_repeated(seconds: Seconds, repeated: Sequence[Operator], spec: StepSpec, slowdown: float) -> Seconds:
    """Returns the seconds of half a block of which also the operators `repeated` are cheap enough to run again."""
    layout, device = spec.layout, spec.cluster.accelerator
    again = operator_seconds(
        device, repeated, spec.framework, spec.products, layout.tp, layout.ep_shard, slowdown=slowdown
    )
    return replace(seconds, cheap=seconds.cheap + again.forward, host_cheap=seconds.host_cheap + again.host_forward)


def _half_time(
    spec: StepSpec,
    seconds: Seconds,
    messages: Mapping[str, MessageSeconds],
    mode: Mode,
    handling: Mapping[str, float],
    starts: float,
) -> RankTime:
    """Returns the time of half a block; `starts` are the host's seconds for its collectives in a forward pass."""
    framework = spec.framework
    tp, cp, ep = (messages.get(axis, NO_MESSAGES) for axis in ("tp", "cp", "ep"))
    ring, regather = messages.get("attention", NO_MESSAGES), messages.get("weight_gradients", NO_MESSAGES)
    again = _recomputed(spec, mode, seconds)
    visible = 1 - framework.tp_hidden
    around = around_back = 0.0
    if ring is not NO_MESSAGES:
        # A ring's messages slow down the attention that they overlap: a CPU moves bytes and computes with the same
        # cores; an accelerator loses the cores and the memory bandwidth that messages use.
        share = 1.0 if spec.cluster.accelerator.host_us else ring.occupancy
        slowed = (framework.interference - 1) * share
        around = added(ring.forward, seconds.attention, slowed)
        around_back = added(ring.backward, 2 * seconds.attention, slowed)
        around_back += added(ring.again, seconds.attention, slowed)
    forward = {
        "tp": tp.forward * visible,
        "cp": cp.forward + around,
        "ep": ep.forward,
    }
    backward = {
        # Inputs are gathered again during the computation of weight gradients.
        "tp": (tp.backward + tp.again) * visible + max(0.0, regather.backward - seconds.weights),
        "cp": cp.backward + cp.again + around_back,
        "ep": ep.backward + ep.again,
    }
    forward = {axis: spent + handling[axis] for axis, spent in forward.items()}
    backward = {axis: spent + 2 * handling[axis] for axis, spent in backward.items()}
    repeated = seconds.host_forward + starts if starts_again(spec.cluster.accelerator, mode) else 0.0
    repeated = seconds.host_cheap if mode in ("products", "mlp") else repeated
    return RankTime(
        products=seconds.products,
        streams=seconds.streams,
        recompute=again,
        host_forward=seconds.host_forward + starts,
        host_backward=seconds.host_backward + starts + repeated,
        **{axis: forward[axis] + backward[axis] for axis in forward},
        forward=seconds.forward + sum(forward.values()),
        weights=seconds.weights,
        forward_communication=sum(forward.values()),
    )


def handling_seconds(device: Accelerator, operations: float) -> float:
    """Returns the seconds in which a CPU launches some operations; 0 if the host runs ahead of the device."""
    return operations * device.host_us * 1e-6


def starts_again(device: Accelerator, mode: Mode) -> bool:
    """Returns whether the host launches the forward pass a second time, ahead of the device."""
    return mode == "full" and not device.host_us


def _host_operations(spec: StepSpec, kind: BlockKind, work: Iterable[Operator]) -> dict[str, float]:
    """Returns the host's operations around the collectives of half a block with the operators `work`, by axis, in the
    forward pass; the backward pass has twice as many."""
    layout = spec.layout
    steps = next((operator.core.steps for operator in work if operator.core), 0)
    attention = steps > 0
    exchanged = sum(m.forward for operator in work for m in operator.messages if m.axis == "ulysses") / 2
    # Both halves of a parallel block share one exchange.
    exchanges = 1 if spec.model.parallel_block else 2
    sends = attention or not (layout.folds and kind.routed) or spec.model.moe.n_shared > 0
    return {
        "tp": (layout.tp > 1 and sends) * HOST_OPS["sp" if layout.sp else "tp"] * exchanges / 4,
        "cp": attention * ((steps - 1) * HOST_OPS["ring"] + exchanged * HOST_OPS["ulysses"]),
        "ep": (not attention and kind.routed and layout.ep > 1) * HOST_OPS["ep"],
    }


def _with_uniform_recompute(spec: StepSpec, mode: Mode) -> StepSpec:
    """Returns the spec with the same recomputation in all blocks."""
    return replace(spec, layout=uniform_recompute(spec.layout, mode)) if spec.layout.recompute_cut else spec


def _recomputed(spec: StepSpec, mode: Mode, seconds: Seconds) -> float:
    """Returns the seconds of work that the backward pass repeats."""
    if mode == "full":
        return seconds.forward - seconds.unrepeated
    if mode in ("products", "mlp"):
        return seconds.cheap
    if mode == "selective":
        if spec.framework.memory_profile.selective == "products":
            return (seconds.forward - seconds.attention) / 2
        return seconds.attention
    return 0.0


def _sharded(spec: StepSpec, kind: BlockKind, block: RankTime) -> RankTime:
    """Returns a block's time with ZeRO-3's collectives, which overlap with the neighbouring block and slow it down."""
    layout, framework = spec.layout, spec.framework
    if not gathers_parameters(layout):
        return block
    counts, held = block_parameters(spec.model, layout, kind), block_held(spec, kind)
    there, back = _gathering(spec, held, block)
    tiles = counts.tiles if layout.reshard else 0
    fetched = _fetching(spec, held, block)
    if tiles:
        # Each tile is gathered when it runs, and no product hides it; the rest of the block is, as without tiles.
        parts = counts.tiled_dense, counts.tiled_experts
        within = ParameterCounts(*parts, *parts)
        tiled = state_seconds(spec, within, tiles)
        rest = _gathering(spec, ParameterCounts(*map(sub, held, within)), block)
        again = 2 if layout.recompute == "full" else 1
        there, back = max(there, rest[0] + tiled.gather), max(back, rest[1] + again * tiled.regather)
        fetched = max(fetched[0], tiled.fetch), max(fetched[1], again * tiled.fetch)
    device = spec.cluster.accelerator
    handling = handling_seconds(device, HOST_OPS["shard"]) * (1 + tiles)
    starts = framework.kernel_us * 1e-6 * (1 + tiles)
    return replace(
        block,
        shard=there + back + 3 * handling,
        copies=sum(fetched),
        forward=block.forward + there + handling + fetched[0],
        forward_communication=block.forward_communication + there + handling + fetched[0],
        host_forward=block.host_forward + starts,
        host_backward=block.host_backward + starts * (2 if starts_again(device, layout.mode) else 1),
    )


def _gathering(spec: StepSpec, held: ParameterCounts, block: RankTime) -> tuple[float, float]:
    """Returns the seconds that ZeRO-3's collectives of some parameters add to a block's forward and backward pass."""
    layout, framework = spec.layout, spec.framework
    state = state_seconds(spec, held, framework.messages)
    return block_state(
        state.gather,
        state.regather,
        state.reduce,
        block.forward,
        block.device - block.forward,
        interference(spec, held, framework.messages),
        spec.batch.accumulation,
        reshard=layout.reshard,
        local=layout.accumulate == "local",
        overlaps=framework.dp_overlaps,
    )


def _fetching(spec: StepSpec, held: ParameterCounts, block: RankTime) -> tuple[float, float]:
    """Returns the seconds that copies of parameters from the host add to a block's forward and backward pass: on one
    rank, without a collective, FSDP2 starts them when it needs them."""
    layout = spec.layout
    state = state_seconds(spec, held, spec.framework.messages)
    late, plain = (
        block_state(
            state.gather + fetch,
            state.regather + fetch,
            state.reduce,
            block.forward,
            block.device - block.forward,
            0.0,
            spec.batch.accumulation,
            reshard=layout.reshard,
            local=layout.accumulate == "local",
            overlaps=spec.framework.dp_overlaps and layout.shard_ranks > 1,
        )
        for fetch in (state.fetch, 0.0)
    )
    return late[0] - plain[0], late[1] - plain[1]


def around_time(spec: StepSpec, content: Content) -> RankTime:
    """Returns the time of embedding, head and loss with their communication. A loss in chunks of tokens computes all
    gradients in the forward pass (parallel/vocabulary.py)."""
    time, here, vocab = RankTime(), place(spec), spec.model.vocab_size
    of_loss = _of_loss(spec.framework)
    parts: list[tuple[Operator, ...]] = []
    if content.embedding:
        parts.append((embedding(here, vocab), *([layer_projection(here)] if spec.model.layer_embedding else [])))
    if content.head:
        norm, *loss = head(here, vocab)
        loss = [_of_whole_logits(spec, operator) for operator in loss]
        parts += [(norm,), tuple(loss)] if _is_fused(spec) else [(norm, *loss)]
    for operators in parts:
        fused = operators[-1].name == "loss" and _is_fused(spec)
        chunks = max(1.0, here.tokens / spec.layout.logits_of(here.tokens)) if fused else 1.0
        work = tuple(_of_chunk(spec, operators, chunks)) if fused else operators
        seconds = operator_seconds(
            spec.cluster.accelerator,
            work,
            spec.framework if operators[0].name == "embedding" else of_loss,
            spec.products,
            spec.layout.tp,
            slowdown=spec.framework.slowdown,
        )
        tp = messages_seconds(spec, here, work)[0].get("tp", NO_MESSAGES)
        one = RankTime(
            products=seconds.products,
            streams=seconds.streams,
            recompute=_logits_again(spec, operators),
            host_forward=seconds.host_forward + (seconds.host_backward if fused else 0.0),
            host_backward=0.0 if fused else seconds.host_backward,
            tp=tp.forward + tp.backward,
            forward=seconds.forward + tp.forward + (seconds.backward if fused else 0.0),
            weights=0.0 if fused else seconds.weights,
            forward_communication=tp.forward,
        )
        time += one.settled(ahead=not spec.framework.reads_sizes).scaled(chunks)
    return time


@lru_cache(64)
def _of_loss(framework: Framework) -> Framework:
    """Returns a framework as its loss moves logits."""
    return replace(framework, passes=framework.loss_passes or framework.passes)


def _of_whole_logits(spec: StepSpec, operator: Operator) -> Operator:
    """Returns the loss of a program whose tensor ranks gather the logits; any other operator as it is."""
    tp, here = spec.layout.tp, place(spec)
    if operator.name != "loss" or tp == 1 or not spec.framework.whole_logits:
        return operator
    logits = here.tokens * spec.model.vocab_size
    each = (work._replace(forward=tp * work.forward, backward=tp * work.backward) for work in operator.memory_bound)
    return replace(operator, memory_bound=tuple(each), messages=(Message("tp", "all_gather", logits, forward=1),))


def _is_fused(spec: StepSpec) -> bool:
    """Returns whether the loss computes the gradients of head and hidden states of one chunk of tokens at a time."""
    return spec.layout.logits_of(place(spec).tokens) > 0 and not _repeats_logits(spec)


def _of_chunk(spec: StepSpec, operators: Iterable[Operator], chunks: float) -> Iterator[Operator]:
    """Yields the operators of one of `chunks` chunks of tokens, each of which adds to the gradient of the head."""
    for operator in operators:
        yield replace(
            operator,
            rows=ceil(operator.rows / chunks),
            memory_bound=tuple(
                each._replace(forward=each.forward / chunks, backward=each.backward / chunks)
                for each in operator.memory_bound
            ),
            messages=tuple(each._replace(elements=each.elements / chunks) for each in operator.messages),
        )
    if chunks > 1 and not spec.model.freezes:
        yield Operator(
            "sum", memory_bound=(MemoryBound("sum", 2 * table(spec.model, spec.layout.tp), 0, kernels=0, launches=0),)
        )


def _repeats_logits(spec: StepSpec) -> bool:
    """Returns whether the backward pass computes logits again: of tiles, or of chunks of sequences that are
    compared, the factors of whose gradients are known when the whole loss is."""
    return head_tiles(spec.model, spec.layout) > 1 or (
        bool(spec.compared) and not spec.model.freezes and spec.layout.logits_of(place(spec).tokens) > 0
    )


def _logits_again(spec: StepSpec, operators: Iterable[Operator]) -> float:
    """Returns the seconds in which the backward pass computes logits again."""
    again = [operator for operator in operators if operator.name == "head"]
    if not again or not _repeats_logits(spec):
        return 0.0
    device, framework = spec.cluster.accelerator, spec.framework
    seconds = operator_seconds(device, again, framework, spec.products, spec.layout.tp, slowdown=framework.slowdown)
    return seconds.forward


def _gathered_ends(spec: StepSpec, content: Content) -> RankTime:
    """Returns the time of gathering the tiles of embedding and head, which no product hides: the head's also in the
    backward pass."""
    layout, there, back = spec.layout, 0.0, 0.0
    if gathers_parameters(layout) and layout.reshard:
        for name, here in (("embed.weight", content.embedding), ("head.weight", content.head and not spec.model.tied)):
            if here and is_tiled(weight_of(spec.model, name), layout):
                rows = table(spec.model, layout.tp)
                if layout.quantise_weights == "fp8":  # which is for matrices of blocks
                    spec = replace(spec, layout=replace(layout, quantise_weights="none"))
                tiles = state_seconds(spec, ParameterCounts(rows, 0, rows, 0), layout.tiles)
                there += tiles.gather
                back += tiles.regather if name == "head.weight" else 0.0
    return RankTime(shard=there + back, forward=there, forward_communication=there)


def rank_time(spec: StepSpec, content: Content) -> RankTime:
    """Returns the time of a micro-batch on a rank with `content`, times the share of them that passes it."""
    time = around_time(spec, content) + _gathered_ends(spec, content)
    for kind, number in content.kinds:
        time += block_time(_with_uniform_recompute(spec, kind.recompute), kind.block).scaled(number)
    for kind, number in content.swapped:
        alone = block_time(_with_uniform_recompute(spec, kind.recompute), kind.block)
        held = block_held(spec, kind.block)
        fetched = fetch_seconds(spec, held.dense, held.experts)  # on the same link
        beside = max(0.0, alone.forward_seconds - fetched), max(0.0, alone.backward_seconds - fetched)
        down, up = exposed_swaps(spec, kind, *beside)
        swaps = RankTime(copies=down + up, forward=down, forward_communication=down)
        time += swaps.scaled(number)
    if spec.framework.sum_passes:
        held = held_by(spec, content)
        count = spec.batch.accumulation
        summing = summing_seconds(spec.cluster.accelerator, spec.framework, spec.width, held.trained, count)
        time += RankTime(streams=summing)
    return time if content.share == 1 else time.scaled(content.share)
