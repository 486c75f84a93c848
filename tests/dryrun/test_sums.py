"""`phalanx verify --static` finds missing and double sums without a value: of the bugs of tests/verify/bugs.py those of
this kind, and nothing in layouts without a bug.

By default some bugs, and layouts in which every axis meets others; `make planted` judges every bug and schedule, and
layouts in which every pair of axes meets, `make static` the whole verify matrix of every model, and every product of
the axes on up to 4 ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Hashable
from contextlib import nullcontext
from functools import cache

import pytest

from covering import covering
from phalanx.api import load_job
from phalanx.cli.main import main
from phalanx.config.layout_line import parse
from phalanx.dryrun.sums import SumProof, problems, prove_sums
from phalanx.partition.derived import stashes
from phalanx.verify.select import MATRIX, select
from verify.bugs import BUGS, MODELS
from verify.plant import Bug, planted

WHOLE, STATIC = "PHALANX_PLANTED" in os.environ, "PHALANX_STATIC" in os.environ
FOUND = {
    "shards are not summed over the replicas": "gradient of embed.weight",
    "one bucket's parameters are not gathered after the optimizer": "after a step",
    "parameters are gathered before the optimizer has written them": "after a step",
    "with sequence parallelism the gradients of norms are not summed over the tensor ranks": "attn_norm.weight",
    "the gradients of key and value heads with copies on several tensor ranks are not summed": "attn.wk.weight",
    "the gradients of matrices that compress for all heads are not summed over the tensor ranks": "attn.wq_a.weight",
    "the gradients of adapters' B are not summed over the tensor ranks that hold parts of A": "attn.wo.lora_b.weight",
    "the gradients of routers are not summed over the tensor ranks": "moe.router.weight",
    "the summed gradients of norms reach the first tensor rank alone": "attn_norm.weight",
    "the gradients of a tied embedding are not summed over the ends of the pipeline": "gradient of embed.weight",
    "a tied embedding is counted by both of its pipeline ranks in the norm": "several stages count it",
    "put-off weight gradients read inputs that a later micro-batch has overwritten": "of different micro-batches",
    "the last micro-batch of a step is dropped": "it does not depend on micro-batch 3",
    "with ZeRO-2 a micro-batch's shard replaces that of the one before it": "it does not depend on micro-batch 0",
    "gradients leave for the optimizer on the host before the last micro-batch has added its own": "on micro-batch 1",
    "accumulation divides the loss once more": "the factor of the loss: 0.5 ×",
    "each rank's loss is a mean over its own tokens, and gradients are the mean of those": "the factor of the loss",
    "the loss is multiplied by the context-parallel ranks": "the factor of the loss: 2 ×",
    "weights that every tensor rank holds whole are counted once a rank in the norm": "several ranks count it",
    "each tensor rank's indexer learns from the heads of this rank": "attn.index.wq.weight",
    "tensor ranks hold key and value heads in another order than query heads": "wk.weight: several ranks count it",
}
"""By bug, what is named."""
OWN = (
    Bug(
        "a micro-batch goes with the targets of another",
        "pp=2,accumulation=4",
        "parallel.pipeline:Execution._forward",
        (("self.micros[action.micro].slice", "self.micros[action.micro ^ stage.last].slice"),),
        "it multiplies tensors of different micro-batches",
    ),
    Bug(
        "a rank keeps its part of a coded sum as it was before the others' rounding",
        "dp_replicate=2,compression=int8",
        "parallel.compression:CompressedSum._coded",
        (("codec.decode(wire, whole)", "codec.decode(wire, whole)\n    whole[self.replicas.rank] = part"),),
        "gradient of embed.weight: both ranks hold it, and it differs",
    ),
    Bug(
        "replicas put matrices together from their own right factors",
        "dp_replicate=2,compression=powersgd,compression_rank=2",
        "parallel.compression:CompressedSum._low_rank",
        (("flat = join(right)\n    yield self.replicas.all_reduce(flat)", "flat = join(right)"),),
        "wq.weight: both ranks hold it, and it differs",
    ),
    Bug(
        "a stage takes the latest message that arrives",
        "pp=2,accumulation=4",
        "parallel.pipeline:StepMailbox.receive",
        (("self.arriving.pop(needed)", "self.arriving.popitem()[1]"),),
        "it depends on several micro-batches",
    ),
    Bug(
        "the gradients of the last micro-batch are lost",
        "pp=2,accumulation=4",
        "parallel.pipeline:Execution._backward",
        (
            (
                "torch.autograd.backward(roots, gradients)",
                "held = [(w, w.grad) for w in self.replica.objective.model.parameters()]\n"
                "    held = [(w, None if g is None else g.clone()) for w, g in held]\n"
                "    torch.autograd.backward(roots, gradients)\n"
                "    for w, g in held if action.micro == len(self.micros) - 1 else ():\n"
                "        w.grad = g",
            ),
        ),
        "it does not depend on micro-batch 3",
    ),
    Bug(
        "the loss of a micro-batch is not scaled",
        "pp=2,accumulation=4",
        "parallel.pipeline:Execution._forward",
        (("root = root * self.factor", "root = root * 1.0"),),
        "the factor of the loss",
    ),
)
"""More bugs, of pipelines, and of sums that values cannot prove, as they round."""
FAST = (
    "the gradients of routers are not summed over the tensor ranks",
    "the last micro-batch of a step is dropped",
    "the loss is multiplied by the context-parallel ranks",
    "weights that every tensor rank holds whole are counted once a rank in the norm",
)


FEW = (
    ("adapters", "accumulation=2,offload=optimizer+activations model.n_layers=2"),
    ("gpt", "tp=2,sp=true,recompute=0.4 model.n_layers=2"),
    ("gpt", "dp_shard=2,accumulation=2,offload=all model.n_layers=2"),
    ("llama", "pp=2,schedule=naive,accumulation=2 model.n_layers=3"),
    ("llama", "pp=2,schedule=pipedream,accumulation=2 model.n_layers=3"),
    ("llama", "pp=2,schedule=pipedream_stash,accumulation=2 model.n_layers=3 optimizer.clip=0"),
    ("shared keys", "dp_shard=2,reshard=false,accumulation=2 model.n_layers=4"),
    ("further tokens", "pp=2,schedule=terapipe,pp_slices=2,accumulation=2 model.n_layers=4"),
    ("gpt", "cp=4,cp_ulysses=2,cp_inner=ring model.n_layers=1"),
    ("gpt", "dp_shard=2,tp=2,ep=4,etp=1,zero=1,sp=true model.n_layers=1"),
    ("gpt", "dp_shard=4,hpz=2,accumulation=2 model.n_layers=2"),
    ("llama", "dp_shard=2,cp=2,cp_ulysses=2,ep=4,zero=1,recompute=mlp,loss_chunk=24 model.n_layers=1"),
    (
        "llama",
        "cp=2,cp_ulysses=2,pp=2,ep=2,schedule=dualpipe,accumulation=2,recompute=products,loss_chunk=24 "
        "model.n_layers=3",
    ),
    ("llama", "dp_replicate=2,pp=2,schedule=zb_h1,accumulation=2,recompute=selective model.n_layers=3"),
    ("llama", "dp_shard=2,pp=2,zero=1,schedule=zb_v,accumulation=2 model.n_layers=5"),
    ("chosen keys", "dp_replicate=2,tp=2,sp=true model.n_layers=1"),
    ("experts", "dp_replicate=2,dp_shard=2,zero=2,accumulate=sharded,accumulation=2,micro_batch=3 model.n_layers=1"),
    (
        "latent",
        "tp=2,pp=2,sp=true,sp_regather=true,accumulation=2,recompute_cut=1*full+2*selective+1*none model.n_layers=4",
    ),
    ("experts", "cp=2,ep=2,dispatch=tokens,ep_overlap=true,recompute=full model.n_layers=1"),
    ("experts", "dp_shard=4,ep=4,ep_node=2,zero=2,redundant_experts=2,accumulation=2 model.n_layers=1"),
    ("gpt", "dp_shard=2,tp=2,tiles=2,tile=all,sp=true,recompute=full model.n_layers=1"),
    ("llama", "pp=2,schedule=interleaved_1f1b,accumulation=2 model.n_layers=5"),
)
"""Models and layouts in which every axis, field and kind of schedule is, most of them together with others."""
MORE = (
    ("gpt", "dp_shard=2,zero=1,accumulation=2 model.n_layers=2"),
    ("llama", "pp=2,schedule=gpipe,accumulation=2 model.n_layers=3"),
    ("llama", "pp=2,schedule=looped_bfs,accumulation=2 model.n_layers=5"),
    ("llama", "pp=2,schedule=zb_h2,accumulation=2 model.n_layers=3"),
    ("llama", "pp=2,schedule=v_half,accumulation=2 model.n_layers=5"),
    ("llama", "pp=2,schedule=dualpipe_v,accumulation=2 model.n_layers=5"),
    ("gpt", "dp_replicate=2,dp_shard=2,zero=1 model.n_layers=2"),
    ("gpt", "dp_shard=4,ep=4,ep_node=2 model.n_layers=1"),
    (
        "llama",
        "dp_shard=2,pp=2,ep=2,zero=2,schedule=interleaved_1f1b,accumulation=2,recompute=selective,loss_chunk=24 "
        "model.n_layers=5",
    ),
    ("llama", "dp_replicate=2,cp=2,cp_ulysses=2,ep=2,recompute=full,loss_chunk=24 model.n_layers=1"),
    ("llama", "cp=2,tp=2,zero=2,sp=true,recompute=mlp model.n_layers=1"),
)
"""With these every pair of PAIRED meets."""
JUDGED = (*FEW, *MORE)
"""Of `matrix`, models and layouts on up to 4 ranks in which every pair of PAIRED meets, and everything else is; but
several sequences stand where no ring takes each of their documents apart, pipelines have two micro-batches, and models
one layer where layers have nothing to do with each other."""
PAIRED = {"dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "etp", "sp", "zero", "accumulation"}
VALUES = {"zero", "schedule", "recompute", "offload", "accumulate"}
"""Fields of which each value counts as its own kind of layout."""


def parts(cell: tuple[str, str]) -> set[Hashable]:
    """Returns the model and the fields of a layout."""
    line = cell[1].partition(" ")[0]
    layout = parse(line)
    fields = [*line.split(","), *([f"zero={layout.zero}"] if layout.shard_ranks > 1 else [])]
    return {cell[0], *(each if each.partition("=")[0] in VALUES else each.partition("=")[0] for each in fields)}


@cache
def matrix() -> tuple[tuple[str, str], ...]:
    """Returns the layouts of `phalanx verify` that can be judged: by default of every model, and with --full of one."""
    found: dict[tuple[str, str], None] = {}
    for model, words in MODELS.items():
        for ranks, full in ((8, False), *([(4, True)] if model == "llama" else [])):
            selection = select(load_job(*words.split()), full=full, max_ranks=ranks)
            for layout in selection.layouts:
                case = selection.case(layout)
                if not [*problems(case)]:
                    job = f"model.n_layers={case.model.n_layers}{' optimizer.clip=0' * stashes(layout)}"
                    found[model, f"{layout.line()} {job}"] = None
    return tuple(found)


LARGER = (
    ("experts", "dp_replicate=2,dp_shard=2,zero=2,accumulate=sharded,accumulation=2,micro_batch=3 model.n_layers=2"),
    ("experts", "dp_shard=2,tp=2,pp=2,zero=1 model.n_layers=3"),
)
"""Layouts outside of `matrix` that `make static` judges with more layers or micro-batches."""
LAYOUTS = (
    *FEW,
    ("experts", "dp_shard=2,tp=2,zero=3"),
    ("gpt", "dp_replicate=2,tp=2,sync=diloco"),
    ("llama", "dp_replicate=2,dp_shard=2,zero=2,compression=int8"),
    *(
        (
            *MORE,
            ("further tokens", "dp_shard=2,tp=2,zero=3"),
            # One shard of two has sums over tensor ranks.
            ("experts", "dp_shard=2,tp=2,pp=2,zero=1,accumulation=2 model.n_layers=3"),
            ("gpt", "dp_replicate=2,dp_shard=2,zero=3,sync=local_sgd"),
            ("llama", "dp_replicate=2,dp_shard=2,zero=3,compression=powersgd,compression_rank=2"),
            ("llama", "dp_shard=4,zero=3,hpz=2,quantise_weights=int8,quantise_gradients=int4"),
        )
        if WHOLE or STATIC
        else ()
    ),
    *(each for each in ((*matrix(), *LARGER) if STATIC else ()) if each not in JUDGED),
)


def test_every_field_that_verify_sets_is_judged_by_default():
    """But threads, which a rehearsal cannot run."""
    of_verify, judged = (
        {each.partition("=")[0] for line in lines for each in line.partition(" ")[0].split(",")}
        for lines in (MATRIX, [line for _, line in LAYOUTS])
    )
    assert of_verify - judged == {"data_parallel"}


@pytest.mark.skipif(not STATIC, reason="selects every layout of every model: make static")
def test_the_layouts_of_planted_have_every_pair():
    assert not covering(matrix(), parts, elsewhere=JUDGED, single=lambda x: str(x).partition("=")[0] not in PAIRED)


def proof(model: str, line: str, job: str = "", bug: Bug | None = None) -> SumProof:
    selection = select(load_job(*MODELS[model].split(), *job.split()), lines=[line], values=False)
    (layout,) = selection.layouts
    with planted(bug) if bug else nullcontext():
        return prove_sums(selection.case(layout), selection.compared.vocab_size)


@pytest.mark.parametrize(("model", "line"), LAYOUTS)
def test_no_sum_is_missing_or_made_twice(model, line):
    layout, _, job = line.partition(" ")
    found = proof(model, layout, job)
    assert found.pairs or parse(layout).world == 1 or "pp=" in line or "offload" in line
    assert found.text().endswith("ok")
    assert found.as_dict()["ok"]


@pytest.mark.parametrize("bug", [bug for bug in BUGS if WHOLE or bug.what in FAST], ids=lambda bug: bug.what)
def test_it_finds_sums_that_are_missing_and_nothing_else(bug):
    found = proof(bug.model, bug.layout, bug.job, bug)
    if bug.what in FOUND:
        assert any(FOUND[bug.what] in each.line() for each in found.findings), found.text()
    else:
        assert not found.findings, found.text()


@pytest.mark.parametrize("bug", OWN if WHOLE else OWN[:2], ids=lambda bug: bug.what)
def test_it_follows_micro_batches_and_codes(bug):
    assert bug.named in proof(bug.model, bug.layout, bug.job, bug).text()


def test_a_sum_of_what_all_ranks_hold_is_found():
    bug = Bug(
        "gradients of weights that every tensor rank holds whole are summed",
        "tp=2",
        "parallel.data:Replica._sum_partials",
        (
            (
                "for partial in self.model.partials:",
                "for partial in [type('', (), {'axis': self.model.tp, 'names': {'final_norm.weight'}})]:",
            ),
        ),
        "",
        model="llama",
    )
    (found,) = proof("llama", "tp=2", bug=bug).findings
    assert found.axis == "tp"
    assert "counted twice" in found.line()


def test_layouts_that_it_cannot_judge_say_why(capsys):
    job = [
        *MODELS["llama"].split(),
        "--static",
        "--json",
        "--layouts",
        "tp=2",
        "dp_replicate=2,sync=asp",
        "dp_replicate=2,data_parallel=threads",
    ]
    assert main(["verify", *job]) == 2
    report = json.loads(capsys.readouterr().out)
    tp, server, threads = report["cases"]
    assert not report["ok"]
    assert tp["ok"]
    assert not server["ok"]
    assert "sync=asp" in server["not_judged"]
    assert "one thread" in threads["not_judged"]
