"""Attention: blocks of keys, windows, scores and kernels, against their formulas."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from model.kinds import ATTENTION_KINDS, KINDS, MOE_AND_MLA, build, tokens
from phalanx.blocks.kinds import block_kinds, model_for
from phalanx.blocks.parameters import parameter_shapes
from phalanx.config.model import ModelConfig, RopeScaling
from phalanx.model import attention_blocks, documents
from phalanx.model import documents as documents_of_batches
from phalanx.model.attention import CoreAttention, Reach, blocked_attention, visible
from phalanx.model.attention_blocks import Scoring, Seen, attend, gradients, kernel_order, kernels_text, ordered_kernels
from phalanx.model.cache import Cache
from phalanx.model.cpu_kernels import SmallProducts
from phalanx.model.documents import Documents
from phalanx.model.seeding import Noise
from phalanx.model.transformer import Transformer
from phalanx.partition import tensor_slices as sequence
from phalanx.partition.tensor_slices import window_blocks
from rehearsed_cuda import CUDA, Rehearsal, rehearsal, values

# Attention over one block of keys: output, log-sum-exp and gradients against the formula, by every back end.


BATCH, HEADS, SIZE = 2, 4, 8
CASES = {  # key heads, queries, keys, size of v's heads, what is seen
    "everything": (4, 6, 6, 8, ""),
    "fewer keys than queries": (4, 12, 6, 8, ""),
    "more keys than queries": (2, 6, 12, 8, ""),
    "causal": (4, 12, 12, 8, "causal"),
    "causal, grouped queries, narrow values": (2, 12, 12, 6, "causal"),
    "wide values": (1, 6, 6, 12, ""),
    "mask of every sample": (2, 6, 9, 8, "mask"),
    "mask that hides all keys of some queries": (2, 6, 9, 8, "holes"),
    "mask that hides a run of many keys": (4, 6, 1200, 8, "late"),
    "mask that hides everything": (4, 6, 6, 6, "nothing"),
    "dropout": (2, 6, 6, 8, "dropout"),
    "causal with dropout": (2, 6, 6, 6, "causal dropout"),
    "mask with holes and dropout": (1, 6, 9, 8, "holes dropout"),
}


def inputs_of(
    kv_heads: int, queries: int, keys: int, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and the output's gradient."""
    torch.manual_seed(1)
    # As projections give them: the heads of a token lie together.
    shapes = [(queries, HEADS, SIZE), (keys, kv_heads, SIZE), (keys, kv_heads, width), (queries, HEADS, width)]
    q, k, v, given = (torch.randn(BATCH, *shape, dtype=torch.float64).to(dtype).transpose(1, 2) for shape in shapes)
    return q, k, v, given


def seen_of(words: str, queries: int, keys: int) -> Seen:
    mask = None
    if {"mask", "holes", "late", "nothing"} & set(words.split()):
        mask = torch.rand(BATCH, 1, queries, keys) < 0.5
        mask[:, :, :, keys - 1] = True
        if "holes" in words:
            mask[:, :, 2:4] = False
        if "late" in words:
            mask[:, :, :, : keys - 20] = False
        if "nothing" in words:
            mask[:] = False
    keep = torch.rand(BATCH, HEADS, queries, keys) < 0.7 if "dropout" in words else None
    return Seen("causal" in words, mask, keep, 1 / 0.7)


def formula(q: Tensor, k: Tensor, v: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) / SIZE**0.5
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool)
    visible = visible.tril() if seen.causal else visible if seen.mask is None else seen.mask
    scores = scores.masked_fill(~visible, -torch.inf)
    probabilities = scores.softmax(-1).where(visible.any(-1, keepdim=True), 0.0)
    return (probabilities if seen.keep is None else probabilities * seen.keep * seen.keep_scale) @ v, scores.logsumexp(
        -1
    )


def check(case: str, dtype: torch.dtype, tolerance: float) -> None:
    kv_heads, queries, keys, width, words = CASES[case]
    q, k, v, given = inputs_of(kv_heads, queries, keys, width, dtype)
    seen = seen_of(words, queries, keys)
    leaf_q, leaf_k, leaf_v = leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected, sums = formula(leaf_q, leaf_k, leaf_v, seen)
    of_inputs = torch.autograd.grad(expected, leaves, given.double())
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)

    o, lse = attend(q, k, v, seen)
    assert o.dtype == dtype
    assert lse.dtype == torch.promote_types(dtype, torch.float32)
    close(o.double(), expected)
    close(lse.double(), sums)
    for found, wanted, x in zip(gradients(given, q, k, v, o, lse, seen), of_inputs, leaves, strict=True):
        assert found.shape == x.shape
        assert found.dtype == dtype
        close(found.double(), wanted.double())


DTYPES = [(torch.float64, 1e-9), (torch.float32, 1e-5), (torch.bfloat16, 4e-2)]


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_block_gives_what_the_formula_gives(case, dtype, tolerance):
    check(case, dtype, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_so_it_does_step_by_step_and_in_runs_of_queries(case, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(attention_blocks, "_fused", lambda *_: False)
    monkeypatch.setattr(attention_blocks, "MOST_SCORES", BATCH * HEADS * 20)
    check(case, dtype, tolerance)


@pytest.mark.parametrize("step_by_step", [False, True], ids=["fused", "step by step"])
def test_gradients_of_blocks_add_up_to_those_of_all_keys(step_by_step, monkeypatch):
    if step_by_step:
        monkeypatch.setattr(attention_blocks, "_fused", lambda *_: False)
    q, k, v, given = inputs_of(2, 6, 12, 6, torch.float64)
    o, lse = attend(q, k, v, Seen())
    whole = gradients(given, q, k, v, o, lse, Seen())
    blocks = [gradients(given, q, k[:, :, part], v[:, :, part], o, lse, Seen()) for part in (slice(0, 4), slice(4, 12))]
    of_q, of_k, of_v = zip(*blocks, strict=True)
    torch.testing.assert_close(sum(of_q), whole[0])
    torch.testing.assert_close(torch.cat(of_k, dim=2), whole[1])
    torch.testing.assert_close(torch.cat(of_v, dim=2), whole[2])


def test_the_cuda_kernels_take_these_arguments():
    """Without a GPU, by their shapes alone."""
    q, k, v, given = (x.to("meta") for x in inputs_of(2, 6, 12, 8, torch.bfloat16))
    o, lse = attention_blocks._cuda_forward(q, k, v, Seen(), 0.3)
    assert (o.shape, lse.shape, lse.dtype) == ((BATCH, HEADS, 6, SIZE), (BATCH, HEADS, 6), torch.float32)
    found = attention_blocks._cuda_backward(given, q, k, v, o, lse, Seen(), 0.3)
    assert [x.shape for x in found] == [x.shape for x in (q, k, v)]


@pytest.mark.parametrize("rows", [1, 6])
def test_so_they_do_with_documents(monkeypatch, rows):
    """In one call, or in several."""
    monkeypatch.setattr(documents, "ROWS_PER_DOCUMENT", rows)
    q, k, v, given = (x.to("meta") for x in inputs_of(2, 12, 12, 8, torch.bfloat16))
    rows_of_documents = documents.Documents(torch.arange(12).expand(BATCH, -1) // 5)
    seen = Seen(causal=True, documents=rows_of_documents.to(torch.device("meta")))
    o, lse = attention_blocks._cuda_forward(q, k, v, seen, 0.3)
    assert (o.shape, lse.shape, lse.dtype) == ((BATCH, HEADS, 12, SIZE), (BATCH, HEADS, 12), torch.float32)
    found = attention_blocks._cuda_backward(given, q, k, v, o, lse, seen, 0.3)
    assert [x.shape for x in found] == [x.shape for x in (q, k, v)]


# Which kernels compute attention on a GPU: by a table, with windows, documents and heads of two sizes.

SEQ, WINDOW = 12, 5
NUMBERS = torch.tensor([[0] * 3 + [1] * 9, [0] * 7 + [1] * 5])


@pytest.mark.parametrize(
    ("capability", "first"), [((8, 0), "FLASH"), ((9, 0), "CUDNN"), ((10, 0), "CUDNN"), ((12, 0), "FLASH")], ids=str
)
def test_the_table_ranks_torch_s_kernels_and_the_log_says_so(monkeypatch, capability, first):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    order = kernel_order(CUDA)
    assert order[0].name == f"{first}_ATTENTION"
    assert order[-1] == SDPBackend.MATH
    assert kernels_text(CUDA).startswith(f"kernels by rank {first.lower()}, ")
    with ordered_kernels(CUDA):
        assert _cur_sdpa_kernel_backends(with_priority=True) == order
    with ordered_kernels(torch.device("cpu")):
        assert set(_cur_sdpa_kernel_backends()) > {SDPBackend.FLASH_ATTENTION, SDPBackend.MATH}


def run(q: Tensor, k: Tensor, v: Tensor, given: Tensor, attend, documents: Documents | None) -> list[Tensor]:
    """The output and the gradients."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, documents)
    return [out.detach(), *torch.autograd.grad(out, leaves, given)]


def check_runs(gpu: Rehearsal, attend, width: int, documents: bool, heads: int = 2) -> None:
    """Compares a GPU in bf16 with a CPU in float64, both from the same numbers."""
    torch.manual_seed(3)
    shapes = [(2, 4, SEQ, 16), (2, heads, SEQ, 16), (2, heads, SEQ, width), (2, 4, SEQ, width)]
    inputs = [torch.randn(shape).bfloat16() for shape in shapes]
    numbers = Documents(NUMBERS) if documents else None
    expected = run(*(x.double() for x in inputs), attend, numbers)
    found = run(*(x.to(CUDA) for x in inputs), attend, numbers and numbers.to(CUDA))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("window", [0, WINDOW], ids=["all keys", "window"])
def test_flash_attention_computes_windows_and_documents_at_once(monkeypatch, window, documents):
    """No mask is made: the kernel gets the window, and the documents as runs of tokens."""
    monkeypatch.setattr(documents_of_batches, "ROWS_PER_DOCUMENT", 1)
    with rehearsal(monkeypatch) as gpu:
        check_runs(gpu, lambda q, k, v, d: blocked_attention(q, k, v, Reach(window, d)), 16, documents)
    assert [name for name, *_ in gpu.launched] == ["_varlen_attn", "_flash_attention_backward"]
    assert gpu.launched[0][1][9] == [window - 1, 0]
    asked = {"window_size_left": window - 1, "window_size_right": 0} if window else {}
    assert {key: value for key, value in gpu.launched[1][2].items() if key.startswith("window")} == asked
    for number, (_, arguments, _) in enumerate(gpu.launched):
        bounds = [values(x).tolist() for x in arguments if isinstance(x, Tensor) and x.dtype == torch.int32]
        whole = [] if number else [[0, 12, 24]] * 2
        assert bounds == ([[0, 3, 12, 19, 24]] * 2 if documents else whole)


@pytest.mark.parametrize(("capability", "pads"), [((8, 0), True), ((9, 0), False)], ids=str)
def test_values_are_padded_for_flash_attention_and_not_for_cudnn(monkeypatch, capability, pads):
    core = CoreAttention(replace(MOE_AND_MLA["deepseek"], seq_len=SEQ), 0)
    with rehearsal(monkeypatch) as gpu:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        check_runs(gpu, lambda q, k, v, d: core(q, k, v, None, d), 8, False, heads=4)
    assert bool(gpu.launched) == pads
    assert all({x.shape[-1] for x in arguments[:3]} == {16} for _, arguments, _ in gpu.launched)


# What model families change inside attention, each against its definition written down naively: windows per layer,
# norms of queries and keys, sinks, scales and caps of scores, partial and scaled rotary positions.

NOISE = Noise(seed=1, step=0, sample_ids=[0, 1])


def naive_attention(
    model: ModelConfig, layer: int, weights: dict[str, Tensor], x: Tensor, rows: Tensor | None
) -> Tensor:
    """One layer's attention by its definition: token by token, head by head, (batch, seq, d_model) to the same."""
    window = model.window if (layer + 1) % (model.full_every or model.n_layers + 1) else 0
    wide = bool(model.wide.head_dim and not window)
    if wide:
        model = replace(model, head_dim=model.wide.head_dim, n_kv_heads=model.wide.n_kv_heads)
    size, group = model.head_size, model.n_heads // model.kv_heads

    def project(name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", torch.zeros(1, dtype=x.dtype))

    q, k, v = (project(name) for name in ("wq", "wk", "wk" if wide and model.values_are_keys else "wv"))
    if model.qk_norm == "width":
        q, k = (normed(x, weights, name, model) for x, name in ((q, "q_norm"), (k, "k_norm")))
    q, k, v = (heads.unflatten(-1, (-1, size)) for heads in (q, k, v))
    if model.qk_norm == "head":
        q, k = (normed(x, weights, name, model) for x, name in ((q, "q_norm"), (k, "k_norm")))
    if model.v_norm:
        v = v / (v.square().mean(-1, keepdim=True) + model.norm_eps).sqrt()
    q, k = turned(q, model, window), turned(k, model, window)
    out = torch.zeros_like(q)
    for b in range(x.shape[0]):
        for head in range(model.n_heads):
            for i in range(x.shape[1]):
                seen = [
                    j
                    for j in range(i + 1)
                    if (not window or i - j < window) and (rows is None or rows[b, j] == rows[b, i])
                ]
                scores = k[b, seen, head // group] @ q[b, i, head] * (model.attention_scale or size**-0.5)
                if model.attention_softcap:
                    scores = model.attention_softcap * torch.tanh(scores / model.attention_softcap)
                weight = scores.exp() / (scores.exp().sum() + (weights["sinks"][head].exp() if model.sinks else 0))
                out[b, i, head] = weight @ v[b, seen, head // group]
    o = out.flatten(2) @ weights["wo.weight"].T
    return o + weights.get("wo.bias", torch.zeros(1, dtype=x.dtype))


def normed(x: Tensor, weights: dict[str, Tensor], name: str, model: ModelConfig) -> Tensor:
    if model.norm == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + model.norm_eps).sqrt() * weights[f"{name}.weight"]
    return x + weights.get(f"{name}.bias", torch.zeros(1, dtype=x.dtype))


def turned(x: Tensor, model: ModelConfig, window: int) -> Tensor:
    """Pair by pair as complex numbers, (batch, seq, heads, size) to the same."""
    size = int(model.head_size * model.rotary_fraction)
    theta, scaling = model.rope_theta, model.rope_scaling
    plain = bool(window and model.window_rope_theta)
    if plain:
        theta = model.window_rope_theta
    out, magnitude = x.clone(), 1.0
    for pair in range(size // 2):
        frequency = theta ** (-2 * pair / size)
        if scaling.kind == "yarn" and scaling.factor > 1 and not plain:
            frequency *= yarn(pair, size, theta, scaling)
            magnitude = scaling.magnitude or 0.1 * math.log(scaling.factor) + 1
        if scaling.kind == "linear" and not plain:
            frequency /= scaling.factor
        if pair >= int(model.rotary_pairs * size / 2) and not plain:
            frequency = 0.0
        z = torch.complex(x[..., pair], x[..., pair + size // 2])
        angle = torch.arange(x.shape[1], dtype=x.dtype) * frequency
        z = z * magnitude * torch.polar(torch.ones_like(angle), angle)[:, None]
        out[..., pair], out[..., pair + size // 2] = z.real, z.imag
    return out


def yarn(pair: int, size: int, theta: float, scaling: RopeScaling) -> float:
    """YaRN's factor of a frequency: 1 for pairs that turn beta_fast times in the original context, 1 / factor for
    those that turn beta_slow times, linear in the pair between them."""

    def pair_with(turns: float) -> float:  # original_seq_len × theta ** (-2 pair / size) = 2 π turns
        return size / 2 * math.log(scaling.original_seq_len / (2 * math.pi * turns), theta)

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    stretched = min(1.0, max(0.0, (pair - low) / (high - low)))
    return 1 - stretched + stretched / scaling.factor


def layers_of(transformer: Transformer, x: Tensor, rows: Tensor | None) -> list[Tensor]:
    """The attention of every layer, each of the same input."""
    positions, found = torch.arange(x.shape[1]), []
    for layer, block in transformer.blocks.items():
        windowed = transformer.config.window_of(int(layer)) > 0
        own = model_for(transformer.config, block_kinds(transformer.config)[int(layer)].attention)
        rotary = transformer.rotary(positions, x.dtype, windowed=windowed, config=own)
        found.append(block.attn(x, rotary, None, None, None if rows is None else Documents(rows)))
    return found


@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_attention_and_its_gradients_by_definition(kind, with_documents):
    model = ATTENTION_KINDS[kind]
    transformer = build(model)
    torch.manual_seed(3)
    x = torch.randn(2, 9, model.d_model, dtype=torch.float64, requires_grad=True)
    rows = (torch.rand(2, 12) < 0.3).cumsum(1) if with_documents else None
    given = torch.randn_like(x)
    for layer, found in enumerate(layers_of(transformer, x, rows)):
        own = dict(transformer.blocks[str(layer)].attn.named_parameters())
        expected = naive_attention(model, layer, own, x, rows)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
        of = [x, *own.values()]
        for name, a, b in zip(
            ("x", *own), torch.autograd.grad(found, of, given), torch.autograd.grad(expected, of, given), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_the_description_names_every_parameter(kind):
    model = ATTENTION_KINDS[kind]
    shapes = {name: tuple(p.shape) for name, p in Transformer(model).named_parameters()}
    assert list(shapes.items()) == list(parameter_shapes(model).items())


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_a_cache_gives_what_the_whole_sequence_gives(kind):
    model = ATTENTION_KINDS[kind]
    transformer, inputs = build(model), tokens(model, 2, 12)
    expected, cache, found = transformer(inputs), Cache(model.seq_len), []
    for start, stop in ((0, 6), (6, 8), *((i, i + 1) for i in range(8, 12))):
        found.append(transformer(inputs[:, start:stop], cache=cache))
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_dropout_of_almost_nothing_is_none(kind):
    """The step by step form of dropout, whose smallest probability drops no element of so few."""
    model = replace(ATTENTION_KINDS[kind], dropout=2**-16)
    transformer, inputs = build(model), tokens(model, 2, 12)
    dropped, plain = (transformer(inputs, noise=noise) for noise in (NOISE, None))
    torch.testing.assert_close(dropped, plain, rtol=1e-3, atol=1e-3)


# Sliding-window attention: which keys a query sees, in one pass, in runs of queries, and one token at a time.

MODELS = {kind: (KINDS | MOE_AND_MLA)[kind] for kind in ("gpt2", "llama", "mixtral", "deepseek")}


def sees(query: int, key: int, window: int) -> bool:
    """The definition, as transformers states it for Mistral."""
    return query - window < key <= query if window else key <= query


@given(st.integers(1, 9), st.integers(0, 9), st.integers(0, 12), st.data())
def test_a_query_sees_the_last_keys_up_to_its_own(seq, earlier, window, data):
    keys = earlier + seq
    rows = st.lists(st.integers(0, 2), min_size=keys, max_size=keys)
    documents = data.draw(st.none() | st.lists(rows, min_size=1, max_size=3))
    places = torch.arange(keys)
    mask = visible(places[earlier:], places, window, None if documents is None else Documents(torch.tensor(documents)))
    if documents is None:
        assert mask.tolist() == [[sees(q, k, window) for k in range(keys)] for q in range(earlier, keys)]
        return
    for row, seen in zip(documents, mask[:, 0].tolist(), strict=True):
        assert seen == [[sees(q, k, window) and row[q] == row[k] for k in range(keys)] for q in range(earlier, keys)]


@given(st.integers(0, 20), st.integers(1, 20), st.integers(0, 20), st.integers(1, 20), st.integers(1, 30))
def test_blocks_hold_every_visible_pair_once(first_query, queries, first_key, keys, window):
    of_q, of_k = range(first_query, first_query + queries), range(first_key, first_key + keys)
    blocks = runs_of_three(of_q, of_k, window)
    held = [(q, k) for rows, columns in blocks for q in rows for k in columns]
    assert len(held) == len(set(held))
    assert (
        {(q, k) for q in of_q for k in of_k if sees(q, k, window)} <= set(held) <= {(q, k) for q in of_q for k in of_k}
    )
    assert all(columns for _, columns in blocks)


def runs_of_three(queries: range, keys: range, window: int) -> list[tuple[range, range]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequence, "LEAST_RUN", 3)
        return list(window_blocks(queries, keys, window))


def test_work_grows_with_the_window():
    """Mistral 7B over 32,768 tokens: a quarter more than its window leaves, an eighth of the square."""
    pairs = sum(len(q) * len(k) for q, k in window_blocks(range(32768), range(32768), 4096))
    assert pairs < 1.26 * 32768 * 4096 < 32768**2 / 6


def plainly(q: Tensor, k: Tensor, v: Tensor, window: int, documents: Tensor | None) -> Tensor:
    """A query after the other, and only what it sees."""
    batch, heads, seq, size = q.shape
    group, keys = heads // k.shape[1], k.shape[2]
    rows = []
    for b, h, i in ((b, h, i) for b in range(batch) for h in range(heads) for i in range(seq)):
        place = keys - seq + i
        seen = [j for j in range(keys) if sees(place, j, window)]
        if documents is not None:
            seen = [j for j in seen if documents[b, j] == documents[b, place]]
        scores = k[b, h // group, seen] @ q[b, h, i] / math.sqrt(size)
        rows.append(scores.softmax(0) @ v[b, h // group, seen])
    return torch.stack(rows).view(batch, heads, seq, v.shape[-1])


@pytest.mark.parametrize("run", [3, 128])
@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize(("seq", "keys", "kv_heads", "width", "window"), [
    (11, 11, 4, 6, 4), (11, 11, 2, 6, 1), (5, 11, 1, 4, 3), (1, 11, 2, 8, 4), (11, 11, 4, 6, 10),
    (11, 11, 2, 6, 0), (5, 11, 1, 4, 0),
])  # fmt: skip
def test_windows_and_their_gradients_by_definition(
    monkeypatch, seq, keys, kv_heads, width, window, with_documents, run
):
    monkeypatch.setattr(sequence, "LEAST_RUN", run)
    monkeypatch.setattr("phalanx.model.attention.whole_run", lambda queries, keys: run)
    torch.manual_seed(1)
    shapes = [(4, seq, 6), (kv_heads, keys, 6), (kv_heads, keys, width), (4, seq, width)]
    *inputs, gradient = (torch.randn(2, *shape, dtype=torch.float64) for shape in shapes)
    documents = (torch.rand(2, keys + 2) < 0.3).cumsum(1) if with_documents else None
    core = CoreAttention(replace(MODELS["llama"], window=window), 0)
    results = []
    for attention in (
        lambda q, k, v: core(q, k, v, None, None if documents is None else Documents(documents)),
        lambda q, k, v: plainly(q, k, v, window, documents),
    ):
        leaves = [x.clone().requires_grad_() for x in inputs]
        o = attention(*leaves)
        results.append([o, *torch.autograd.grad(o, leaves, gradient)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("window", [12, 100])
def test_a_window_over_the_whole_sequence_is_none(kind, dropout, window):
    model, inputs = replace(MODELS[kind], dropout=dropout), tokens(MODELS[kind], 2, 12)
    noise = Noise(seed=1, step=0, sample_ids=[0, 1]) if dropout else None
    assert torch.equal(build(replace(model, window=window))(inputs, noise=noise), build(model)(inputs, noise=noise))


@pytest.mark.parametrize("kind", ["gpt2", "deepseek"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_nothing_before_the_window_has_influence(kind, dropout):
    """Through two layers of windows of 3, a token reaches the four after it."""
    model = replace(MODELS[kind], dropout=dropout, window=3, n_layers=2, moe=MODELS["gpt2"].moe)
    transformer, inputs = build(model), tokens(model, 2, 12)
    noise = Noise(seed=1, step=0, sample_ids=[0, 1]) if dropout else None
    x = transformer.embed(inputs).detach().requires_grad_()
    out = transformer.through(transformer.blocks, x, torch.arange(12), noise, None, None)
    (gradient,) = torch.autograd.grad(out[:, 9].square().sum(), x)
    reached = gradient.abs().sum((0, 2)) > 0
    assert reached.tolist() == [5 <= position <= 9 for position in range(12)]


def test_the_backward_pass_needs_no_more_than_without_a_window(monkeypatch):
    """As the memory model counts it: q, k, v, the output, its log-sum-exp."""
    monkeypatch.setattr(sequence, "LEAST_RUN", 4)

    def saved(window: int) -> int:
        held: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        core = CoreAttention(replace(MODELS["llama"], window=window), 0)
        q, k, v = (torch.randn(2, heads, 64, 8, requires_grad=True) for heads in (4, 2, 2))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            core(q, k, v, None)
        return sum(held.values())

    assert saved(9) == saved(0)


@pytest.mark.parametrize("kind", MODELS)
def test_a_cache_shows_a_token_its_window_alone(kind):
    model = replace(MODELS[kind], window=4)
    transformer, inputs = build(model), tokens(model, 2, 12)
    expected, cache, found = transformer(inputs), Cache(model.seq_len), []
    for start, stop in ((0, 6), (6, 8), *((i, i + 1) for i in range(8, 12))):
        found.append(transformer(inputs[:, start:stop], cache=cache))
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(expected, build(replace(model, window=0))(inputs))


# Heads whose values are narrower or wider than their queries never have whole scores on a CPU.


@pytest.mark.parametrize("width", [4, 12])
def test_unequal_widths_equal_attention_by_whole_scores(width: int) -> None:
    torch.manual_seed(0)
    make = [torch.randn(2, 3, 20, size, dtype=torch.float64, requires_grad=True) for size in (8, 8, width)]
    q, k, v = make
    unseen = torch.ones(20, 20, dtype=torch.bool).triu(1)
    whole = (q @ k.transpose(-2, -1) * 8**-0.5).masked_fill(unseen, float("-inf")).softmax(-1) @ v
    blocked = blocked_attention(q, k, v, Reach(0, None, Scoring()), None)
    given = torch.randn_like(whole)
    torch.testing.assert_close(blocked, whole, rtol=0, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(blocked, make, given), torch.autograd.grad(whole, make, given), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)


class ProductsByTorch(SmallProducts):
    def __init__(self):
        pass

    def multiply(self, out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> None:
        most = max(len(a), len(b))
        for head in range(most):
            result, x, y = (each[head * len(each) // most] for each in (out, a, b))
            result.copy_(result + x @ y if add else x @ y)

    def transpose(self, out: Tensor, x: Tensor) -> None:
        out.copy_(x.mT)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("kind", ["causal", "whole", "mask", "mask of each head"])
@pytest.mark.parametrize("scores", [1, 200, 10**6])
@pytest.mark.parametrize("softcap", [0.0, 0.7])
def test_products_head_by_head_are_attention(monkeypatch, kv_heads, kind, scores, softcap):
    """As oneDNN does, in float64: runs that do not divide the tokens, and a query that sees nothing."""
    for name, value in {
        "LEAST_PRODUCTS": (0, 0),
        "PRODUCT_UNIT": 1,
        "PRODUCT_RUN": 5,
        "PRODUCT_SCORES": scores,
    }.items():
        monkeypatch.setattr(attention_blocks, name, value)
    torch.manual_seed(kv_heads)
    tokens, keys = 13, 13 if kind == "causal" else 17
    q = torch.randn(2, tokens, 4, 6, dtype=torch.float64).transpose(1, 2)
    k = torch.randn(2, keys, kv_heads, 6, dtype=torch.float64).transpose(1, 2)
    v = torch.randn(2, keys, kv_heads, 3, dtype=torch.float64).transpose(1, 2)
    gradient = torch.randn(2, 4, tokens, 3, dtype=torch.float64)
    mask = torch.rand(2, 4 if kind.endswith("head") else 1, tokens, keys) < 0.5
    mask[:, :, 2] = False
    seen = Seen(causal=kind == "causal", mask=mask if kind.startswith("mask") else None)
    plain, own = Scoring(softcap=softcap), Scoring(softcap=softcap, small=ProductsByTorch())
    expected = attend(q, k, v, seen, plain)
    found = attend(q, k, v, seen, own)
    of_inputs = gradients(gradient, q, k, v, *expected, seen, plain)
    found += gradients(gradient, q, k, v, *expected, seen, own)
    for each, other in zip((*expected, *of_inputs), found, strict=True):
        torch.testing.assert_close(other, each, rtol=1e-12, atol=1e-12)
