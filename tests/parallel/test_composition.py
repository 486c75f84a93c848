"""Every technique, alone and composed with the others, equals one process in float64 to 1e-9.

The full product of the axes stands behind `make verify`; this is a part of it that covers every technique and every
pair of axes.
"""

import dataclasses
from itertools import cycle

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from covering import WHOLE, also_whole, covering, pairs_of_techniques, ranks_of, techniques_of
from parallel import structures
from parallel.steps import check_bytes, counted_steps, steps, worst
from phalanx.check.job import problems_of
from phalanx.config.job import Job, Optimizer, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig

VOCAB = 13
"""Divides by nothing: the last tensor rank's rows are padded."""
GPT = ModelConfig(n_layers=2, d_model=24, n_heads=4, seq_len=8, bias=True, qkv_bias=True)
LLAMA = dataclasses.replace(structures.LLAMA, dropout=0.2)
MISTRAL = dataclasses.replace(structures.LLAMA, window=3)
MODELS = {"gpt": GPT, "llama": LLAMA, "mistral": MISTRAL, "mistral with dropout": dataclasses.replace(LLAMA, window=3)}
LAYOUTS = [
    Layout(dp_replicate=2, bucket_mb=0.01),
    Layout(dp_replicate=3, accumulation=2),
    Layout(dp_shard=2, zero=1),
    Layout(dp_shard=3, zero=1, bucket_mb=0.004, accumulation=2),
    Layout(dp_shard=2, zero=2, bucket_mb=0.004),
    Layout(dp_shard=3, zero=2, accumulation=2),
    Layout(dp_shard=2, zero=2, accumulation=3, accumulate="sharded", bucket_mb=0.01),
    Layout(dp_shard=2, zero=3),
    Layout(dp_shard=3, zero=3, accumulation=2, prefetch=2),
    Layout(dp_shard=2, zero=3, reshard=False, recompute="selective"),
    Layout(dp_shard=2, zero=3, accumulation=3, accumulate="sharded", prefetch=0),
    Layout(dp_replicate=2, dp_shard=2, zero=1, accumulation=3),
    Layout(dp_replicate=2, dp_shard=2, zero=2, accumulation=3, accumulate="sharded"),
    Layout(dp_replicate=2, dp_shard=2, zero=3, accumulation=3),
    Layout(dp_replicate=2, dp_shard=2, zero=3, accumulation=3, accumulate="sharded"),
    Layout(tp=2),
    Layout(tp=4, loss_chunk=7),
    Layout(tp=2, sp=True),
    Layout(tp=4, sp=True, sp_regather=True),
    Layout(tp=2, sp=True, sp_regather=True, recompute="selective", loss_chunk=5, accumulation=2),
    Layout(tp=2, recompute="full"),
    Layout(tp=2, sp=True, recompute="full", accumulation=2),
    Layout(dp_replicate=2, tp=2, accumulation=2),
    Layout(dp_shard=2, tp=2, zero=1, sp=True),
    Layout(dp_shard=2, tp=2, zero=2, recompute="full"),
    Layout(dp_shard=2, tp=2, zero=3, sp=True, recompute="full", loss_chunk=9),
    Layout(dp_shard=2, tp=4, zero=3, sp=True, sp_regather=True, reshard=False),
    Layout(dp_replicate=2, dp_shard=2, tp=2, zero=1, accumulation=3),
    Layout(dp_replicate=2, dp_shard=2, tp=2, zero=3, sp=True, recompute="selective"),
    Layout(recompute="products", accumulation=2),
    Layout(tp=2, sp=True, sp_regather=True, recompute="products"),
    Layout(dp_shard=2, tp=2, zero=3, sp=True, recompute="products"),
    Layout(recompute="mlp", accumulation=2),
    Layout(tp=2, sp=True, sp_regather=True, recompute="mlp"),
    Layout(dp_shard=2, tp=2, zero=3, sp=True, recompute="mlp"),
    Layout(dp_shard=2, tp=2, zero=3, sp=True, recompute=0.4),
    Layout(pp=2, accumulation=3, schedule="zb_h1", recompute="mlp"),
]
WINDOWED = [
    Layout(recompute="selective", accumulation=2),
    Layout(dp_shard=2, zero=3, recompute="full"),
    Layout(tp=4),
    Layout(tp=2, sp=True, recompute="selective"),
    Layout(pp=2, accumulation=3),
    Layout(pp=2, schedule="terapipe", pp_slices=4, accumulation=2, recompute="full"),
    Layout(pp=2, schedule="terapipe", pp_slices=2, accumulation=2, cp=2, recompute="products"),
    Layout(cp=2),
    Layout(cp=4, recompute="selective"),
    Layout(cp=2, cp_ulysses=2, recompute="full"),
    Layout(cp=4, cp_ulysses=2),
    Layout(cp=2, tp=2, sp=True, recompute="products"),
    Layout(cp=2, cp_ulysses=2, pp=2, accumulation=3, schedule="zb_h1", recompute="products"),
]


def job_of(model: ModelConfig, layout: Layout, global_batch: int = 12) -> Job:
    # Models without dropout have noise on embeddings and smoothed labels.
    train = Train(global_batch=global_batch, precision="fp64")
    if not model.dropout:
        train = dataclasses.replace(train, label_smoothing=0.1, neftune_alpha=5)
    return Job(model=model, layout=layout, train=train, optimizer=Optimizer(clip=0.5))


@pytest.fixture(scope="module")
def reference(ranks):
    """One process, by kind of model."""
    return {kind: ranks(steps, 1, job_of(model, Layout()), VOCAB)[0] for kind, model in MODELS.items()}


def compare_and_check_bytes(ranks, job: Job, expected, count: int = 2, vocab: int = VOCAB) -> None:
    """Compares steps with those of one process, and every byte that a rank sends with the predicted ones."""
    found = ranks(counted_steps, job.layout.processes, job, vocab, count)
    compare([results for results, _, _ in found], expected)
    check_bytes(job, vocab, [(traffic, rows) for _, traffic, rows in found], count=count)


def compare(results, expected) -> None:
    """Losses and norms are the same on all ranks and those of one process, as are the gradients and parameters."""
    shown, gradients, parameters = results[0]
    assert all(result[0] == shown for result in results)
    for found, wanted in zip(shown, expected[0], strict=True):
        assert found == pytest.approx(wanted, rel=1e-9)
    assert worst(gradients, expected[1], 1e-6 * max(float(g.abs().max()) for g in expected[1].values())) < 1e-9
    assert worst(parameters, expected[2], 1e-2) < 1e-9


TABLE = [*(("llama", layout) for layout in LAYOUTS), *(("gpt", layout) for layout in LAYOUTS[::2])]
CASES = pairs_of_techniques(TABLE if WHOLE else zip(cycle(("llama", "gpt")), LAYOUTS, strict=False))


@pytest.mark.parametrize(
    ("kind", "layout"),
    CASES,
    ids=lambda value: value if isinstance(value, str) else value.line(),
)
def test_equals_one_process(ranks, reference, kind, layout):
    compare_and_check_bytes(ranks, job_of(MODELS[kind], layout), reference[kind])


@pytest.mark.parametrize(
    "layout",
    [layout for (layout,) in covering(zip(WINDOWED), techniques_of, size=1, cost=ranks_of)],
    ids=Layout.line,
)
def test_windows_equal_one_process(ranks, reference, layout):
    compare_and_check_bytes(ranks, job_of(MISTRAL, layout), reference["mistral"])


@pytest.mark.parametrize("layout", [WINDOWED[6], *also_whole(WINDOWED[9], WINDOWED[12])], ids=Layout.line)
def test_windows_with_dropout_equal_one_process(ranks, reference, layout):
    job = job_of(MODELS["mistral with dropout"], layout)
    compare_and_check_bytes(ranks, job, reference["mistral with dropout"])


@pytest.mark.parametrize(
    ("precision", "tolerance", "layout"),
    [
        *(("fp32", 2e-5, LAYOUTS[number]) for number in ((0, 2, 4, 7, 15, 17, 25) if WHOLE else (0, 25))),
        *(("bf16", 2e-2, LAYOUTS[number]) for number in ((0, 2, 4, 7, 15, 17, 25) if WHOLE else (2, 4, 7, 17))),
    ],
    ids=lambda value: value.line() if isinstance(value, Layout) else str(value),
)
def test_lower_precisions_stay_close(ranks, reference, precision, tolerance, layout):
    job = job_of(LLAMA, layout)
    job = dataclasses.replace(job, train=dataclasses.replace(job.train, precision=precision))
    shown, _, _ = ranks(steps, layout.world, job, VOCAB)[0]
    for found, wanted in zip(shown, reference["llama"][0], strict=True):
        assert found == pytest.approx(wanted, rel=tolerance)


@pytest.mark.parametrize("layout", [LAYOUTS[number] for number in (0, 10, 23, *also_whole(4))], ids=Layout.line)
def test_gradients_may_be_added_up_in_fp32(ranks, reference, layout):
    job = job_of(LLAMA, layout)
    job = dataclasses.replace(job, train=dataclasses.replace(job.train, precision="bf16", gradients="fp32"))
    shown, _, _ = ranks(steps, layout.world, job, VOCAB)[0]
    for found, wanted in zip(shown, reference["llama"][0], strict=True):
        assert found == pytest.approx(wanted, rel=2e-2)


@st.composite
def small_jobs(draw):
    """Odd shapes under any layout of up to four ranks: legal ones must be right, the others are refused by check."""
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from([2, 4, 6]))
    model = ModelConfig(
        n_layers=draw(st.integers(1, 2)),
        d_model=draw(st.integers(5, 17)),
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim,
        d_ff=draw(st.integers(4, 12)),
        seq_len=draw(st.integers(3, 8)),
        norm=draw(st.sampled_from(["layernorm", "rmsnorm"])),
        positions=draw(st.sampled_from(["learned", "rope"])),
        activation=draw(st.sampled_from(["gelu", "swiglu"])),
        bias=draw(st.booleans()),
        tied=draw(st.booleans()),
    )
    tp = draw(st.sampled_from([1, 2, 3, 4]))
    layout = Layout(
        tp=tp,
        dp_shard=draw(st.sampled_from([n for n in (1, 2, 3, 4) if n * tp <= 4])),
        zero=draw(st.sampled_from([1, 2, 3])),
        sp=tp > 1 and draw(st.booleans()),
        bucket_mb=draw(st.sampled_from([0.0005, 1.0])),
    )
    return job_of(model, layout), draw(st.integers(5, 23))


@settings(
    max_examples=25 if WHOLE else 10,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    derandomize=True,
)
@given(small_jobs())
def test_any_legal_shape_is_right(ranks, drawn):
    job, vocab = drawn
    assume(not problems_of(job))
    expected = ranks(steps, 1, dataclasses.replace(job, layout=Layout()), vocab)[0]
    compare(ranks(steps, job.layout.world, job, vocab), expected)
