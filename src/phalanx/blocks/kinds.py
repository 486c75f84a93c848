"""The kinds of blocks of a model: a model is a sequence of kinds. Installed packages add kinds as the project adds its
own: one object each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import repeat
from typing import Any, NamedTuple

from phalanx.blocks.attention import attention, latent_attention, shared_attention
from phalanx.blocks.feed_forward import dense, experts
from phalanx.blocks.operator import Half, Operator, Place
from phalanx.blocks.recurrent import delta_net, mamba
from phalanx.blocks.residual import (
    adapted,
    joined,
    layer_input,
    norm,
    own_norms,
    predicted,
    rescaled,
    residual,
    sum_of_halves,
)
from phalanx.blocks.sparse import gated_attention, sparse_attention
from phalanx.config.model import MLA, DeltaNet, Mamba, ModelConfig, MoE, SparseAttention, WideHeads, window_within
from phalanx.facts import Lazy, stated
from phalanx.nearest import Misfit, did_you_mean, divisors, multiples
from phalanx.registry import Registry, package_code


class Connection(NamedTuple):
    """How tensor parallelism connects a layer to the residual stream, by the names of linear layers in its module
    (Shoeybi et al. 2019, section 3)."""

    reads: tuple[str, ...] = ()
    """Those that read the input, cut by rows. The module applies them through its `project`, all at once: the input is
    gathered, and its gradient is summed, once for all. None: a hook gathers the input of the whole module, and every
    rank computes what reads it."""
    writes: tuple[str, ...] = ()
    """Those that write the output, cut by columns. If there is one, it sums the ranks' outputs. Otherwise a hook sums
    the output of the whole module, to which only the first rank adds their biases."""


NO_CONNECTION = Connection()


def no_problems(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yields nothing: any values of the model's fields will do."""
    yield from ()


def no_fields(model: ModelConfig, small: ModelConfig, max_ranks: int) -> ModelConfig:
    """Returns `small`: the kind has no fields of its own."""
    return small


@stated
@dataclass(frozen=True, kw_only=True)
class SublayerKind:
    """A kind of one of a block's two sub-layers, attention and feed-forward layer."""

    title: str
    """A few words for lists and messages."""
    source: str
    """The paper or model that it is from, with the section."""
    operators: Callable[[Place], Iterator[Operator]]
    """The description: yields the operators between the norm and the residual sum, in the order of the forward pass,
    with weights, products, saved tensors and messages. Parameter counts, tensor slices, FLOPs, memory, traffic and
    seconds are views of it."""
    module: Lazy | None
    """What makes the torch module on one device, "package.module:name", imported when a model is built. Its parameters
    are the description's weights, in the same order. None: the kind is predicted and not trained."""
    connection: Connection = NO_CONNECTION
    """How tensor parallelism connects the module to the residual stream."""
    name_in_block: str
    """The name of the module in a block, with which the names of its weights begin."""
    needs: tuple[str, ...] = ()
    """Fields of the model that it needs above 0, such as "mla.kv_rank". Kinds that do not need them refuse them."""
    problems: Callable[[ModelConfig], Iterator[tuple[str, str]]] = no_problems
    """Yields the dotted path of each wrong field of the model, and the message."""
    shrink: Callable[[ModelConfig, ModelConfig, int], ModelConfig] = no_fields
    """(model, small, max_ranks): returns `small`, which phalanx verify compares in place of a large `model`, with
    smaller values of this kind's own fields. Sizes stay divisible by the same numbers of ranks up to `max_ranks`."""


@stated
@dataclass(frozen=True, kw_only=True)
class AttentionKind(SublayerKind):
    """A kind of attention. `module` is called with (model, layer); its forward pass takes what that of
    `phalanx.model.attention.Attention` takes."""

    name_in_block: str = "attn"
    by_heads: Callable[[ModelConfig], tuple[int, int]] | None = None
    """The numbers of heads, and of what they share, of a kind without cores whose heads are computed each by itself:
    context-parallel ranks exchange tokens for them. None: no rank may hold a part of a sequence."""
    gathers: bool = False
    """Whether context-parallel ranks gather what keys are made of, for all heads, so that none exchange heads."""
    counts: bool = False
    """Whether its forward pass takes Conversations or None, too: it has a loss of its own, which does not count
    padding."""
    cores: tuple[str, ...]
    """The names of the CoreAttention modules in its module, outside which tokens do not meet: selective recomputation
    repeats them, and context parallelism replaces them. None: no rank may hold a part of a sequence."""


@stated
@dataclass(frozen=True, kw_only=True)
class FeedForwardKind(SublayerKind):
    """A kind of feed-forward layer. `module` is called with (model, layer, routing); its forward pass maps (batch, seq,
    d_model) to the same shape, each token by itself."""

    name_in_block: str = "mlp"
    width: Callable[[ModelConfig], int]
    """The hidden width, which tensor parallelism cuts."""
    width_name: str = "MLP width"
    """That width in messages."""
    routed: bool = False
    """Whether it has routed experts, which expert parallelism distributes: weights named "moe.experts.…". The first
    `moe.n_dense_layers` layers are dense. Its forward pass takes Conversations (phalanx.model.documents) or None, too:
    what its router counts besides choosing experts."""


_PLAIN = ModelConfig(n_heads=4, n_kv_heads=2, positions="rope", activation="swiglu", bias=False)
_LATENT = MLA(kv_rank=8, q_rank=8, rope_head_dim=4, nope_head_dim=4, v_head_dim=4)
NEEDS = {
    "mla.kv_rank": {"mla": _LATENT},
    "sparse.top_k": {"sparse": SparseAttention(top_k=8, index_heads=2, index_head_dim=4)},
    "delta.n_heads": {"delta": DeltaNet(n_heads=4, key_heads=2, key_head_dim=4, head_dim=4)},
    "mamba.n_heads": {"mamba": Mamba(n_heads=4, head_dim=4, groups=2, state=4, chunk=8)},
    "wide.head_dim": {"wide": WideHeads(8, 1)},
    "shared_keys": {"shared_keys": 1},
    "double_mlp": {"shared_keys": 1, "double_mlp": True},
    "moe.n_experts": {"moe": MoE(n_experts=4)},
}
"""Fields that switch a part of a model on, and a small value of that part."""


def kind_problems(kind: SublayerKind) -> Iterator[str]:
    """Yields what contradicts the facts of a kind."""
    for path in kind.needs:
        if path not in NEEDS:
            yield f"needs: {path!r} switches no part of a model on{did_you_mean(path, NEEDS)} ({', '.join(NEEDS)} do)"
            return
    parts: dict[str, Any] = {name: part for path in kind.needs for name, part in NEEDS[path].items()}
    place = Place(replace(_PLAIN, **parts), tp=2)
    with package_code("its operators failed for a small model with tp=2"):
        legal = not list(kind.problems(place.model))  # otherwise it goes with other models only
        found = list(_operator_problems(kind, place, tuple(kind.operators(place)))) if legal else []
    yield from found


def _operator_problems(kind: SublayerKind, place: Place, operators: tuple[Operator, ...]) -> Iterator[str]:
    if not operators and not kind.module:
        return
    weights = {weight.name: weight for operator in operators for weight in operator.weights}
    if not weights:
        yield "its operators have no weights"
    for name in weights:
        if not name.startswith(f"{kind.name_in_block}."):
            yield f"the name of the weight {name!r} must begin with {kind.name_in_block!r} and a dot"
    for names, cut in ((kind.connection.reads, "rows"), (kind.connection.writes, "columns")):
        for name in names:
            weight = weights.get(f"{kind.name_in_block}.{name}.weight")
            if weight and weight.cut != cut:
                yield f"{name} {'reads the input' if cut == 'rows' else 'writes the output'}: it must be cut by {cut}"
    if isinstance(kind, AttentionKind):
        cores = sum(operator.core is not None for operator in operators)
        if kind.module and cores != len(kind.cores):
            yield f"it states {len(kind.cores)} cores, its operators have {cores}"
    if isinstance(kind, FeedForwardKind):
        if kind.width(place.model) < 1:
            yield f"width must be at least 1, is {kind.width(place.model)}"
        if kind.routed != any(weight.routed for weight in weights.values()):
            yield f"routed is {kind.routed}: so are not the names of its weights (moe.experts.…)"
    yield from _message_problems(place, operators)


def _message_problems(place: Place, operators: tuple[Operator, ...]) -> Iterator[str]:
    """Yields the problems of the messages off and onto the residual stream: one all-reduce of the stream in the
    backward pass and one in the forward pass."""
    sums = [
        message
        for operator in operators
        for message in operator.messages
        if message.axis == "tp" and message.collective == "all_reduce" and message.elements == place.hidden
    ]
    off, onto = sum(message.backward for message in sums), sum(message.forward for message in sums)
    for times, way, helper in ((off, "off", "enter"), (onto, "onto", "leave")):
        if times != 1:
            yield (
                f"its messages {way} the residual stream sum it {times:g} times over tensor ranks instead of once: "
                f"phalanx.blocks.residual.{helper} yields them"
            )


def expert_problems(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yields the problems of a mixture of experts."""
    moe, n_layers = model.moe, model.n_layers
    n = moe.n_experts
    if moe.top_k > n:
        choices = {"model.moe.top_k": [n], "model.moe.n_experts": range(moe.top_k, moe.top_k + 8)}
        yield "model.moe.top_k", Misfit(f"must lie between 1 and n_experts {n}, is {moe.top_k}", moe.top_k, choices)
    elif moe.top_k == 1 and moe.renormalise:
        yield (
            "model.moe.renormalise",
            "with top_k 1 the gate is always 1 and the router gets no gradient from the loss; nearest legal: "
            "renormalise=false",
        )
    if moe.scale_inputs and model.bias:
        yield (
            "model.moe.scale_inputs",
            "experts with biases return something for inputs of zeros, as dropped choices have; nearest legal: "
            "bias=false, or scale_inputs=false",
        )
    if moe.own_norms:
        yield from _own_norms(model)
    if moe.bias_balanced and not moe.bias_rate:
        yield "model.moe.bias_rate", f"must be above 0 with bias_balanced, is {moe.bias_rate}"
    if moe.n_dense_layers > n_layers:
        yield "model.moe.n_dense_layers", f"is {moe.n_dense_layers}, more than the model's n_layers {n_layers}"
    yield from _groups(moe)


def _own_norms(model: ModelConfig) -> Iterator[tuple[str, str]]:
    needed = {
        "norm is rmsnorm": model.norm == "rmsnorm",
        "norm_place is both": model.norm_place == "both",
        "moe.n_shared is above 0": model.moe.n_shared > 0,
        "moe.scale_inputs is false": not model.moe.scale_inputs,
        "moe.latent is 0": not model.moe.latent,
    }
    if wrong := [text for text, holds in needed.items() if not holds]:
        yield "model.moe.own_norms", f"needs that {', '.join(wrong)}; nearest legal: that, or own_norms=false"


def _groups(moe: MoE) -> Iterator[tuple[str, str]]:
    n, groups = moe.n_experts, moe.n_groups
    if n % groups:
        yield (
            "model.moe.n_groups",
            Misfit(
                f"n_experts {n} / n_groups {groups} is not an integer",
                groups,
                {"model.moe.n_groups": divisors(n), "model.moe.n_experts": multiples(groups, n)},
            ),
        )
        return
    if moe.top_groups > groups:
        yield (
            "model.moe.top_groups",
            Misfit(
                f"must lie between 1 and n_groups {groups}, is {moe.top_groups}",
                moe.top_groups,
                {"model.moe.top_groups": [groups]},
            ),
        )
        return
    within = n // groups * moe.top_groups
    if within < moe.top_k <= n:
        legal = [count for count in range(1, groups + 1) if n // groups * count >= moe.top_k]
        yield (
            "model.moe.top_groups",
            Misfit(
                f"top_groups {moe.top_groups} × (n_experts {n} / n_groups {groups}) = {within} experts to choose from, "
                f"fewer than top_k {moe.top_k}",
                moe.top_groups,
                {"model.moe.top_groups": legal, "model.moe.top_k": range(1, within + 1)},
            ),
        )


def latent_problems(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yields the problems of latent attention."""
    mla, positions = model.mla, model.positions
    if mla.rope_head_dim % 2:
        even = range(max(2, mla.rope_head_dim - 1), mla.rope_head_dim + 2, 2)
        yield (
            "model.mla.rope_head_dim",
            Misfit(
                f"rotary positions turn pairs: must be even, is {mla.rope_head_dim}",
                mla.rope_head_dim,
                {"model.mla.rope_head_dim": even},
            ),
        )
    if positions != "rope":
        yield "model.positions", f"latent attention needs rotary positions: rope, is {positions}"


def sparse_problems(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yields the problems of latent attention to chosen keys."""
    yield from latent_problems(model)
    size, turned = model.sparse.index_head_dim, model.mla.rope_head_dim
    if size < turned:
        why = f"positions turn mla.rope_head_dim {turned} elements of the indexer's heads, which have {size}"
        yield "model.sparse.index_head_dim", f"{why}; nearest legal: {turned}"
    if model.warms_up and model.lora.rank:
        why = "trains the indexer alone, without adapters; nearest legal: dense_warmup=false, or lora.rank=0"
        yield "model.sparse.dense_warmup", why
    why = "is for scores over all keys, of which an indexer chooses some"
    for name in ("dropout", "window", "attention_softcap", "sinks"):
        if getattr(model, name):
            yield f"model.{name}", f"{why}; nearest legal: {name}={'false' if name == 'sinks' else 0}"


SMALL_EXPERTS, SMALL_DELTAS, SMALL_CHOICE = 8, 4, 8
SMALL_Q_RANK, SMALL_KV_RANK, SMALL_PART = 16, 8, 4
"""Latent attention: the ranks of its compressions, and the size of each part of a head."""


def alike(number: int, at_least: int, max_ranks: int) -> int:
    """Returns the smallest number from `at_least` on with the same divisors among 2 to `max_ranks` as `number`."""
    ranks = range(2, max_ranks + 1)
    return next(n for n in range(at_least, number + 1) if all((n % r == 0) == (number % r == 0) for r in ranks))


def fewer_experts(model: ModelConfig, small: ModelConfig, max_ranks: int) -> ModelConfig:
    """Returns `small` with fewer and narrower experts than `model`, in at least one layer. The same fraction of their
    groups is chosen from, and the groups hold more experts than a token visits, so that the choice is not trivial."""
    width = alike(model.expert_ff_size, min(model.expert_ff_size, small.d_model // 4), max_ranks)
    dense = min(model.moe.n_dense_layers, small.n_layers - 1)
    return replace(small, moe=_fewer(replace(model.moe, n_dense_layers=dense, d_ff=width), max_ranks))


def _fewer(moe: MoE, max_ranks: int) -> MoE:
    n = alike(moe.n_experts, min(moe.n_experts, SMALL_EXPERTS), max_ranks)
    if n == moe.n_experts:
        return moe
    groups = next(groups for groups in range(min(moe.n_groups, n // 2), 0, -1) if n % groups == 0)
    top_groups = -(-moe.top_groups * groups // moe.n_groups)
    top_k = min(moe.top_k, max(2, n // groups * top_groups // 2))
    return replace(moe, n_experts=n, n_groups=groups, top_groups=top_groups, top_k=top_k)


def smaller_latents(model: ModelConfig, small: ModelConfig, max_ranks: int) -> ModelConfig:
    """Returns `small` with lower ranks of latent attention's compressions, and smaller heads, than `model`."""
    mla = model.mla
    latents = MLA(
        q_rank=min(mla.q_rank, SMALL_Q_RANK),
        kv_rank=min(mla.kv_rank, SMALL_KV_RANK),
        rope_head_dim=min(mla.rope_head_dim, SMALL_PART),
        nope_head_dim=min(mla.nope_head_dim, SMALL_PART),
        v_head_dim=min(mla.v_head_dim, SMALL_PART),
    )
    return replace(small, mla=latents)


def smaller_index(model: ModelConfig, small: ModelConfig, max_ranks: int) -> ModelConfig:
    """Returns `small` with smaller latents than `model`, and fewer and smaller heads of the indexer, which chooses from
    more keys than it may."""
    small, sparse = smaller_latents(model, small, max_ranks), model.sparse
    heads, size = min(sparse.index_heads, SMALL_CHOICE), min(sparse.index_head_dim, 2 * SMALL_PART)
    choice = min(sparse.top_k, small.seq_len // 4)
    return replace(small, sparse=replace(sparse, top_k=choice, index_heads=heads, index_head_dim=size))


def delta_problems(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yields the problems of gated delta nets."""
    delta = model.delta
    if delta.n_heads % delta.key_heads:
        yield (
            "model.delta.key_heads",
            Misfit(
                f"n_heads {delta.n_heads} / key_heads {delta.key_heads} is not an integer",
                delta.key_heads,
                {"model.delta.key_heads": divisors(delta.n_heads)},
            ),
        )


def smaller_deltas(model: ModelConfig, small: ModelConfig, max_ranks: int) -> ModelConfig:
    """Returns `small` with smaller heads of gated delta nets than `model`, and fewer of them."""
    delta = model.delta
    keys = alike(delta.key_heads, min(delta.key_heads, SMALL_DELTAS), max_ranks)
    heads = keys * (delta.n_heads // delta.key_heads)
    size, own = (min(each, SMALL_PART) for each in (delta.key_head_dim, delta.head_dim))
    return replace(small, delta=DeltaNet(heads, keys, size, own, delta.conv))


def smaller_wide_heads(model: ModelConfig, small: ModelConfig, max_ranks: int) -> ModelConfig:
    """Returns `small` with wide heads twice as wide as its others."""
    return replace(small, wide=replace(model.wide, head_dim=min(model.wide.head_dim, 2 * small.head_size)))


def shared_problems(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yields the problems of layers that attend to keys of earlier ones."""
    path, layers = "model.shared_keys", range(model.n_layers - model.shared_keys, model.n_layers)
    if model.shared_keys >= model.n_layers:
        why = f"must leave a layer with keys of its own: n_layers is {model.n_layers}, shared_keys {model.shared_keys}"
        yield path, f"{why}; nearest legal: {model.n_layers - 1}"
    elif alone := [layer for layer in layers if model.keys_of(layer) < 0]:
        kind = "a window" if model.window_of(alone[0]) else "all keys"
        yield path, f"no layer with keys of its own has {kind}, as layer {alone[0]} has; nearest legal: fewer"
    if model.attention:
        why = f"shared_keys says which layers have keys of their own, is {model.attention!r}"
        yield "model.attention", f"{why}; nearest legal: empty, or shared_keys=0"
    if model.mtp:
        yield "model.mtp", f"is for models whose layers have keys of their own, is {model.mtp}; nearest legal: 0"
    if model.qk_norm in ("width", "unit"):
        why = f"norms of queries that are alone are per head, is {model.qk_norm}"
        yield "model.qk_norm", f"{why}; nearest legal: head, or none"


def fewer_shared(model: ModelConfig, small: ModelConfig, max_ranks: int) -> ModelConfig:
    """Returns `small` with as many layers that share keys as have keys of their own."""
    return replace(small, shared_keys=min(model.shared_keys, small.n_layers // 2))


def double(place: Place) -> Iterator[Operator]:
    """Yields the operators of an MLP of twice the width."""
    yield from dense(place._replace(model=replace(place.model, d_ff=2 * place.model.ff_size)))


def double_problems(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yields the problems of MLPs of two widths."""
    if model.feed_forward:
        why = f"double_mlp says which layers have an MLP of twice the width, is {model.feed_forward!r}"
        yield "model.feed_forward", f"{why}; nearest legal: empty, or double_mlp=false"


def nothing(place: Place) -> Iterator[Operator]:
    """Yields no operator: a block without this half has one norm and one sum onto the residual stream."""
    yield from ()


def _not_parallel(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yields that a parallel block has both halves."""
    if model.parallel_block:
        yield "model.parallel_block", "adds two halves, and some layers have one; nearest legal: parallel_block=false"


HEADS = AttentionKind(
    title="multi-head, grouped-query or multi-query attention",
    source="Vaswani et al. 2017, section 3.2; Ainslie et al. 2023",
    operators=attention,
    module="phalanx.model.attention:Attention",
    connection=Connection(reads=("wq", "wk", "wv"), writes=("wo",)),
    cores=("core",),
)
SHARED_HEADS = replace(
    HEADS,
    title="the same, to keys and values of an earlier layer",
    source="Google DeepMind 2025, Gemma 3n; 2026, Gemma 4",
    operators=shared_attention,
    module="phalanx.model.attention:SharedAttention",
    connection=Connection(reads=("wq",), writes=("wo",)),
    needs=("shared_keys",),
    problems=shared_problems,
    shrink=fewer_shared,
)
WIDE: dict[str, Any] = {
    "title": "the same with heads of another size",
    "source": "Google DeepMind 2026, Gemma 4",
    "shrink": smaller_wide_heads,
}
DENSE = FeedForwardKind(
    title="one MLP for all tokens, with or without a gate",
    source="Vaswani et al. 2017, section 3.3; Shazeer 2020",
    operators=dense,
    module="phalanx.model.layers:dense",
    connection=Connection(reads=("up", "gate"), writes=("down",)),
    width=lambda model: model.ff_size,
)


def _problems(name: str, kind: SublayerKind) -> Iterator[str]:
    return kind_problems(kind)


ATTENTION: Registry[AttentionKind] = Registry(
    "attention",
    {
        "heads": HEADS,
        "wide_heads": replace(HEADS, needs=("wide.head_dim",), **WIDE),
        "shared_heads": SHARED_HEADS,
        "shared_wide_heads": replace(SHARED_HEADS, needs=("shared_keys", "wide.head_dim"), **WIDE),
        "latent": AttentionKind(
            title="multi-head latent attention",
            source="DeepSeek-V2, section 2.1",
            operators=latent_attention,
            module="phalanx.model.attention:LatentAttention",
            connection=Connection(writes=("wo",)),
            cores=("core",),
            needs=("mla.kv_rank",),
            problems=latent_problems,
            shrink=smaller_latents,
        ),
        "sparse": AttentionKind(
            title="multi-head latent attention to keys that an indexer chooses",
            source="DeepSeek-AI 2025 (arXiv 2512.02556), section 2.1",
            operators=sparse_attention,
            module="phalanx.model.sparse:IndexedAttention",
            connection=Connection(writes=("wo",)),
            cores=("core",),
            gathers=True,
            counts=True,
            needs=("mla.kv_rank", "sparse.top_k"),
            problems=sparse_problems,
            shrink=smaller_index,
        ),
        "gated_heads": AttentionKind(
            title="multi-head attention with a gate of its output",
            source="Qwen Team 2025, Qwen3-Next; Qiu et al. 2025 (arXiv 2505.06708)",
            operators=gated_attention,
            module="phalanx.model.attention:GatedAttention",
            connection=Connection(reads=("wq", "wk", "wv", "wg"), writes=("wo",)),
            cores=("core",),
        ),
        "delta": AttentionKind(
            title="gated delta net, a linear attention",
            source="Yang et al. 2025 (arXiv 2412.06464), section 3",
            operators=delta_net,
            module="phalanx.model.recurrent:GatedDeltaNet",
            connection=Connection(reads=("wq", "wk", "wv", "wz", "wb", "wa"), writes=("wo",)),
            cores=(),
            by_heads=lambda model: (model.delta.n_heads, model.delta.key_heads),
            needs=("delta.n_heads",),
            problems=delta_problems,
            shrink=smaller_deltas,
        ),
        "mamba": AttentionKind(
            title="Mamba-2, a state space model",
            source="Dao and Gu 2024 (arXiv 2405.21060), section 6",
            operators=mamba,
            module=None,
            cores=(),
            needs=("mamba.n_heads",),
        ),
        "none": AttentionKind(
            title="no attention: the block is its feed-forward layer",
            source="NVIDIA 2025, Nemotron-H (arXiv 2504.03624), section 2.1",
            operators=nothing,
            module=None,
            cores=(),
            problems=_not_parallel,
        ),
    },
    _problems,
)
"""Kinds of attention, by name."""
FEED_FORWARD: Registry[FeedForwardKind] = Registry(
    "feed_forward",
    {
        "dense": DENSE,
        "double": replace(
            DENSE,
            title="an MLP of twice the width",
            source="Google DeepMind 2026, Gemma 4 E2B",
            operators=double,
            module="phalanx.model.layers:double",
            needs=("double_mlp",),
            problems=double_problems,
            width=lambda model: 2 * model.ff_size,
        ),
        "experts": FeedForwardKind(
            title="a mixture of experts",
            source="Shazeer et al. 2017; DeepSeek-V3, section 2.1.2",
            operators=experts,
            module="phalanx.model.moe:MixtureOfExperts",
            connection=Connection(writes=("experts.down", "shared.down")),
            needs=("moe.n_experts",),
            problems=expert_problems,
            shrink=fewer_experts,
            name_in_block="moe",
            width=lambda model: model.expert_ff_size,
            width_name="an expert's width",
            routed=True,
        ),
        "none": FeedForwardKind(
            title="no feed-forward layer: the block is its attention",
            source="NVIDIA 2025, Nemotron-H (arXiv 2504.03624), section 2.1",
            operators=nothing,
            module=None,
            problems=_not_parallel,
            width=lambda model: 0,
        ),
    },
    _problems,
)
"""Kinds of feed-forward layers, by name."""

TABLES: Mapping[Half, Registry[AttentionKind] | Registry[FeedForwardKind]] = {
    "attention": ATTENTION,
    "feed_forward": FEED_FORWARD,
}
"""The kinds of each half of a block."""
HALVES: tuple[Half, ...] = ("attention", "feed_forward")
"""The halves of a block, each with its norms, and a sum onto the residual stream after each or, in a parallel block,
after the second."""


class BlockKind(NamedTuple):
    """The kind of a block: a name in ATTENTION and one in FEED_FORWARD, and the window of its attention."""

    attention: str
    feed_forward: str
    window: int = 0
    """Keys that a query sees at most; 0: all of the sequence."""
    rotates: bool = True
    """Whether rotary positions, where the model has them, turn its queries and keys."""
    predicts: bool = False
    """Whether it is that of a module for one more token, with a head and a loss of its own."""
    lends: bool = False
    """Whether later layers attend to its keys and values."""

    @property
    def routed(self) -> bool:
        """Whether it has routed experts."""
        return FEED_FORWARD[self.feed_forward].routed


def chosen_kinds(model: ModelConfig, half: Half) -> tuple[str, ...]:
    """Returns the names of the kinds of one half of a model's blocks, which repeat over its layers."""
    if pattern := getattr(model, half):
        return tuple(pattern.split(","))
    if half == "attention":
        if model.sparse.top_k > 0:
            return ("sparse",)
        if (model.wide.head_dim or model.shared_keys) and not model.mla.kv_rank:
            return model.heads_by_layer
        return ("latent",) if model.mla.kv_rank else ("heads",)
    usual = ("experts",) if model.moe.n_experts else ("dense",)
    return usual * (model.n_layers - model.shared_keys) + ("double",) * model.shared_keys if model.double_mlp else usual


@lru_cache(maxsize=1024)
def model_for(model: ModelConfig, attention: str) -> ModelConfig:
    """Returns the model as layers of a kind of attention see it. The sizes of heads belong to the kind: those of latent
    attention, and wide ones, count in layers alone whose kind needs them."""
    needs, wide = ATTENTION[attention].needs, model.wide
    if model.mla.kv_rank and "mla.kv_rank" not in needs:
        model = replace(model, mla=MLA())
    if not wide.head_dim:
        return model
    if "wide.head_dim" not in needs:
        return replace(model, wide=WideHeads(), values_are_keys=False)
    return replace(model, wide=WideHeads(), head_dim=wide.head_dim, n_kv_heads=wide.n_kv_heads or model.kv_heads)


def attention_models(model: ModelConfig) -> tuple[ModelConfig, ...]:
    """Returns what `model_for` returns for the model's kinds of attention, each once; those in no table are left
    out."""
    names = (name for name in chosen_kinds(model, "attention") if name in ATTENTION)
    return tuple(dict.fromkeys(model_for(model, name) for name in names))


def model_kinds(model: ModelConfig) -> tuple[SublayerKind, ...]:
    """Returns the kinds of a model's sub-layers, each once. Raises KeyError for one that is in no table."""
    return tuple(TABLES[half][name] for half in HALVES for name in dict.fromkeys(chosen_kinds(model, half)))


def untrained(model: ModelConfig) -> list[str]:
    """Returns the parts of a model that are predicted and not trained, each with the field that switches it on; none of
    a model that this program can build."""
    parts = [
        f"{half}={name} ({TABLES[half][name].title})"
        for half in HALVES
        for name in dict.fromkeys(chosen_kinds(model, half))
        if not TABLES[half][name].module
    ]
    fields = [
        (model.activation == "relu2", "activation=relu2"),
        (model.moe.latent, f"moe.latent={model.moe.latent}"),
    ]
    return parts + [text for is_set, text in fields if is_set]


def not_trained(model: ModelConfig) -> str:
    """Returns why a model is predicted and planned but not trained, or nothing."""
    parts = untrained(model)
    return f"model: predicted and planned, not trained or verified: no module here for {', '.join(parts)}" * bool(parts)


@lru_cache(maxsize=1024)
def block_kinds(model: ModelConfig) -> tuple[BlockKind, ...]:
    """Returns the kind of every layer. Raises KeyError for a kind that is in no table."""
    core, wide = chosen_kinds(model, "attention"), chosen_kinds(model, "feed_forward")
    kinds, lending = [], model.key_layers
    for layer in range(model.n_layers):
        window = window_within(model.window_of(layer), model.seq_len)
        turns = model.positions != "rope" or model.rotates(layer)
        kind = BlockKind(model.kind_of(core, layer), model.kind_of(wide, layer), window, turns)
        is_dense = kind.routed and layer < model.moe.n_dense_layers
        kind = kind._replace(predicts=layer >= model.n_layers - model.mtp, lends=layer in lending)
        kinds.append(kind._replace(feed_forward="dense") if is_dense else kind)
    return tuple(kinds)


def block(place: Place, kind: BlockKind) -> tuple[Operator, ...]:
    """Returns the operators of a block in the order of its forward pass."""
    return half_block(place, kind, "attention") + half_block(place, kind, "feed_forward")


def half_block(place: Place, kind: BlockKind, half: Half) -> tuple[Operator, ...]:
    """Returns the operators of one half of a block in the order of its forward pass."""
    together = place.model.parallel_block
    if half == "attention":
        exchange = "enter" if together else "both"
        before = tuple(joined(place)) if kind.predicts else ()
        place = place if kind.rotates else place._replace(model=without_positions(place.model))
        own = _attention_half(place._replace(ep=1, window=kind.window, exchange=exchange), kind.attention)
        return before + (tuple(map(_lending, own)) if kind.lends else own)
    is_first = kind.attention == "none"
    exchange = "leave" if together else "both"
    # Feed-forward layers do not depend on which context ranks form a ring.
    place = place._replace(ring=place.cp, ulysses=1, ring_rank=None, exchange=exchange)
    after = tuple(predicted(place._replace(exchange="both"))) if kind.predicts else ()
    scaled = tuple(rescaled(place)) if place.model.layer_scale else ()
    own = tuple(layer_input(place)) if place.model.layer_embedding else ()
    return _feed_forward_half(place, kind.feed_forward, is_first) + after + own + scaled


def _lending(operator: Operator) -> Operator:
    """Returns an operator of attention whose keys and values later layers read."""
    kept = (each._replace(beyond=True, cheap=0.0) if each.across else each for each in operator.saved)
    return replace(operator, saved=tuple(kept))


@lru_cache(maxsize=1024)
def without_positions(model: ModelConfig) -> ModelConfig:
    """Returns the model as its layers without rotary positions see it."""
    return replace(model, positions="none")


@lru_cache(maxsize=20_000)
def _attention_half(place: Place, attention: str) -> tuple[Operator, ...]:
    operators = ATTENTION[attention].operators(place._replace(model=model_for(place.model, attention)))
    half = _between_norms(place, "attn", operators, first=True)
    return tuple(adapted(place, "attention", half))


@lru_cache(maxsize=20_000)
def _feed_forward_half(place: Place, feed_forward: str, is_first: bool) -> tuple[Operator, ...]:
    kind = FEED_FORWARD[feed_forward]
    half = _between_norms(place, "mlp", kind.operators(place), first=is_first)
    if kind.routed and place.model.moe.own_norms:
        half = map(own_norms, repeat(place), half)
    return tuple(adapted(place, "feed_forward", half))


def _between_norms(place: Place, name: str, operators: Iterator[Operator], *, first: bool) -> Iterator[Operator]:
    """Yields the operators of a half with its norms and, where it ends on the residual stream, the sum; nothing of a
    half without operators."""
    model, half = place.model, tuple(operators)
    if not half:
        return
    if model.parallel_block:
        yield from map(_of_all_tokens, (norm(place, f"{name}_norm", first=first), *half))
        if not first:
            yield from sum_of_halves(place)
        return
    if model.norms_inputs:
        yield norm(place, f"{name}_norm", first=first)
    yield from half
    if model.norms_outputs:
        yield norm(place, f"{name}_post_norm", first=first and not model.norms_inputs)
    yield residual(place, name)


def _of_all_tokens(operator: Operator) -> Operator:
    """Returns an operator of a parallel block, whose tensor ranks compute with all tokens, each for its own heads and
    columns: of a weight that every rank holds, norms' among them, a rank has a part of the gradient."""
    partial = (one._replace(gradient="partial") if one.gradient == "tokens" else one for one in operator.weights)
    return replace(operator, weights=tuple(partial))
