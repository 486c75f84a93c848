"""What is refused of a layout, with the equation and the nearest legal choice."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.axes.catalogue import unbalanced
from phalanx.check.effect import effect_problems
from phalanx.check.job import problems_of
from phalanx.config.job import Data, Job, Optimizer, Train
from phalanx.config.layout import Layout
from phalanx.config.model import MLA, ModelConfig, MoE
from phalanx.partition.tensor_slices import rank_positions

MODEL = ModelConfig(n_layers=4, d_model=96, n_heads=12, n_kv_heads=4, d_ff=96, seq_len=48)
EXPERTS = replace(MODEL, moe=MoE(n_experts=8, d_ff=32))


def problems(model: ModelConfig = MODEL, train: Train | None = None, **layout) -> list[str]:
    job = Job(model=model, layout=Layout(**layout), train=train or Train(global_batch=96))
    return [f"{path}: {message}" for path, message in problems_of(job)]


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        (
            MODEL,
            {"cp": 4, "cp_ulysses": 3},
            "layout.cp_ulysses: cp 4 / cp_ulysses 3 is not an integer; nearest cp_ulysses: 1, 2, 4",
        ),
        (
            MODEL,
            {"cp": 2, "cp_ulysses": 4},
            "layout.cp_ulysses: cp 2 / cp_ulysses 4 is not an integer; nearest cp_ulysses: 1, 2",
        ),
        (
            MODEL,
            {"cp": 8, "cp_ulysses": 8},
            "layout.cp_ulysses: n_heads 12 / (tp 1 × cp_ulysses 8) is not an integer; nearest cp_ulysses: 1, 2, 4",
        ),
        (
            MODEL,
            {"cp": 24, "cp_ulysses": 24},
            "layout.cp_ulysses: n_heads 12 / (tp 1 × cp_ulysses 24) is not an integer; nearest cp_ulysses: 2, 4, 12",
        ),
        (
            MODEL,
            {"cp": 4, "cp_ulysses": 4, "tp": 4},
            "layout.cp_ulysses: n_heads 12 / (tp 4 × cp_ulysses 4) is not an integer; nearest cp_ulysses: 1",
        ),
        (
            MODEL,
            {"cp": 6, "cp_ulysses": 6},
            "layout.cp_ulysses: n_kv_heads 4, 4 on each of tp 1, neither divide by cp_ulysses 6 nor divide it; nearest "
            "cp_ulysses: 1, 2",
        ),
        (
            MODEL,
            {"cp": 3, "cp_ulysses": 3, "tp": 2},
            "layout.cp_ulysses: n_kv_heads 4, 2 on each of tp 2, neither divide by cp_ulysses 3 nor divide it; nearest "
            "cp_ulysses: 1",
        ),
    ],
)
def test_heads_are_exchanged_in_equal_parts(model, layout, message):
    assert problems(model, **layout) == [message]


@pytest.mark.parametrize(
    "layout",
    [
        {"cp": 4, "cp_ulysses": 4},
        {"cp": 4, "cp_ulysses": 2},
        {"cp": 12, "cp_ulysses": 12},
        {"cp": 6, "cp_ulysses": 2, "cp_inner": "ring"},
        {"cp": 3, "cp_ulysses": 3, "tp": 4},
        {"cp": 8, "tp": 2, "sp": True},
        {"cp": 4, "dp_shard": 2, "ep": 1, "recompute": "full"},
    ],
)
def test_context_parallel_layouts_that_go_together_are_legal(layout):
    assert problems(**layout) == []


@pytest.mark.parametrize(
    ("seq_len", "layout", "message"),
    [
        (48, {"cp": 5}, "layout.cp: seq_len 48 / cp 5 is not an integer; nearest cp: 3, 4, 6"),
        (48, {"cp": 10**6}, "layout.cp: seq_len 48 / cp 1000000 is not an integer; nearest cp: 8, 12, 24"),
        (
            48,
            {"cp": 16},
            "layout.cp: seq_len 48 / (2 × ring 16) is not an integer: each ring group holds a chunk from either "
            "end; nearest cp: 8, 12, 24",
        ),
        (
            6,
            {"cp": 6, "cp_ulysses": 3},
            "layout.cp: seq_len 6 / (2 × ring 2) is not an integer: each ring group holds a chunk from either "
            "end; nearest cp: 3",
        ),
        (
            3,
            {"cp": 4, "cp_ulysses": 2},
            "layout.cp: seq_len 3 / cp 4 is not an integer; nearest cp: 1 (and cp_ulysses the same)",
        ),
        (
            32,
            {"cp": 3, "cp_ulysses": 3},
            "layout.cp: seq_len 32 / cp 3 is not an integer; nearest cp: 1, 2, 4 (and cp_ulysses the same)",
        ),
        (
            48,
            {"cp": 8, "tp": 4, "sp": True},
            "layout.cp: seq_len 48 / (cp 8 × tp 4 (sp)) is not an integer; nearest cp: 4, 6, 12, or sp=false",
        ),
        (
            48,
            {"cp": 4, "pp": 2, "schedule": "terapipe", "pp_slices": 8},
            "layout.cp: a slice of 6 tokens (seq_len 48 / 8) / cp 4 is not an integer; nearest cp: 1, 3",
        ),
        (
            48,
            {"cp": 2, "pp": 2, "schedule": "terapipe", "pp_slices": 8},
            "layout.cp: a slice of 6 tokens (seq_len 48 / 8) / (2 × ring 2) is not an integer: each "
            "ring group holds a chunk from either end; nearest cp: 1, 3",
        ),
    ],
)
def test_context_parallel_ranks_hold_equal_parts_of_a_sequence(seq_len, layout, message):
    assert problems(replace(MODEL, n_kv_heads=0, seq_len=seq_len), **layout) == [message]


def test_a_sequence_that_cp_does_not_cut_is_told_once_however_many_slices():
    (found,) = problems(cp=5, pp=2, schedule="terapipe", pp_slices=4)
    assert found.startswith("layout.cp: seq_len 48 / cp 5 is not an integer")
    assert problems(cp=2, pp=2, schedule="terapipe", pp_slices=4) == []


@given(
    seq_len=st.integers(1, 96),
    cp=st.integers(1, 12),
    ulysses=st.integers(1, 12),
    tp=st.sampled_from([1, 2, 4]),
    sp=st.booleans(),
)
def test_what_is_legal_deals_out_equal_parts_and_the_nearest_choice_is_legal(seq_len, cp, ulysses, tp, sp):
    model = replace(MODEL, seq_len=seq_len)
    layout = Layout(cp=cp, cp_ulysses=ulysses, tp=tp, sp=sp)
    found = problems(model, **vars(layout))
    if not found:
        parts = [sum(map(len, rank_positions(layout, seq_len, rank))) for rank in range(cp)]
        assert parts == [seq_len // cp] * cp
        assert not sp or seq_len // cp % tp == 0
        assert MODEL.n_heads % (tp * ulysses) == 0
    elif len(found) == 1 and found[0].startswith("layout.cp"):
        field = found[0].split(":")[0].removeprefix("layout.")
        [choices] = re.findall(rf"nearest {field}: ([0-9, ]+)", found[0])
        for choice in map(int, choices.rstrip(", ").split(", ")):
            legal = replace(layout, **{field: choice})
            if "the same" in found[0]:
                legal = replace(legal, cp_ulysses=choice)
            # Another number of ranks that exchange heads makes another ring, whose chunks are told of in their turn.
            told = [problem for problem in problems(model, **vars(legal)) if problem.startswith(f"layout.{field}:")]
            assert told == []


@pytest.mark.parametrize(
    ("model", "layout", "messages"),
    [
        (
            MODEL,
            {"dp_shard": 2, "ep": 2},
            [
                "layout.ep: ep 2 distributes experts, the model has none (n_experts 0); nearest legal: ep=1, or a "
                "model "
                "with experts"
            ],
        ),
        (
            EXPERTS,
            {"dp_shard": 6, "ep": 6},
            ["layout.ep: n_experts 8 / ep 6 is not an integer; nearest ep: 1, 2"],
        ),
        (
            EXPERTS,
            {"dp_shard": 2, "cp": 2, "ep": 8},
            [
                "layout.ep: ep is taken from dp_shard 2 × cp 2 = 4, which ep 8 does not divide; nearest ep: 1, 2, 4",
            ],
        ),
        (
            EXPERTS,
            {"tp": 3},
            [
                "layout.tp: an expert's width 32 / tp 3 is not an integer; nearest tp: 1, 2, 4",
                "layout.tp: tp 3 neither divides the n_kv_heads 4 nor is a multiple of them; nearest tp: 1, 2, 4",
            ],
        ),
        (
            EXPERTS,
            {"dp_shard": 2, "tiles": 2},
            [
                "layout.tile: this model has no layers of mlp that run in tiles, tiles is 2; nearest legal: "
                "tile=attention+experts, or tiles=1"
            ],
        ),
    ],
)
def test_experts_are_dealt_out_in_equal_parts(model, layout, messages):
    assert problems(model, **layout) == messages


@pytest.mark.parametrize("values", [{"dp_replicate": 2, "zero": 2}, {"pp": 2}, {"tp": 2}], ids=str)
def test_gradients_are_sharded_among_ranks(values):
    assert problems(**values, accumulate="sharded") == [
        "layout.accumulate: dp_shard 1 × cp 1 = 1 rank cannot shard gradients; nearest legal: "
        "accumulate=local, or dp_shard=2"
    ]
    assert problems(**values, accumulate="local") == []
    assert problems(**values, dp_shard=2, accumulate="sharded") == []
    assert problems(**values, cp=2, accumulate="sharded") == []


def test_experts_that_are_dealt_out_are_legal():
    assert problems(EXPERTS, dp_shard=2, cp=2, ep=4, tp=2) == []
    assert problems(EXPERTS, dp_shard=2, tp=2, sp=True, ep=4, etp=1) == []
    odd = replace(EXPERTS, d_ff=97)
    assert problems(odd, tp=2) == [], "no layer has a dense MLP"
    (found,) = problems(replace(odd, moe=replace(odd.moe, n_dense_layers=1)), tp=2)
    assert found == "layout.tp: MLP width 97 / tp 2 is not an integer; nearest tp: 1, 97"


def test_what_counts_tokens_of_whole_sequences_does_not_go_with_slices():
    sliced = {"pp": 2, "schedule": "terapipe", "pp_slices": 4}
    assert problems(replace(EXPERTS, moe=replace(EXPERTS.moe, aux_loss=0.0, capacity=0.0)), **sliced) == []
    counting = replace(EXPERTS, moe=replace(EXPERTS.moe, aux_loss=0.01, capacity=1.25))
    assert problems(counting, **sliced) == [
        "model.moe.aux_loss: aux_loss 0.01 counts the tokens of whole sequences, slices 4 cut them; nearest legal: "
        "aux_loss=0, or a schedule without slices, such as 1f1b",
        "model.moe.capacity: capacity 1.25 counts the tokens of whole sequences, slices 4 cut them; nearest legal: "
        "capacity=0, or a schedule without slices, such as 1f1b",
    ]
    assert problems(counting, pp=2) == []


def test_collectives_and_experts_may_stand_between_compiled_graphs():
    compiled = Train(compile=True)
    assert problems(MODEL, compiled, cp=2) == problems(MODEL, compiled, tp=2) == problems(EXPERTS, compiled) == []


def test_a_parameter_server_serves_whole_models_and_sequences():
    assert problems(dp_replicate=2, cp=2, sync="asp") == [
        "layout.sync: asp needs replicas with whole models and whole sequences, cp 2 cuts "
        "them; nearest legal: sync=bsp, or cp=1"
    ]
    (found,) = problems(EXPERTS, dp_replicate=2, dp_shard=2, ep=2, sync="asp")
    assert found.endswith("ep 2 cuts them; nearest legal: sync=bsp, or ep=1")


def test_latent_attention_has_keys_for_every_head():
    latent = replace(MODEL, n_heads=12, n_kv_heads=2, mla=MLA(kv_rank=16, rope_head_dim=8, nope_head_dim=8))
    assert problems(replace(latent, positions="rope"), tp=3) == []
    assert problems(replace(latent, positions="rope"), cp=3, cp_ulysses=3) == []
    (found,) = problems(replace(latent, positions="rope"), tp=8)
    assert found == "layout.tp: n_heads 12 / tp 8 is not an integer; nearest tp: 4, 6, 12"


@pytest.mark.parametrize("field", ["cp", "cp_ulysses", "ep"])
def test_degrees_are_at_least_one(field):
    job = Job(model=MODEL, layout=replace(Layout(), **{field: 0}))
    assert problems_of(job) == [(f"layout.{field}", "must be at least 1, is 0")]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            {"recompute_cut": "8*full+4*selective+20*none"},
            "8*full+4*selective+20*none = 32 layers, the model has 4; nearest legal: 4*full",
        ),
        ({"recompute_cut": "1*full+1*none"}, "1*full+1*none = 2 layers, the model has 4; nearest legal: 1*full+3*none"),
        (
            {"recompute_cut": "1*full+3*none", "recompute": "selective"},
            "sets recomputation per layer, recompute=selective for all layers; nearest legal: recompute=none, or no "
            "recompute_cut",
        ),
        (
            {"recompute_cut": "1*full+3*some"},
            "3*some: 'some' is not a recomputation mode (known: none, products, mlp, selective, full)",
        ),
    ],
)
def test_layers_that_recompute_are_those_of_the_model(layout, message):
    assert problems(MODEL, **layout) == [f"layout.recompute_cut: {message}"]
    assert not problems(MODEL, recompute_cut="1*full+1*selective+2*none")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"dp_shard": 8, "hpz": 3}, "dp_shard 8 × cp 1 = 8 / hpz 3 is not an integer; nearest hpz: 1, 2, 4"),
        (
            {"dp_shard": 2, "cp": 2, "hpz": 4},
            "hpz 4 ranks are all of dp_shard 2 × cp 2, which hold a copy already; nearest hpz: 1, 2",
        ),
        ({"hpz": 2}, "dp_shard 1 × cp 1 = 1 / hpz 2 is not an integer; nearest hpz: 1"),
        (
            {"dp_shard": 4, "hpz": 2, "zero": 2},
            "hpz 2 copies parameters that zero=3 shards, zero is 2; nearest legal: zero=3, or hpz=1",
        ),
        (
            {"dp_shard": 4, "hpz": 2, "reshard": False},
            "hpz 2 copies parameters for the gathers of the backward pass, of which reshard=false has none; nearest "
            "legal: reshard=true, or hpz=1",
        ),
    ],
)
def test_second_copies_need_whole_groups_of_sharded_parameters(layout, message):
    assert problems(**layout) == [f"layout.hpz: {message}"]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            {"etp": 2, "ep": 8},
            "layout.etp: etp 2 is neither 1, for whole experts, nor tp 4, for parts of each; nearest",
        ),
        ({"etp": 1, "ep": 8, "sp": False}, "without sequence parallelism are all; nearest legal: sp=true, or etp=4"),
        ({"etp": 1, "ep": 2}, "with etp 1 each of tp 4 ranks holds other experts, and ep 2 / tp 4 is not an integer"),
        ({"etp": 1, "ep": 16}, "ep is taken from dp_shard 2 × cp 1 × tp 4 (etp 1) = 8, which ep 16 does not divide"),
        (
            {"ep": 2, "ep_node": 2},
            "layout.ep_node: ep 2 / ep_node 2 is not a whole number above 1; nearest ep_node: 1",
        ),
        (
            {"etp": 1, "ep": 8, "ep_node": 3},
            "ep 8 / ep_node 3 is not a whole number above 1; nearest ep_node: 1, 2, 4",
        ),
        ({"etp": 1, "ep": 8, "tiles": 2, "tile": "experts"}, "leaves experts whole, which tile cuts; nearest"),
    ],
)
def test_whole_experts_on_tensor_ranks(layout, message):
    found = problems(EXPERTS, **{"dp_shard": 2, "tp": 4, "sp": True} | layout)
    assert any(message in each for each in found), found


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            {"dispatch": "token"},
            "layout.dispatch: dispatch 'token' is no dispatcher; did you mean tokens? (known: ",
        ),
        (
            {"dispatch": "deepep"},
            "deepep sends activations of bf16 or fp8, precision is fp32; nearest legal: ",
        ),
        ({"dispatch": "tokens", "ep_node": 2}, "ep_node 2 rows inside nodes first; nearest legal: ep_node=1, or "),
        ({"ep_overlap": True, "micro_batch": 1}, "micro_batch 1 has no halves of sequences, which ep_overlap needs"),
        ({"ep_overlap": True, "ep": 2}, "zero 3 gathers the experts of edp 2 ranks again for each half of ep_overlap"),
        (
            {"ep_overlap": True, "pp": 2, "schedule": "terapipe", "pp_slices": 2},
            "schedule terapipe has slices of sequences, ep_overlap none; nearest legal: 1f1b, or ep_overlap=false",
        ),
        ({"ep_overlap": True, "ep": 1}, "has no effect here: it is for expert parallelism: layout.ep above 1"),
        ({"redundant_experts": 1, "ep": 1}, "has no effect here: it is for expert parallelism: layout.ep above 1"),
        ({"redundant_experts": 1, "auto": True}, "nearest legal: 0, or a layout without auto"),
        ({"redundant_experts": 9}, "redundant_experts 9 exceeds the 6 experts of other ranks; nearest "),
        ({"redundant_experts": 1, "ep_overlap": True}, "nearest legal: ep_overlap=false, or redundant_experts=0"),
        (
            {"redundant_experts": 1, "pp": 2, "schedule": "terapipe", "pp_slices": 2},
            "slices of sequences, of which each would send redundant_experts; nearest legal: 1f1b, or ",
        ),
        ({"redundant_experts": 1, "tiles": 2, "tile": "experts"}, "nearest legal: a tile without experts, or "),
    ],
)
def test_dispatch_and_what_overlaps_it(layout, message):
    chosen = {"dp_shard": 4, "ep": 4} | layout
    found = problems(EXPERTS, **chosen)
    job = replace(Job(), model=EXPERTS, layout=replace(Layout(), **chosen))
    found += [f"{path}: {why}" for path, why in effect_problems(job, {f"layout.{name}" for name in chosen})]
    assert any(message in each for each in found), found


def test_whole_experts_have_whole_widths_and_are_of_models_with_experts():
    odd, folded = replace(EXPERTS, moe=replace(EXPERTS.moe, d_ff=33)), {"tp": 2, "sp": True, "ep": 2, "etp": 1}
    assert problems(odd, **folded) == []
    (found,) = problems(replace(odd, moe=replace(odd.moe, n_shared=1)), **folded)
    assert found.startswith("layout.tp: an expert's width 33 / tp 2")
    assert "etp 1 distributes experts, the model has none" in "".join(problems(tp=2, etp=1))


def test_second_copies_of_experts():
    found = problems(EXPERTS, dp_shard=8, ep=4, hpz=2)
    assert found == ["layout.hpz: hpz 2 / ep 4 is not an integer; nearest hpz: 1, 4"]


@pytest.mark.parametrize("layout", [{"dp_shard": 2, "zero": 2}, {"dp_replicate": 2}])
def test_codes_are_for_messages_of_zero_3(layout):
    ranks = layout.get("dp_shard", 1)
    assert "quantise_gradients=none" in problems(**layout, quantise_gradients="int4")[0]
    assert problems(**layout, quantise_weights="int8") == [
        "layout.quantise_weights: int8 is for the messages of zero=3 on several ranks, zero is "
        f"{layout.get('zero', 3)} and dp_shard {ranks} × cp 1 = {ranks}; nearest legal: quantise_weights=none, or "
        "zero=3 with dp_shard=2"
    ]


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"compression": "int8"}, "int8 is for gradients that replicas sum in every step, dp_replicate is 1"),
        (
            {"dp_replicate": 2, "sync": "diloco", "compression": "int8"},
            "and sync diloco; nearest legal: compression=no",
        ),
        ({"dp_replicate": 2, "data_parallel": "threads", "compression": "int4"}, "threads send none; nearest legal"),
        ({"dp_replicate": 2, "dp_shard": 2, "zero": 2, "compression": "powersgd"}, "zero=3, or compression=int8"),
        (
            {"dp_replicate": 2, "dp_shard": 2, "offload": "all", "compression": "int8"},
            "compression=none, or offload=no",
        ),
    ],
)
def test_sums_that_are_not_compressed_are_refused_with_the_nearest_choice(layout, said):
    (found,) = (each for each in problems(**layout) if each.startswith("layout.compression:"))
    assert said in found


def test_why_whole_matrices_are_not_updated_on_the_host():
    job = Job(model=MODEL, layout=Layout(offload="optimizer"), optimizer=Optimizer(name="muon"))
    ((path, message),) = problems_of(job)
    assert path == "optimizer.name"
    assert "devices exchange and multiply" in message
    assert "nearest legal: offload=none, or optimizer=adamw" in message


DOCUMENTS = Data(corpus="stdlib", document_mask=True)


@pytest.mark.parametrize(
    ("model", "layout", "reason"),
    [
        (MODEL, {"pp": 2, "schedule": "terapipe", "pp_slices": 2}, "slices of sequences are pipelined"),
        (replace(EXPERTS, moe=replace(EXPERTS.moe, capacity=1.5)), {}, "experts with a capacity count whole sequences"),
    ],
)
def test_documents_decide_a_rings_tokens_where_nothing_counts_whole_sequences(model, layout, reason):
    job = Job(model=model, layout=Layout(cp=2, **layout), data=DOCUMENTS, train=Train(global_batch=96))
    assert not problems_of(job)
    assert reason in unbalanced(job)
    asked = replace(job, layout=replace(job.layout, cp_balance="documents"))
    assert [message for _, message in problems_of(asked)] == [f"{unbalanced(job)}; nearest legal: cp_balance=position"]
    plain = replace(job, model=MODEL, layout=Layout(cp=2))
    assert not unbalanced(plain)
    assert not unbalanced(replace(plain, layout=Layout(cp=2, cp_ulysses=2)))
    assert unbalanced(replace(plain, layout=Layout()))
    assert unbalanced(replace(plain, data=replace(DOCUMENTS, document_mask=False)))
