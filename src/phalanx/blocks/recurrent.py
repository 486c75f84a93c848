"""Layers whose state is of fixed size: the gated delta net (Yang et al. 2025, arXiv 2412.06464) and Mamba-2 (Dao and Gu
2024, arXiv 2405.21060), which is predicted and not trained.

Sequences pass in chunks: within one tokens meet in small matrix products, between chunks the states pass. The kernels
of flash-linear-attention (fla/ops/gated_delta_rule) and of mamba_ssm (ops/triton/ssd_combined.py) write what they pass
on to memory. The seconds of Mamba-2's are those of the elements that they move and those of their products, which are
far from a device's rate (kernels.SCAN); a delta net's are the longer of the two. Their FLOPs count in a model's
(`FusedProducts`). Tensor ranks hold whole heads, and copies of what heads share if there are fewer.
"""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.blocks.attention import PARTIAL, ROWS
from phalanx.blocks.operator import (
    PLAIN,
    WIDE,
    FusedProducts,
    MemoryBound,
    Message,
    Operator,
    Place,
    SavedTensor,
    Weight,
)
from phalanx.blocks.residual import enter, leave, linear_weights

DELTA_CHUNK = 64
"""Tokens of a chunk of flash-linear-attention's kernels."""
FP32 = 2
"""Elements of 16 bits that a state in fp32 counts as."""


def delta_net(place: Place) -> Iterator[Operator]:
    """Yields the operators of a gated delta net, as Qwen3-Next has it.

    The kernels of a chunk of C tokens, per token and value head with keys of size k and values of size v: products
    k·kᵀ and its inverse T by substitution, w = T·k and u = T·v (section 3.3, the WY form), of states S u − w·S and
    kᵀ·u, and of the output q·S + (q·kᵀ)·u: 2 C (3 k + 2 v) + 2/3 C² + 6 k v FLOPs. They move 7 k + 6 v + 4 C elements
    and 2 k v / C numbers of states forward, 17 k + 15 v + 3 C and 5 k v / C backward."""
    delta, tp, tokens = place.model.delta, place.tp, place.tokens
    keys, values = delta.key_heads * delta.key_head_dim, delta.n_heads * delta.head_dim
    shared = ROWS._replace(unit=delta.key_head_dim)
    yield Operator(
        "states",
        (
            *(shared._replace(name=f"attn.conv_{name}", shape=(keys, delta.conv), initial="adapter") for name in "qk"),
            ROWS._replace(name="attn.conv_v", shape=(values, delta.conv), initial="adapter"),
            ROWS._replace(name="attn.decay", shape=(delta.n_heads,), initial="rates"),
            ROWS._replace(name="attn.dt_bias", shape=(delta.n_heads,), initial="steps"),
        ),
    )
    yield _inputs(
        place,
        (
            *(_matrix(place, f"attn.{name}", keys, shared) for name in ("wq", "wk")),
            *(_matrix(place, f"attn.{name}", values) for name in ("wv", "wz")),
            *(_matrix(place, f"attn.{name}", delta.n_heads) for name in ("wb", "wa")),
        ),
    )
    spread = max(delta.key_heads, tp) * delta.key_head_dim
    convolved = (2 * spread + values) // tp * tokens
    yield Operator(
        "conv",
        memory_bound=(MemoryBound("conv", 2 * convolved, 3 * convolved, 2, cheap=True),),
        saved=(SavedTensor("conv", (2 * spread + values) * place.width, "width"),),
    )
    k, v, chunk = delta.key_head_dim, delta.head_dim, DELTA_CHUNK
    heads = tokens * delta.n_heads // tp
    state = FP32 * k * v / chunk
    flops = heads * (2 * chunk * (3 * k + 2 * v) + 2 * chunk**2 / 3 + 6 * k * v)
    yield Operator(
        "scan",
        messages=tuple(_exchanges(place, 2 * spread, values + 2 * delta.n_heads)),
        fused=FusedProducts(flops, 2 * flops),
        memory_bound=(
            MemoryBound(
                "scan",
                heads * (7 * k + 6 * v + 4 * chunk + 2 * state),
                heads * (17 * k + 15 * v + 3 * chunk + 5 * state),
                kernels=7,
                launches=7,
            ),
        ),
        # Queries, keys and values, normalised queries and keys, the inverse per chunk, gates in fp32.
        saved=(
            SavedTensor(
                "scan",
                (4 * spread + values + delta.n_heads * chunk) * place.width + 2 * WIDE * delta.n_heads,
                "width",
                inside=True,
            ),
        ),
    )
    yield from _gated_output(place, values, norm=delta.head_dim)


def _exchanges(place: Place, keys: int, values: int) -> Iterator[Message]:
    """Yields the exchanges of tokens for heads over the context ranks: of what goes in and what comes out."""
    if place.cp > 1:
        inner, local = place.model.delta, place.tokens / place.tp
        for each in (keys, values, inner.n_heads * inner.head_dim):
            yield Message("cp", "all_to_all", local * each, forward=1, full=1, backward=1)


def mamba(place: Place) -> Iterator[Operator]:
    """Yields the operators of Mamba-2, as Nemotron-H has it.

    The products of a chunk of C tokens (section 6), per token, with H heads of size p, states of size n per element and
    G groups that share B and C: C·Bᵀ, 2 C n G FLOPs, by the inputs, 2 C p H, and the states that a chunk writes and
    those that it reads, 2 n p H each."""
    mixer, tp, tokens = place.model.mamba, place.tp, place.tokens
    inner, shared = mixer.n_heads * mixer.head_dim, mixer.groups * mixer.state
    of_group = ROWS._replace(unit=mixer.state)
    yield _inputs(
        place,
        (
            *(_matrix(place, f"attn.{name}", inner) for name in ("wz", "wx")),
            *(_matrix(place, f"attn.{name}", shared, of_group) for name in ("wb", "wc")),
            _matrix(place, "attn.wdt", mixer.n_heads),
        ),
    )
    spread = max(mixer.groups, tp) * mixer.state
    convolved = (inner + 2 * spread) // tp * tokens
    sizes = (("x", inner, ROWS), ("b", shared, of_group), ("c", shared, of_group))
    yield Operator(
        "conv",
        tuple(
            weight
            for name, size, cut in sizes
            for weight in (
                cut._replace(name=f"attn.conv_{name}", shape=(size, mixer.conv)),
                cut._replace(name=f"attn.conv_{name}_bias", shape=(size,)),
            )
        ),
        memory_bound=(MemoryBound("conv", 2 * convolved, 5 * convolved, 2, cheap=True),),
        # The kernels keep what the matrices wrote, and convolve again in the backward pass.
        saved=(SavedTensor("conv", (inner + 2 * spread + mixer.n_heads) * place.width, "width"),),
    )
    chunk, p, n = mixer.chunk, mixer.head_dim, mixer.state
    heads, groups = tokens * mixer.n_heads // tp, tokens * max(mixer.groups, tp) // tp
    state = FP32 * p * n / chunk
    flops = groups * 2 * chunk * n + heads * (2 * chunk * p + 4 * n * p)
    yield Operator(
        "scan",
        tuple(ROWS._replace(name=f"attn.{name}", shape=(mixer.n_heads,)) for name in ("decay", "dt_bias", "skip")),
        fused=FusedProducts(flops, 2 * flops, chunks=True),
        memory_bound=(
            MemoryBound(
                "scan",
                heads * (4 * p + 4 * state) + groups * (4 * n + 2 * chunk),
                heads * (11 * p + 10 * state) + groups * (9 * n + 4 * chunk),
                kernels=6,
                launches=6,
            ),
        ),
        saved=(SavedTensor("scan", WIDE * mixer.n_heads, "width", inside=True),),
    )
    yield from _gated_output(place, inner)


def _matrix(place: Place, name: str, outputs: int, weight: Weight = ROWS) -> Weight:
    """Returns a matrix that reads the residual stream; these layers have no biases."""
    return linear_weights(name, outputs, place.model.d_model, bias=False, weight=weight)[0]


def _inputs(place: Place, matrices: tuple[Weight, ...]) -> Operator:
    size = place.model.d_model * place.read
    saved = SavedTensor("input", size, "gathered", cheap=place.repeats_input(size))
    return Operator("in", matrices, place.tokens, saved=(saved,), messages=tuple(enter(place, regather=True)))


def _gated_output(place: Place, inner: int, norm: int = 0) -> Iterator[Operator]:
    """Yields the norm of the output, of heads of size `norm` (0: of all on a rank), by a gate, and the output
    projection; `inner` elements per token."""
    numbers, width = place.tokens * inner // place.tp, place.width
    scale = PARTIAL if norm else ROWS
    yield Operator(
        "gated norm",
        (scale._replace(name="attn.norm.weight", shape=(norm or inner,)),),
        memory_bound=(MemoryBound("gated norm", 3 * numbers, 5 * numbers, 4, cheap=True),),
        saved=(SavedTensor("gated norm", 2 * inner * width, "width"),),
    )
    yield Operator(
        "wo",
        linear_weights("attn.wo", place.model.d_model, inner, False, PLAIN._replace(cut="columns")),
        place.tokens,
        saved=(SavedTensor("wo", inner * place.read, "width", cheap=inner * place.read),),
        messages=tuple(leave(place)),
    )
