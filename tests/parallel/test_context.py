"""Context-parallel attention computes what one process does, with equal work on all ranks and no byte too many."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from covering import WHOLE, also_whole
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.model.attention import CoreAttention
from phalanx.model.documents import Documents
from phalanx.model.seeding import Noise, initialise
from phalanx.model.transformer import Transformer
from phalanx.parallel import ring
from phalanx.parallel.context import SplitSequences, connect
from phalanx.parallel.mesh import Mesh, build
from phalanx.parallel.recompute import recompute
from phalanx.parallel.ring import zigzag
from phalanx.partition import tensor_slices as sequence
from phalanx.partition.documents import RingBlock, assign, keys_seen, mostly_whole, whole_documents
from phalanx.partition.tensor_slices import cp_coordinates, rank_positions, rank_share, ring_positions
from rehearsed_cuda import CUDA, rehearsal

HEADS, SIZE, SEQ, BATCH = 8, 4, 48, 2
CPU = torch.device("cpu")


@dataclass(frozen=True)
class StepSpec:
    """What is computed: the last of `slices` parts of sequences."""

    kv_heads: int = 8
    width: int = SIZE
    documents: bool = False
    cut: Literal["position", "chunks", "ring", "rank"] = "position"
    """What ranks hold of documents; `ring` and `rank`: whole ones at each position of the ring, or on each rank."""
    dropout: float = 0.0
    slices: int = 1
    window: int = 0
    run: int = 128
    """Fewest queries of a window that are computed at once."""
    later: bool = False
    """Slices of which a further one is to come."""
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-9
    """Of the largest value."""


CASES = [
    StepSpec(),
    StepSpec(kv_heads=2, width=6),
    StepSpec(kv_heads=1, documents=True),
    StepSpec(kv_heads=4, dropout=0.3),
    StepSpec(documents=True, dropout=0.3, width=2),
    StepSpec(kv_heads=2, slices=3, width=6),
    StepSpec(slices=1, later=True, dropout=0.3),
    StepSpec(kv_heads=4, slices=2, later=True, dropout=0.3, documents=True),
    StepSpec(slices=2, documents=True),
    StepSpec(window=2),
    StepSpec(window=5, kv_heads=2, width=6),
    StepSpec(window=5, run=2, documents=True, kv_heads=1),
    StepSpec(window=17, run=4, dropout=0.3, kv_heads=4),
    StepSpec(window=30, slices=3, run=5, width=6),
    StepSpec(window=70, slices=2, run=3, documents=True, dropout=0.3, later=True),
    StepSpec(window=SEQ),
    StepSpec(window=9, dtype=torch.float32, tolerance=2e-5),
    StepSpec(dtype=torch.float32, tolerance=2e-5),
    StepSpec(kv_heads=2, dtype=torch.bfloat16, tolerance=1e-2),
    StepSpec(kv_heads=2, documents=True, dropout=0.3, dtype=torch.bfloat16, tolerance=3e-2),
]
LAYOUTS = [
    Layout(cp=2),
    Layout(cp=2, cp_ulysses=2),
    Layout(cp=4),
    Layout(cp=4, cp_ulysses=4),
    Layout(cp=4, cp_ulysses=2),
    Layout(cp=4, cp_ulysses=2, cp_inner="ring"),
]


def core_of(case: StepSpec) -> CoreAttention:
    return CoreAttention(ModelConfig(n_heads=HEADS, d_model=HEADS * SIZE, dropout=case.dropout, window=case.window), 3)


def connected(core: CoreAttention, layout: Layout, mesh: Mesh) -> nn.Module:
    """The attention core of a rank with a share of every sequence."""
    layers = nn.ModuleList([core])
    connect(layers, mesh, layout)
    return layers[0]


def inputs_of(case: StepSpec) -> tuple[list[Tensor], Tensor, Documents | None]:
    """Queries of the last slice, keys, values and the output's gradient of one process; documents."""
    torch.manual_seed(2)
    slice_len, keys = SEQ, SEQ * case.slices
    shapes = [(HEADS, slice_len, SIZE), (case.kv_heads, keys, SIZE), (case.kv_heads, keys, case.width)]
    *inputs, gradient = (
        torch.randn(BATCH, *s, dtype=torch.float64).to(case.dtype) for s in (*shapes, (HEADS, slice_len, case.width))
    )
    whole = keys + SEQ * case.later
    # One sequence of few documents, one of many: some blocks see all, some nothing.
    ends = torch.tensor([[0.02, 0.6], [0.3, 0.3]]).repeat_interleave(whole // 2, dim=1)
    documents = Documents((torch.rand(BATCH, whole) < ends).cumsum(dim=1)) if case.documents else None
    return inputs, gradient, documents


def noise_of(case: StepSpec, positions: Tensor | None) -> Noise | None:
    if case.dropout == 0:
        return None
    noise = Noise(seed=4, step=5, sample_ids=(6, 9))
    if positions is None:
        return noise
    return replace(noise, places=positions, seq_len=SEQ * (case.slices + case.later))


def attention(core: CoreAttention, inputs: list[Tensor], gradient: Tensor, *rest: Any) -> list[Tensor]:
    """Output and gradients."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    o = core(*leaves, *rest)
    return [o.detach(), *torch.autograd.grad(o, leaves, gradient)]


def here(layout: Layout, rank: int, slices: int) -> Tensor:
    """Positions that a rank holds of the sequences so far."""
    return torch.cat([torch.arange(run.start, run.stop) for run in rank_positions(layout, SEQ * slices, rank, slices)])


def by_cost(
    documents: Documents | None, layout: Layout, window: int, rank: int = 0, cut: str | None = "chunks"
) -> Documents:
    """The same documents with the places of a ring that follow from them."""
    assert documents is not None
    host = documents.numbers.numpy()
    seen = keys_seen(host, replace(MODEL, window=window))
    places = (assign(seen, layout.ring) if cut == "chunks" else mostly_whole(host, seen, layout.ring)).places
    return Documents(documents.numbers, places, host, cp_coordinates(layout, rank)[0])


LENGTHS = 2, 9, 1, 3, 5, 1, 2, 10, 3, 6, 6
"""Of documents that fill up to four ranks."""


def in_whole(layout: Layout, level: str, rank: int) -> Documents:
    """Documents that are whole on a rank, or at a position of the ring."""
    begins = np.zeros((BATCH, SEQ), int)
    begins[:, np.cumsum(LENGTHS)[:-1]] = 1
    begins[1, 28] = 1  # sequences are cut where all of them begin a document
    host = begins.cumsum(1)
    found = whole_documents(host, keys_seen(host, MODEL), layout.cp if level == "rank" else layout.ring)
    assert found is not None
    place = rank if level == "rank" else cp_coordinates(layout, rank)[0]
    return Documents(torch.from_numpy(host), found.places, host, place)


@mock.patch.object(sequence, "LEAST_RUN", sequence.LEAST_RUN)
def all_cases(ranks: Any, layout: Layout, cases: list[StepSpec] = CASES, device: torch.device = CPU) -> list[str]:
    mesh = build(layout, device.type)
    wrong = []
    cuts = ("chunks", "mostly whole", "ring", "rank") if layout.ring > 1 else ("rank",)
    packed = [case for case in cases if case.documents and case.slices == 1]
    for case in [*cases, *(replace(case, cut=cut) for case in packed for cut in cuts)]:
        sequence.LEAST_RUN = case.run  # until the end of the call
        inputs, gradient, documents = inputs_of(case)
        if case.cut in ("ring", "rank"):
            documents = in_whole(layout, case.cut, ranks.rank)
        first = SEQ * (case.slices - 1)
        whole = torch.arange(first, first + SEQ) if case.slices > 1 or case.later else None
        exact = [x.double() for x in inputs]
        expected = attention(core_of(case), exact, gradient.double(), noise_of(case, whole), documents)

        keys = here(layout, ranks.rank, case.slices)
        if case.cut in ("chunks", "mostly whole"):
            documents = by_cost(documents, layout, case.window, ranks.rank, case.cut)
        if documents is not None and documents.places:
            runs = documents.places[documents.place]
            runs = runs if case.cut == "rank" else rank_share(layout, runs, ranks.rank)
            keys = torch.cat([torch.arange(run.start, run.stop) for run in runs])
        queries = keys[-SEQ // layout.cp :]
        core = connected(core_of(case), layout, mesh)
        mine = [inputs[0][:, :, queries - first], inputs[1][:, :, keys], inputs[2][:, :, keys]]
        of_queries, of_keys = queries - first, keys
        mine, given = [x.to(device) for x in mine], gradient[:, :, of_queries].to(device)
        there = documents and documents.to(device)
        found = [x.cpu() for x in attention(core, mine, given, noise_of(case, queries), there)]
        for name, x, y, part in zip(
            ("o", "dq", "dk", "dv"), found, expected, (of_queries, of_queries, of_keys, of_keys), strict=True
        ):
            error = float((x - y[:, :, part]).abs().max() / y.abs().max())
            if not error <= case.tolerance or x.dtype != case.dtype:
                wrong.append(f"{name} of {case}: {error}")
    return wrong


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.line)
def test_attention_and_its_gradients_are_those_of_one_process(ranks, layout):
    """Layouts on four ranks share the cases: those on two have all."""
    number = LAYOUTS.index(layout)
    for wrong in ranks(all_cases, layout.world, layout, CASES if WHOLE or number < 2 else CASES[number % 2 :: 2]):
        assert not wrong, "\n".join(wrong)


ON_A_GPU = [
    StepSpec(window=window, run=run, kv_heads=2, documents=documents, dtype=torch.bfloat16, tolerance=3e-2)
    for window, run in ((5, 2), (17, 4), (30, 128))
    for documents in ((False, True) if run == 2 or (WHOLE and run != 4) else (False,))
]


def cases_on_a_gpu(ranks: Any, layout: Layout, documents: bool) -> tuple[list[str], int]:
    """And the number of masks that were made."""
    masks = list[Any]()
    visible = ring.visible
    with pytest.MonkeyPatch.context() as patch, rehearsal(patch):
        patch.setattr(ring, "visible", lambda *given: masks.append(given) or visible(*given))
        cases = [case for case in ON_A_GPU if case.documents == documents]
        return all_cases(ranks, layout, cases, CUDA), len(masks)


@pytest.mark.parametrize(
    ("layout", "documents"),
    [
        *((layout, False) for layout in LAYOUTS[1:3]),
        (LAYOUTS[0], True),
        *also_whole((LAYOUTS[0], False), *((layout, True) for layout in LAYOUTS[1:3])),
    ],
    ids=lambda value: value.line() if isinstance(value, Layout) else "documents" if value else "one document",
)
def test_flash_attention_computes_the_ends_of_windows_on_a_ring(ranks, layout, documents):
    """In half precision on a GPU, whose kernels stand here as formulas, no window takes a mask."""
    for wrong, masks in ranks(cases_on_a_gpu, layout.world, layout, documents):
        assert not wrong, "\n".join(wrong)
        assert documents or not masks


MODEL = ModelConfig(
    n_layers=2, d_model=HEADS * SIZE, n_heads=HEADS, n_kv_heads=2, seq_len=SEQ, positions="rope", dropout=0.2
)


def transformer() -> Transformer:
    model = Transformer(MODEL, 13).double()
    initialise(model, MODEL, 1)
    return model


def a_whole_model(ranks: Any, layout: Layout, recomputed: bool) -> None:
    mesh = build(layout, "cpu")
    tokens = torch.arange(BATCH * SEQ).mul(7).remainder(13).view(BATCH, SEQ)
    documents = Documents(torch.arange(SEQ).div(20, rounding_mode="floor").expand(BATCH, -1))
    noise = Noise(3, 4, (5, 6))
    model, alone = transformer(), transformer()
    connect(model, mesh, layout)
    if recomputed:
        recompute(model, Layout(recompute="selective"))
    mine = here(layout, ranks.rank, 1)
    part = replace(noise, places=mine, seq_len=SEQ)
    expected = alone(tokens, noise=noise, documents=documents)
    found = model(tokens[:, mine], noise=part, positions=mine, documents=documents)
    torch.testing.assert_close(found, expected[:, mine], rtol=1e-9, atol=1e-9)
    (expected**2).sum().backward()
    (found**2).sum().backward()
    of_one = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        total = parameter.grad.clone()
        mesh.axis("cp").all_reduce(total).wait()
        torch.testing.assert_close(total, of_one[name].grad, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        found, expected = model(tokens[:, mine], positions=mine), alone(tokens)
        torch.testing.assert_close(found, expected[:, mine], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("layout", "recomputed"),
    [(Layout(cp=2), True), (Layout(cp=2, cp_ulysses=2), True), (Layout(cp=4, cp_ulysses=2), False)],
    ids=lambda x: x.line() if isinstance(x, Layout) else str(x),
)
def test_a_whole_model_computes_what_one_process_does(ranks, layout, recomputed):
    ranks(a_whole_model, layout.world, layout, recomputed)


def with_tensor_parts(ranks: Any, layout: Layout) -> None:
    """The heads of one tensor rank: dropout meets the masks of these."""
    case = StepSpec(dropout=0.3)
    mesh = build(layout, "cpu")
    inputs, gradient, _ = inputs_of(case)
    expected = attention(core_of(case), inputs, gradient, noise_of(case, None), None)
    mine, half = here(layout, ranks.rank, 1), slice(HEADS // 2, HEADS)
    core = connected(core_of(case), layout, mesh)
    noise = noise_of(case, mine)
    assert noise is not None
    found = attention(
        core, [x[:, half, mine] for x in inputs], gradient[:, half, mine], replace(noise, heads=(1, 2)), None
    )
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y[:, half, mine], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=Layout.line)
def test_a_part_of_the_heads_meets_its_own_dropout_masks(ranks, layout):
    ranks(with_tensor_parts, layout.world, layout)


def sent_by_a_layer(
    ranks: Any, layout: Layout, kv_heads: int, window: int, cut: str = "position"
) -> tuple[dict[str, tuple[int, float]], ...]:
    mesh = build(layout, "cpu")
    tokens = SEQ // layout.cp
    shapes = [(HEADS, SIZE), (kv_heads, SIZE), (kv_heads, 6)]
    q, k, v = (torch.randn(BATCH, heads, tokens, size, requires_grad=True) for heads, size in shapes)
    core = connected(core_of(StepSpec(window=window)), layout, mesh)
    documents = in_whole(layout, cut, ranks.rank) if cut in ("ring", "rank") else None
    if cut == "chunks":
        documents = by_cost(inputs_of(StepSpec(documents=True))[2], layout, window, ranks.rank)
    o = core(q, k, v, None, documents)
    forward = {name: (e.calls, e.sent) for (_, name), e in mesh.ledger.entries.items()}
    mesh.ledger.clear()
    o.sum().backward()
    return forward, {name: (e.calls, e.sent) for (_, name), e in mesh.ledger.entries.items()}


def keys_and_values(layout: Layout, kv_heads: int) -> tuple[int, int]:
    """Key/value heads of a rank after Ulysses, and the bytes of the keys and values of one token."""
    heads = max(kv_heads, layout.cp_ulysses) // layout.cp_ulysses
    return heads, BATCH * heads * (SIZE + 6) * 4


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.line)
def test_a_layer_sends_what_it_should(ranks, layout):
    kv_heads, (ulysses, places_of_ring) = 2, (layout.cp_ulysses, layout.ring)
    per_head = BATCH * SEQ // layout.cp * 4
    repeated = max(kv_heads, ulysses)
    forward, backward = {}, {}
    if ulysses > 1:  # q, k, v and o: all but this rank's part of each
        sizes = HEADS * SIZE + repeated * SIZE + repeated * 6 + HEADS * 6
        forward["all_to_all"] = backward["all_to_all"] = (4, per_head * sizes * (ulysses - 1) / ulysses)
    if places_of_ring > 1:  # keys and values of this place of the ring, of the heads that are here
        of_place = SEQ // places_of_ring * keys_and_values(layout, kv_heads)[1]
        hops = places_of_ring - 1
        forward["send"] = hops, hops * of_place
        backward["send"] = 2 * hops, 2 * hops * of_place
    for found in ranks(sent_by_a_layer, layout.world, layout, kv_heads, 0):
        assert found == (forward, backward)
    if places_of_ring > 1:  # whole documents at each position leave what its ranks exchange, and on each rank nothing
        del forward["send"], backward["send"]
        assert ranks(sent_by_a_layer, layout.world, layout, kv_heads, 0, "ring")[0] == (forward, backward)
    assert ranks(sent_by_a_layer, layout.world, layout, kv_heads, 0, "rank") == [({}, {})] * layout.world


def seen_by(layout: Layout, window: int, cut: bool) -> dict[tuple[int, int], int]:
    """Keys of one place of the ring that some query of another sees, by both."""
    documents = by_cost(inputs_of(StepSpec(documents=True))[2], layout, window) if cut else None
    places = documents.places if documents else [ring_positions(layout, SEQ, place) for place in range(layout.ring)]
    held, rows = (
        [[p for run in runs for p in run] for runs in places],
        None if documents is None else documents.numbers.T,
    )

    def sees(query: int, key: int) -> bool:
        return key <= query < key + (window or SEQ) and (rows is None or bool((rows[query] == rows[key]).any()))

    return {
        (a, b): sum(any(sees(query, key) for query in held[b]) for key in held[a])
        for a in range(layout.ring)
        for b in range(layout.ring)
        if a != b
    }


ON_RINGS = [
    *product([Layout(cp=4)], [(1, False), (7, False), (30, False), (0, True), (5, True)]),
    *product([Layout(cp=2), Layout(cp=4, cp_ulysses=2)], [(7, False), (5, True)]),
    *also_whole(*product([Layout(cp=2), Layout(cp=4, cp_ulysses=2)], [(1, False), (30, False), (0, True)])),
    *also_whole(*product([Layout(cp=2), Layout(cp=4)], [(2, False), (5, False), (13, False)])),
]


@pytest.mark.parametrize(
    ("layout", "window", "cut"),
    [(layout, *rest) for layout, rest in ON_RINGS],
    ids=lambda value: value.line() if isinstance(value, Layout) else str(value),
)
def test_with_a_window_or_documents_only_keys_that_another_place_sees_are_sent(ranks, layout, window, cut):
    seen, (_, each) = seen_by(layout, window, cut), keys_and_values(layout, 2)
    given = layout, 2, window, "chunks" if cut else "position"
    for rank, (forward, backward) in enumerate(ranks(sent_by_a_layer, layout.world, *given)):
        place, _ = cp_coordinates(layout, rank)
        sent = [keys for (of, to), keys in seen.items() if of == place and keys]
        received = [keys for (of, to), keys in seen.items() if to == place and keys]
        assert forward.get("send", (0, 0)) == (len(sent), sum(sent) * each)
        # Once more, and the gradients of the keys that this place got.
        back = len(sent) + len(received), (sum(sent) + sum(received)) * each
        assert backward.get("send", (0, 0)) == back


def pairs_of(ranks: Any, layout: Layout, slices: int, window: int = 0) -> tuple[int, int]:
    """Pairs of queries and keys that attention looks at, forward and backward."""
    found = {"forward": 0, "backward": 0}
    attend, gradients = ring.attend, ring.gradients

    def counted(name: str, of: Any) -> Any:
        def run(*inputs: Any) -> Any:
            q, k = inputs[:2] if name == "forward" else inputs[1:3]
            queries, keys = q.shape[2], k.shape[2]
            found[name] += queries * (queries + 1) // 2 if inputs[-2].causal else queries * keys
            return of(*inputs)

        return run

    ring.attend, ring.gradients = counted("forward", attend), counted("backward", gradients)
    try:
        case = StepSpec(slices=slices, window=window)
        inputs = inputs_of(case)[0]
        core = connected(core_of(case), layout, build(layout, "cpu"))
        keys = here(layout, ranks.rank, slices)
        queries = torch.arange(SEQ // layout.cp)
        parts = [x[:, :, of].requires_grad_() for x, of in zip(inputs, (queries, keys, keys), strict=True)]
        core(*parts, None).sum().backward()
    finally:
        ring.attend, ring.gradients = attend, gradients
    return found["forward"], found["backward"]


@pytest.mark.parametrize("slices", [1, 2])
def test_all_ranks_look_at_as_many_pairs(ranks, slices):
    layout = Layout(cp=4)
    counts = ranks(pairs_of, 4, layout, slices)
    assert len(set(counts)) == 1
    every = SEQ * (SEQ + 1) // 2 + SEQ * SEQ * (slices - 1)
    assert sum(forward for forward, _ in counts) == every
    assert counts[0][0] == counts[0][1]
    # Shares in a row would not be equal: the last rank's queries see almost all keys, the first one's few.
    share = SEQ // layout.cp
    in_a_row = [sum(1 + position for position in range(rank * share, (rank + 1) * share)) for rank in range(4)]
    assert in_a_row[-1] > 6 * in_a_row[0]


@pytest.mark.parametrize("window", [1, 7, 13, 40, *also_whole(4, 8)])
def test_a_ring_leaves_out_what_no_window_reaches(ranks, window):
    """The ring computes only the rows and columns of each pair of chunks in which some query sees a key."""
    counts, chunk, every = ranks(pairs_of, 4, Layout(cp=4), 1, window), SEQ // 8, 0
    starts = range(0, SEQ, chunk)
    for pairs in ([(q, k) for q in range(a, a + chunk) for k in range(b, b + chunk)] for a in starts for b in starts):
        seen = [(q, k) for q, k in pairs if q - window < k <= q]
        if seen and len(seen) == chunk * (chunk + 1) // 2 and seen[0][0] == seen[0][1]:
            every += len(seen)  # all that a causal mask leaves, which needs no other mask
        else:
            every += len({q for q, _ in seen}) * len({k for _, k in seen})
    assert sum(forward for forward, _ in counts) == every
    assert all(forward == backward for forward, backward in counts)


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 3), st.data())
def test_blocks_cover_every_visible_pair_once(places_of_ring, chunk, slices, data):
    """Every key that a query sees, and no other, by the positions of both."""
    layout = Layout(cp=places_of_ring)
    tokens, whole = 2 * chunk, 2 * chunk * places_of_ring
    place = data.draw(st.integers(0, places_of_ring - 1))
    queries = _positions(layout, place, whole, slices)[-tokens:]
    found = []
    for source in range(places_of_ring):
        keys = _positions(layout, source, whole, slices)
        for block in zigzag(place, source, tokens, (slices - 1) * tokens):
            found += _pairs(block, queries, keys)
    expected = [(query, key) for query in queries for key in range(query + 1)]
    assert sorted(found) == sorted(expected)


def _positions(layout: Layout, place: int, whole: int, slices: int) -> list[int]:
    runs = ring_positions(layout, whole, place) if layout.ring > 1 else [range(whole)]
    return [start * whole + position for start in range(slices) for run in runs for position in run]


def _pairs(block: RingBlock, queries: list[int], keys: list[int]) -> list[tuple[int, int]]:
    rows, columns = queries[block.queries], keys[block.keys]
    return [(q, k) for i, q in enumerate(rows) for j, k in enumerate(columns) if j <= i or not block.causal]


def whole_and_mine(ranks: Any, layout: Layout) -> None:
    mesh = build(layout, "cpu")
    sequences = SplitSequences(layout, mesh.axis("cp"))
    mine = here(layout, ranks.rank, 1)
    for whole in (torch.arange(BATCH * SEQ * 3).view(BATCH, SEQ, 3), torch.arange(BATCH * SEQ).sin().view(BATCH, SEQ)):
        torch.testing.assert_close(sequences.whole(whole[:, mine]), whole)
        torch.testing.assert_close(sequences.mine(whole), whole[:, mine])
    # No matter how it lies in memory, and without a change to what is given.
    counts = torch.arange(6.0).view(2, 3).t() * (1 + ranks.rank)
    before = counts.clone()
    torch.testing.assert_close(sequences.sum(counts), torch.arange(6.0).view(2, 3).t() * 10)
    torch.testing.assert_close(counts, before)


@pytest.mark.parametrize("layout", LAYOUTS[2:], ids=Layout.line)
def test_sequences_are_put_together_and_taken_apart_by_position(ranks, layout):
    ranks(whole_and_mine, 4, layout)
    assert sorted(cp_coordinates(layout, rank) for rank in range(4)) == [
        (i, j) for i in range(layout.ring) for j in range(layout.cp_ulysses)
    ]
