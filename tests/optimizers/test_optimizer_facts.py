"""The facts of optimizers: their sums, their refusal where they are wrong, and matrices that no layout cuts."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.blocks.parameters import parameter_shapes
from phalanx.check.job import problems_of
from phalanx.config.constraints import Interval
from phalanx.config.job import Job, Optimizer, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.config.presets import PRESETS
from phalanx.errors import ExtensionError, JobError
from phalanx.optimizers.catalogue import (
    OPTIMIZERS,
    _costs_of_one,
    entry_of,
    extra_options,
    kinds,
    optimizer_costs,
    state_bytes_of,
)
from phalanx.optimizers.entry import (
    BLOCK,
    ROW_PARTS,
    ExtraOption,
    StateKind,
    block_of,
    is_hidden_matrix,
    matrix_elements,
    newton_schulz_flops,
    problems,
)
from phalanx.partition.matrices import granular_cut
from train.runs import optimizer_of

# The facts of optimizers: their sums, their refusal where they are wrong, and blocks that no layout cuts.


GPT = ModelConfig(n_layers=2, d_model=128, n_heads=4, seq_len=16, vocab_size=50)
ADAMW = OPTIMIZERS["adamw"]


@pytest.mark.parametrize(
    ("name", "state"),
    [("adamw", (16, 8, 12)), ("sgd", (8, 4, 8)), ("lion", (8, 4, 8)), ("adamw state=8bit", (2.06, 2.03, 6.03))],
)
def test_state_per_parameter(name, state):
    """In fp64, fp32 and bf16, whose fp32 copies are a part of it."""
    for width, expected in zip((8, 4, 2), state, strict=True):
        found = optimizer_costs(optimizer_of(name), PRESETS["llama3-8b"], width).state
        assert found == pytest.approx(expected, rel=0.03)


def test_sgd_without_momentum_keeps_nothing():
    costs = optimizer_costs(Optimizer(name="sgd", momentum=0.0), GPT, 4)
    assert (costs.state, costs.moved) == (0, 12)


@pytest.mark.parametrize(("shape", "moved"), [((512, 2048), 296), ((384, 384), 352), ((300, 300), 28), ((2048,), 28)])
def test_what_8_bit_moments_move_depends_on_their_blocks(shape: tuple[int, ...], moved: float):
    """Blocks have 256 elements, or 16, whose largest is searched one by one; others keep moments in full precision."""
    assert _costs_of_one(Optimizer(state="8bit"), "w", shape, 4).moved == moved


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_projects_own_entries_pass_the_check_of_others(name):
    assert not list(problems(name, OPTIMIZERS[name]))
    names = kinds(Optimizer(name=name), parameter_shapes(GPT, 50))
    assert len(set(names)) == len(names) > 0


def test_the_mean_over_a_model_is_the_sum_over_its_parameters():
    config = Optimizer(state="8bit")
    shapes = parameter_shapes(GPT, 50)
    total = sum(state_bytes_of(config, name, whole, prod(whole), 2) for name, whole in shapes.items())
    mean = optimizer_costs(config, GPT, 2).state
    assert mean * sum(map(prod, shapes.values())) == pytest.approx(total)


@given(st.integers(1, 40_000), st.integers(1, 40_000))
def test_blocks_lie_within_the_rows_of_every_tensor_rank(rows, columns):
    if block := block_of((rows, columns)):
        assert BLOCK % block == 0
        for ranks in (2, 3, 4, 6, ROW_PARTS):
            if columns % ranks == 0:
                assert columns // ranks % block == 0


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=12), st.integers(1, 9))
def test_buckets_for_blocks_are_cut_between_blocks(sizes, ranks):
    starts, each = granular_cut("block", sizes, [("w", (1, 1))] * len(sizes), ranks)
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    assert ends[-1] <= each * ranks
    if ranks > 1:
        assert each % BLOCK == 0
        assert all(start % BLOCK == 0 for start in starts)


def test_blocks_that_tensor_ranks_would_cut_are_refused():
    job = Job(model=PRESETS["llama3-8b"], layout=Layout(tp=16), optimizer=Optimizer(state="8bit"))
    found = [message for path, message in problems_of(job) if path == "layout.tp" and "scale" in message]
    assert found == [
        "the optimizer's state has a scale per 256 elements of a row, and tp 16 cuts the rows of "
        "blocks.0.mlp.down.weight (14336) into parts of 896; nearest tp: 7, 8, 14, or optimizer.state=bf16"
    ]


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (Optimizer(name="adam"), "no optimizer 'adam'; did you mean adamw?"),
        (Optimizer(momentum=0.5), "adamw does not read it, sgd and muon do; its own options: betas, eps, state"),
        (Optimizer(name="lion", nesterov=True), "lion does not read it"),
        (Optimizer(name="sgd", betas=(0.8, 0.9)), "sgd does not read it"),
        (Optimizer(name="sgd", nesterov=True, momentum=0.0), "Nesterov's momentum needs a momentum above 0"),
        (Optimizer(options="rho=1"), "adamw has no option rho (known: none)"),
        (Optimizer(options="rho"), "'rho' is not name=number"),
    ],
)
def test_wrong_options_are_refused(optimizer, message):
    found = [text for _, text in problems_of(Job(model=GPT, optimizer=optimizer, train=Train(global_batch=4)))]
    assert len(found) == 1
    assert message in found[0]


def test_an_unknown_optimizer_is_one_message():
    with pytest.raises(JobError, match="did you mean lion"):
        entry_of("lio")


def test_extra_options_have_defaults_and_ranges(monkeypatch):
    options = {
        "rho": ExtraOption(0.04, "its strength", Interval(above=0)),
        "period": ExtraOption(10, "steps between updates"),
    }
    monkeypatch.setitem(OPTIMIZERS._entries, "other", replace(ADAMW, extra_options=options))
    assert extra_options(Optimizer(name="other", options="rho=0.1")) == {"rho": 0.1, "period": 10}
    with pytest.raises(ValueError, match="rho must be above 0, is -1.0; other has no option perod; did you mean"):
        extra_options(Optimizer(name="other", options="rho=-1,perod=3"))


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"title": ""}, "title"),
        ({"rule": "nowhere"}, "rule must be a function, or its place"),
        ({"granularity": "row"}, "granularity must be one of"),
        ({"options": ("rho",)}, "optimizer has no field rho"),
        ({"state": lambda config, name, shape: (StateKind("master"),)}, "kinds of state need names of their own"),
        ({"state": lambda config, name, shape: (StateKind("m", bytes=-1),)}, "bytes of at least 0"),
        ({"moved": lambda config, name, shape: 0}, "moved must be above 0"),
        ({"flops": lambda config, name, shape: 1 / 0}, "its facts cannot be computed: ZeroDivisionError"),
    ],
)
def test_what_contradicts_itself_is_refused(facts, message):
    with pytest.raises(ExtensionError, match=message):
        OPTIMIZERS.add("other", replace(ADAMW, **facts))
    assert "other" not in OPTIMIZERS


# The matrices that Muon takes, and their FLOPs.


def test_hidden_matrices_are_those_of_blocks():
    assert is_hidden_matrix("blocks.0.attn.wq.weight", (8, 8))
    assert is_hidden_matrix("blocks.0.moe.router.weight", (4, 8))
    assert is_hidden_matrix("blocks.0.moe.experts.up.weight", (4, 8, 8))
    assert not is_hidden_matrix("blocks.0.moe.experts.up.bias", (4, 8))
    assert not is_hidden_matrix("embed.weight", (50, 8))
    assert not is_hidden_matrix("head.weight", (50, 8))
    assert not is_hidden_matrix("positions.weight", (50, 8))
    assert not is_hidden_matrix("blocks.0.attn_norm.weight", (8,))


def test_an_experts_matrix_is_one_of_the_stack():
    assert matrix_elements("blocks.0.moe.experts.up.weight", (4, 8, 6), (2, 4, 6)) == 24
    assert matrix_elements("blocks.0.moe.experts.up.bias", (4, 8), (2, 8)) == 0


@pytest.mark.parametrize("shape", [(4096, 14336), (14336, 4096)])
def test_flops_are_those_of_three_products_in_five_iterations(shape):
    assert newton_schulz_flops(*shape) == 5 * (4 * 4096**2 * 14336 + 2 * 4096**3)


@pytest.mark.parametrize(
    ("words", "state", "moved"),
    [
        ("adamw", 12, 28),
        ("adamw state=bf16", 8, 20),
        ("adamw master=none", 8, 22),
        ("adamw state=bf16 master=none", 4, 14),
        ("adamw state=bf16 master=none rounding=kahan", 6, 18),
        ("sgd state=bf16 master=none", 2, 10),
        ("lion state=bf16", 6, 16),
    ],
)
def test_narrow_state_has_and_moves_fewer_bytes(words: str, state: int, moved: int) -> None:
    costs = optimizer_costs(optimizer_of(words), ModelConfig(vocab_size=1), 2)
    assert (costs.state, costs.moved) == (state, moved)


@pytest.mark.parametrize(
    ("words", "precision", "message"),
    [
        ("muon state=bf16", "bf16", "muon does not read it, adamw and sgd and lion do"),
        ("adamw master=none", "fp32", "parameters in fp32 have no copy; nearest legal: fp32, or train.precision"),
        ("adamw master=none", "fp16", "in fp16 updates below 6e-8 underflow; nearest legal: train.precision=bf16"),
        ("adamw rounding=kahan", "bf16", "kahan is for parameters without a copy in fp32; nearest legal: stochastic"),
        ("adamw8bit", "bf16", "no optimizer 'adamw8bit'; did you mean optimizer=adamw optimizer.state=8bit?"),
    ],
)
def test_narrow_state_that_serves_nothing_is_refused(words: str, precision: Any, message: str) -> None:
    job = Job(model=GPT, optimizer=optimizer_of(words), train=Train(global_batch=4, precision=precision))
    (found,) = (text for _, text in problems_of(job))
    assert message in found
