"""A kind of attention from one file outside of Phalanx (packages/gated.py): its output is gated by a sigmoid of the
input. It trains, equals one process, and is predicted and planned like the project's own kinds."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from covering import also_whole
from extend.install import PACKAGES, environment, install
from model.kinds import build, tokens
from parallel import test_composition as composition
from parallel import test_predicted_traffic as traffic
from parallel.steps import steps
from phalanx.blocks.kinds import ATTENTION, AttentionKind, Connection, FeedForwardKind, block_kinds
from phalanx.blocks.operator import Operator, Place
from phalanx.blocks.parameters import forward_flops_per_token, parameter_shapes, train_flops_per_step
from phalanx.check.job import problems_of
from phalanx.cli.main import main
from phalanx.config import layout_line
from phalanx.config.job import Job, Train
from phalanx.config.layout import Layout
from phalanx.config.model import MoE
from phalanx.config.presets import PRESETS
from phalanx.errors import ExtensionError
from phalanx.verify.select import compared_job
from train import test_predicted_memory as memory

LLAMA = replace(composition.LLAMA, attention="gated")
MODELS = {
    "llama": LLAMA,
    "gpt": replace(composition.GPT, attention="gated"),
    "every other layer": replace(LLAMA, attention="gated,heads", n_layers=4, dropout=0.0, window=3),
    "parallel block": replace(composition.GPT, attention="gated", parallel_block=True, qk_norm="head"),
}
LAYOUTS = [
    ("llama", "tp=2,sp=true,sp_regather=true,cp=2,cp_ulysses=2,pp=2,accumulation=2,schedule=zb_h1"),
    ("llama", "dp_shard=2,zero=3,tp=2,sp=true,recompute=full"),
    ("gpt", "tp=4,recompute=selective"),
    ("gpt", "tp=2,pp=2,accumulation=2,recompute=full"),
    ("every other layer", "tp=2,pp=2,accumulation=2"),
    *also_whole(*((name, "tp=2,cp=2,pp=2,accumulation=2") for name in ("llama", "every other layer"))),
    ("parallel block", "tp=2,sp=true,cp=2"),
]


@contextlib.contextmanager
def added() -> Iterator[None]:
    """The kind in this process's table, as its package adds it."""
    sys.path.insert(0, str(PACKAGES))
    try:
        import gated

        gated.register()
        yield
    finally:
        sys.path.remove(str(PACKAGES))
        ATTENTION.remove("gated")


def with_kind(ranks: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Calls `function` on a rank that has the package."""
    with added():
        return function(ranks, *args)


@pytest.fixture(autouse=True)
def _added() -> Iterator[None]:
    with added():
        yield


@pytest.fixture
def gated_ranks(ranks) -> Callable[..., list[Any]]:
    """`ranks`, whose processes have the package."""
    return lambda function, world, *args: ranks(with_kind, world, function, *args)


@pytest.fixture(scope="module")
def reference(ranks):
    """One process, by kind of model."""
    one = partial(ranks, with_kind, 1, steps)
    return {name: one(composition.job_of(model, Layout()), composition.VOCAB)[0] for name, model in MODELS.items()}


@pytest.mark.parametrize(("name", "line"), LAYOUTS)
def test_equals_one_process(gated_ranks, reference, name, line):
    layout = layout_line.parse(line)
    job = composition.job_of(MODELS[name], layout)
    assert not problems_of(job)
    composition.compare(gated_ranks(steps, layout.world, job, composition.VOCAB), reference[name])


@pytest.mark.parametrize(
    "line",
    [
        "dp_shard=2,zero=2,accumulation=2",
        "tp=2,sp=true,sp_regather=true,recompute=full",
        "tp=2,cp=2,pp=2,accumulation=2",
        "dp_shard=2,cp=2,cp_ulysses=2,recompute=selective",
        *also_whole("dp_shard=2,tp=2,sp=true,cp=2,cp_ulysses=2,recompute=selective"),
    ],
)
@pytest.mark.parametrize("attention", ["heads,gated", *also_whole("gated")])
def test_every_byte_sent_is_predicted(gated_ranks, attention, line):
    model = replace(traffic.LLAMA, attention=attention)
    traffic.check(gated_ranks, traffic.job_of(model, layout_line.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        "tp=2,sp=true,sp_regather=true",
        "cp=2,zero=1",
        "recompute=selective,dp_shard=2",
        "recompute=full,pp=2,micro_batch=1",
        *also_whole("", "tp=2,pp=2,micro_batch=1", "tp=2,pp=2,cp=2,micro_batch=1,zero=1"),
    ],
)
def test_memory_is_the_predicted_one(gated_ranks, line):
    """To 4 %, on every rank."""
    layout = layout_line.parse(line) if line else Layout()
    model = replace(memory.DEEP, attention="gated")
    memory.compare(gated_ranks, Job(model=model, layout=layout, train=Train(global_batch=4)))


def test_flops_are_those_that_torch_counts():
    model = replace(LLAMA, dropout=0.0, vocab_size=composition.VOCAB)
    transformer, inputs = build(model, torch.float64), tokens(model, 3, model.seq_len)
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            loss = transformer(inputs).square().sum()
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    counted = forward.get_total_flops()
    assert forward_flops_per_token(model) * inputs.numel() == counted
    assert train_flops_per_step(model, sequences=3) == counted + backward.get_total_flops()


def test_the_gate_is_the_difference():
    """The kind has one more matrix than attention without a gate, in the layers that have it."""
    model = replace(LLAMA, dropout=0.0, vocab_size=composition.VOCAB, attention="gated,heads", n_layers=4)
    assert [kind.attention for kind in block_kinds(model)] == ["gated", "heads", "gated", "heads"]
    names = {name for name in parameter_shapes(model) if name.endswith("wg.weight")}
    assert names == {"blocks.0.attn.wg.weight", "blocks.2.attn.wg.weight"}


def test_a_user_trains_and_resumes_with_another_layout(tmp_path, capsys):
    """The commands, and the ranks that they start, find the installed package by themselves."""
    where = environment(install(tmp_path / "site", "gated"))
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    job = [
        *("train", "model=tiny", "model.attention=gated", "model.seq_len=32", "data.corpus=text", "cluster.device=cpu"),
        *(f"data.path={tmp_path}/text.txt", "data.tokenizer=char", f"data.dir={tmp_path}/data", f"run.dir={tmp_path}"),
        *("train.global_batch=4", "train.precision=fp32", "optimizer.schedule=constant", "run.sample_tokens=0"),
    ]

    def losses(name: str) -> list[float]:
        rows = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        return [row["loss"] for row in rows if row["event"] == "step"]

    for words in (["train.steps=2"], ["train.steps=4", "tp=2"]):
        command = [sys.executable, "-m", "phalanx", *job, "run.name=resumed", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, env=where)
        assert done.returncode == 0, done.stderr
    assert main([*job, "run.name=straight", "train.steps=4"]) == 0
    assert losses("resumed") == pytest.approx(losses("straight"), rel=1e-5)
    assert len(losses("resumed")) == 4
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "resumed"), "--max-new-tokens", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"]


def test_verify_shrinks_it_and_the_planner_plans_it(capsys):
    job = Job(model=replace(PRESETS["llama3-8b"], attention="gated"))
    small = compared_job(job, as_is=False, max_ranks=8).job.model
    assert (small.attention, small.n_layers, problems_of(Job(model=small))) == ("gated", 2, [])
    plan = ["plan", "model=llama3-8b", "cluster=dgx-h100:1", "train.precision=bf16", "train.global_batch=32", "--json"]
    seconds = []
    for kind in ("heads", "gated"):
        assert main([*plan, f"model.attention={kind}"]) == 0
        seconds.append(json.loads(capsys.readouterr().out)["candidates"][0]["prediction"]["step_time_s"])
    assert 1.02 < seconds[1] / seconds[0] < 1.2, "a gate is 7 % of a layer's weights"


def test_a_kind_that_states_too_little_is_refused():
    with pytest.raises(ExtensionError, match=r"missing: title, source, operators, module, cores"):
        AttentionKind()
    with pytest.raises(ExtensionError, match=r"missing: title, source, operators, module, width"):
        FeedForwardKind()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"cores": ()}, "it states 0 cores, its operators have 1"),
        ({"name_in_block": "mixer"}, "the name of the weight 'attn.wq.weight' must begin with 'mixer' and a dot"),
        ({"connection": Connection(reads=("wo",), writes=("wo",))}, "wo reads the input: it must be cut by rows"),
        ({"needs": ("mla.kv_rnk",)}, "'mla.kv_rnk' switches no part of a model on; did you mean mla.kv_rank?"),
        ({"operators": lambda place: iter(())}, "its operators have no weights"),
        ({"operators": lambda place: iter([1 / 0])}, "its operators failed for a small model with tp=2: ZeroDivision"),
        ({"operators": lambda place: iter([*operators_of("gated", place)][:-2])}, "sum it 0 times over tensor ranks"),
        ({"module": 3}, "must be a function, or its place or None"),
    ],
)
def test_facts_that_its_operators_contradict_are_refused(changes, problem):
    with pytest.raises(ExtensionError) as caught:
        ATTENTION.add("wrong", replace(ATTENTION["gated"], **changes))
    assert problem in str(caught.value)


def operators_of(name: str, place: Place) -> Iterator[Operator]:
    return ATTENTION[name].operators(place)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"operators": lambda place: operators_of("heads", place)}, "its operators lack the parameter attn.wg.weight"),
        ({"module": lambda model, layer: torch.nn.Linear(2, 3)}, "its module lacks the weight attn.wq.weight"),
        ({"cores": ("inner",)}, "it states the cores ['inner'], its module has ['core']"),
    ],
)
def test_a_module_that_is_not_as_described_is_refused_when_it_is_made(changes, problem):
    ATTENTION.add("wrong", replace(ATTENTION["gated"], **changes))
    try:
        with pytest.raises(ExtensionError) as caught:
            build(replace(LLAMA, attention="wrong", vocab_size=13), torch.float32)
    finally:
        ATTENTION.remove("wrong")
    assert problem in str(caught.value)


def test_names_and_fields_of_kinds_are_checked():
    def found(**fields: Any) -> list[tuple[str, str]]:
        return problems_of(Job(model=replace(LLAMA, **fields)))

    known = "heads, wide_heads, shared_heads, shared_wide_heads, latent, sparse, gated_heads, delta, mamba, none, gated"
    assert found(attention="gatd") == [
        ("model.attention", f"no attention 'gatd'; did you mean gated? (known: {known})")
    ]
    assert ("model.mla.kv_rank", "attention latent needs it above 0, is 0") in found(attention="latent")
    with_experts = found(feed_forward="dense", moe=MoE(n_experts=4))
    assert [path for path, _ in with_experts] == ["model.feed_forward"]
    assert "does not use model.moe.n_experts 4; nearest legal: feed_forward=experts" in with_experts[0][1]
