"""Megatron-LM's scripts and YAML as jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.check.load import load_words
from phalanx.config import overrides
from phalanx.config.fields import leaves
from phalanx.config.layout import Layout
from phalanx.cost.frameworks import FRAMEWORKS
from phalanx.errors import JobError
from phalanx.foreign.frame import ForeignJob, table_of
from phalanx.foreign.megatron_core import frequencies, layout_sizes
from phalanx.foreign.read import FORMATS, read, write_back

GPT = """\
#!/bin/bash
GPUS_PER_NODE=8
NNODES=4
TP=4
ARGS=(
  --num-layers 32
  --hidden-size 4096
  --num-attention-heads 32
  --seq-length 2048
  --max-position-embeddings 2048
  --micro-batch-size 1
  --global-batch-size 128
  --lr 1e-4
  --bf16
  --tensor-model-parallel-size ${TP}
  --pipeline-model-parallel-size 2
  --vocab-size 50257
)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py ${ARGS[@]} MORE
"""


def script(tmp_path: Path, more: str = "", text: str = GPT) -> ForeignJob:
    path = tmp_path / "train.sh"
    path.write_text(text.replace("MORE", more))
    return read(path)


def job(theirs: ForeignJob, *words: str):
    line = overrides.parse(words)
    line.base = list(theirs.settings)
    return load_words(line).job


def settings(theirs: ForeignJob) -> dict[str, object]:
    return {each.path: each.text for each in theirs.settings}


def test_a_script_is_the_job_that_it_means(tmp_path):
    theirs = script(tmp_path, "--swiglu --use-distributed-optimizer --sequence-parallel --disable-bias-linear")
    assert (theirs.kind, theirs.unknown, theirs.framework) == ("Megatron-LM", (), "megatron-core")
    found = job(theirs)
    model, layout = found.model, found.layout
    assert (model.n_layers, model.d_model, model.n_heads, model.d_ff) == (32, 4096, 32, 10880)
    assert (model.activation, model.bias, model.tied, model.dropout) == ("swiglu", False, True, 0.1)
    assert model.vocab_size == 50688  # a multiple of 128 × tp 4
    assert (layout.tp, layout.pp, layout.dp_shard, layout.zero, layout.sp) == (4, 2, 4, 1, True)
    assert (found.train.global_batch, found.train.precision, found.cluster.devices) == (128, "bf16", 32)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("--num-layers-per-virtual-pipeline-stage 4", {"layout.pp_chunks": "4", "layout.schedule": "interleaved_1f1b"}),
        ("--num-virtual-stages-per-pipeline-rank 2", {"layout.pp_chunks": "2"}),
        ("--recompute-activations", {"layout.recompute": "selective"}),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            {"layout.recompute": "full"},
        ),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 5",
            {"layout.recompute_cut": "5*full+11*none+5*full+11*none"},
        ),
        ("--decoder-first-pipeline-num-layers 12", {"layout.pp_cut": "12+20"}),
        ("--pipeline-model-parallel-layout 'Et*15|t*17L'", {"layout.pp_cut": "15+17"}),
        ("--num-query-groups 8 --group-query-attention", {"model.n_kv_heads": "8"}),
        ("--kv-channels 192", {"model.head_dim": "192"}),
        ("--kv-channels 128", {"model.head_dim": None}),
        ("--squared-relu", {"model.activation": "relu2"}),
        ("--use-torch-fsdp2", {"layout.zero": "3", "layout.dp_shard": "-1"}),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", {"layout.zero": "2"}),
        ("--fp8-format hybrid --fp8-recipe mxfp8", {"train.precision": "fp8", "train.fp8_scaling": "mxfp8"}),
        (
            "--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 4",
            {"layout.ep": "4", "layout.dp_shard": "-1"},
        ),
        (
            "--num-experts 8 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1",
            {"layout.ep": "1"},
        ),
        (
            "--num-experts 8 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --sequence-parallel",
            {"layout.ep": "8", "layout.etp": "1"},
        ),
        (
            "--num-experts 8 --moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 1024 "
            "--moe-layer-freq [0]*2+[1]*30",
            {"model.moe.n_shared": "2", "model.moe.n_dense_layers": "2"},
        ),
        (
            "--multi-latent-attention --kv-lora-rank 256 --q-lora-rank 512",
            {"model.mla.kv_rank": "256", "model.mla.q_rank": "512"},
        ),
        (
            "--multi-latent-attention --kv-lora-rank 256 --experimental-attention-variant dsa --dsa-indexer-topk 1024 "
            "--dsa-indexer-n-heads 32 --dsa-indexer-head-dim 64 --dsa-indexer-loss-coeff 0.1 --dsa-kernel-backend none",
            {
                "model.sparse.top_k": "1024",
                "model.sparse.index_heads": "32",
                "model.sparse.index_head_dim": "64",
                "model.sparse.index_loss": "0.1",
            },
        ),
        ("--context-parallel-size 2 --cp-comm-type a2a", {"layout.cp": "2", "layout.cp_ulysses": "2"}),
        ("--mtp-num-layers 1", {"model.n_layers": "33", "model.mtp": "1", "layout.pp_cut": "16+17"}),
        ("--tensor-model-parallel-size 2", {"layout.tp": "2"}),
        ("--window-size 127,0 --window-attn-skip-freq 2", {"model.window": "128", "model.full_every": "2"}),
    ],
)
def test_what_arguments_mean_together(tmp_path, more, expected):
    theirs = script(tmp_path, more)
    assert theirs.unknown == ()
    found = settings(theirs)
    assert {path: found.get(path) for path in expected} == expected


def test_what_of_an_indexer_is_not_read_is_said(tmp_path):
    attention = "--multi-latent-attention --experimental-attention-variant"
    theirs = script(tmp_path, f"{attention} dsa --dsa-indexer-topk 8 --dsa-indexer-topk-freq 4")
    assert set(theirs.needed) >= {"model.sparse.index_heads", "model.sparse.index_head_dim"}
    assert [each.why for each in theirs.without_counterpart if each.affects] == [
        "every layer is predicted with an indexer of its own"
    ]
    other = script(tmp_path, f"{attention} dsv4_hybrid --dsa-indexer-topk 8")
    assert "model.sparse.top_k" not in settings(other)
    assert {
        each.why: each.affects for each in other.without_counterpart if "dsa" in each.name or "variant" in each.name
    } == {
        "this kind of attention is not read; that of the other arguments is predicted": True,
        "no layer has an indexer": False,
    }


def test_all_problems_at_once(tmp_path):
    more = "--fp16 --num-layers-per-virtual-pipeline-stage 5 --moe-layer-freq [0]*3 --num-experts 2 --clip-grad x"
    with pytest.raises(JobError) as error:
        job(script(tmp_path, more))
    text = "\n".join(error.value.problems)
    assert [part for part in ("--fp16", "not an integer", "lists 3 layers") if part not in text] == []


def test_what_is_not_understood_is_named(tmp_path):
    theirs = script(tmp_path, "--no-such-name 3 --pipeline-model-parallel-size $(nproc) --position-embedding-type odd")
    assert {each.name for each in theirs.unknown} == {
        "--no-such-name",
        "--pipeline-model-parallel-size",
        "--position-embedding-type",
    }
    assert [each.path for each in theirs.unknown if "pipeline" in each.name] == ["layout.pp"]


@pytest.mark.parametrize(
    "more",
    [
        *("--recompute-granularity foo", "--recompute-method foo", "--fp8-format hybrid --fp8-recipe foo"),
        *("--use-megatron-fsdp --data-parallel-sharding-strategy foo", "--activation-func torch.nn.functional.mish"),
        *("--num-experts 8 --moe-token-dispatcher-type foo", "--cuda-graph-impl foo", "--batch-size 3"),
        "--fp8-format e5m2",
    ],
)
def test_a_word_that_means_nothing_here_is_no_default(tmp_path, more):
    assert [each.name for each in script(tmp_path, more).unknown] == [more.split()[-2]]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("pretrain_gpt.py", "pretrain_gpt.py \\\n  # --swiglu \\\n  --bf16", "line 21 begins a command with --bf16"),
        ("pretrain_gpt.py", "pretrain_gpt.py --moe-layer-freq ([0]*1)", r"line 19 has a \( outside of quotes"),
        ("--vocab-size 50257", "--vocab-size 50257 --context-parallel-size", "context-parallel-size: needs a value"),
    ],
)
def test_what_a_shell_reads_otherwise_than_it_looks(tmp_path, before, after, said):
    with pytest.raises(JobError, match=said):
        script(tmp_path, text=GPT.replace(before, after))


def test_two_trainings_of_one_script(tmp_path):
    again = "torchrun pretrain_gpt.py ${ARGS[@]}"
    assert script(tmp_path, text=f"{GPT}echo {again}\n").unknown == ()
    [unknown] = script(tmp_path, text=f"{GPT}{again} --swiglu\n").unknown
    assert unknown.why == "another command trains, too, with other options"


def test_query_groups_need_their_switch(tmp_path):
    theirs = script(tmp_path, "--num-query-groups 8")
    assert "model.n_kv_heads" not in settings(theirs)
    assert ["heeds it with group_query_attention only" in e.why for e in theirs.without_counterpart].count(True) == 1


def test_yaml_with_one_argument_in_two_sections(tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text("language_model: {num_layers: 4}\nmodel_parallel: {num_layers: 8, tensor_model_parallel_size: 2}\n")
    with pytest.raises(JobError, match="model_parallel.num_layers 8: line 1 has language_model.num_layers 4: keep one"):
        read(path)


def test_values_without_a_counterpart_say_whether_they_matter(tmp_path):
    theirs = script(tmp_path, "--tp-comm-overlap --log-interval 3 --data-path $1")
    assert {
        each.name: each.affects
        for each in theirs.without_counterpart
        if each.name in ("--tp-comm-overlap", "--log-interval", "--data-path")
    } == {
        "--tp-comm-overlap": True,
        "--log-interval": False,
        "--data-path": False,
    }


def test_a_layout_is_written_back_in_their_lines(tmp_path):
    theirs = script(tmp_path, "--recompute-activations")
    before = job(theirs).layout
    after = Layout(dp_shard=8, zero=1, tp=2, pp=2, sp=True, schedule="interleaved_1f1b", pp_chunks=2, micro_batch=2)
    lines = {(each.line, each.before.strip(), each.after.strip()) for each in write_back(theirs, before, after)}
    assert (4, "TP=4", "TP=2") in lines
    assert (11, "--micro-batch-size 1", "--micro-batch-size 2") in lines
    assert {
        (0, "", line)
        for line in ("--sequence-parallel", "--use-distributed-optimizer", "--num-virtual-stages-per-pipeline-rank 2")
    } <= lines
    assert not [line for line in lines if "pipeline-model-parallel-size" in line[2]]


def test_what_their_format_has_no_name_for_is_noted(tmp_path):
    theirs = script(tmp_path)
    notes = [each.note for each in write_back(theirs, job(theirs).layout, Layout(tp=4, pp=2, tiles=4)) if each.note]
    assert notes == ["tiles=4: Megatron-LM has no name for it"]


@pytest.mark.parametrize("name", ["MODEL_ARGS", ""])
def test_yaml(tmp_path, name):
    inner = {
        "num_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "seq_length": 128,
        "vocab_size": 512,
        "bf16": "true",
    }
    rows = [f"{'--' + key.replace('_', '-') if name else key}: {value}" for key, value in inner.items()]
    path = tmp_path / "model.yaml"
    path.write_text("\n".join([f"{name}:", *(f"  {row}" for row in rows)] if name else rows))
    theirs = read(path)
    assert (theirs.kind, theirs.unknown) == ("Megatron-LM (YAML)", ())
    assert [settings(theirs)[path] for path in ("model.n_layers", "train.precision")] == ["4", "bf16"]


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"hello", b"a: [", b"{}", b"#!/bin/bash\nrm -rf /\n", b"import os\n"]
)
def test_files_of_no_known_kind(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(JobError, match="known kind|UTF-8"):
        read(path)


def test_patterns_of_layers():
    assert [frequencies("([0]*2+[1]*3)"), frequencies("2")] == [[0, 0, 1, 1, 1], 2]
    for text in ("__import__('os')", "[1]*10**9", "[2]", "0", "[", "[1]*-1"):
        with pytest.raises(ValueError, match="expected"):
            frequencies(text)
    assert layout_sizes("Et*2|(tt|)*2,m|L") == [2, 2, 2, 1, 0]
    assert layout_sizes([["embedding", "decoder"], ["decoder", "loss"]]) == [1, 1]
    assert layout_sizes("Ex|L") == []


@pytest.mark.parametrize("table", sorted({each.table for each in FORMATS}))
def test_tables_name_fields_and_their_sources(table):
    found = table_of(table)
    assert all(page.startswith("https://") for page in found.source)
    assert not {each.path for each in found.names.values() if each.path} - set(leaves())


def test_framework_names_are_known(tmp_path):
    assert script(tmp_path).framework in FRAMEWORKS


def test_more_tokens_than_positions_are_refused_as_megatron_refuses_them(tmp_path):
    with pytest.raises(JobError, match="1,024 positions for sequences of 2,048 tokens.*nearest: 2048"):
        script(tmp_path, "--max-position-embeddings 1024")


@pytest.mark.parametrize(
    ("before", "more", "name"),
    [
        ("MORE_ARGS=$(cat args)\n", "$MORE_ARGS", "--vocab-size"),
        ('eval "$(cat env)"\n', "", "eval"),
        ("[ -f a.sh ] && . ./a.sh\n", "", "source"),
        ("exit 0\n", "", "command"),
    ],
)
def test_a_script_that_does_more_than_is_read_says_so(tmp_path, before, more, name):
    text = GPT.replace("GPUS_PER_NODE=8\n", f"GPUS_PER_NODE=8\n{before}")
    assert name in [each.name for each in script(tmp_path, more, text).unknown]


@pytest.mark.parametrize("more", ["--fp8-format hybrid --fp4-format e2m1", "--train-iters 10 --train-samples 1280"])
def test_what_megatron_refuses_together(tmp_path, more):
    with pytest.raises(JobError, match="exclude each other"):
        script(tmp_path, more)


def test_arguments_before_the_first_option_are_not_lost(tmp_path):
    lost = script(tmp_path, text=GPT.replace("pretrain_gpt.py", "pretrain_gpt.py ${BASE/a/b}"))
    assert [each.name for each in lost.unknown] == ["arguments"]
    assert script(tmp_path, text=GPT.replace("pretrain_gpt.py", "pretrain_gpt.py $@ $EXTRA")).unknown == ()


@pytest.mark.parametrize(
    ("launcher", "nodes", "each"),
    [
        ("deepspeed --num_gpus 4 --num_nodes=2", "2", "4"),
        ("srun --nodes=4 --ntasks-per-node=8 python", "4", "8"),
        ("srun -N 4 -n 32 python", "4", "8"),
        ("srun -N 4 -n 4 torchrun --nproc_per_node 8", "4", "8"),
        ("mpirun -np 64 python", "8", "8"),
        ("accelerate launch --num_processes 16 --num_machines 2", "2", "8"),
        ("#SBATCH -N 2-4\n#SBATCH --gres=gpu:h100:8\nsrun python", "4", "8"),
        ("#SBATCH --gpus-per-node=8\ntorchrun --nproc_per_node 4 --nnodes 2", "2", "4"),
        ("taskset -n 3 python", None, None),
    ],
)
def test_launchers_say_how_many_devices_there_are(tmp_path, launcher, nodes, each):
    text = GPT.replace("torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES", launcher)
    theirs = script(tmp_path, text=text)
    found = settings(theirs)
    assert (found.get("cluster.nodes"), found.get("cluster.devices_per_node")) == (nodes, each)
    assert theirs.unknown == ()


@pytest.mark.parametrize(
    ("launcher", "said"),
    [
        ("srun -N 3 -n 32 python", "32 processes are not 3 nodes × 10"),
        ("srun -n 10 --ntasks-per-node=4 python", "10 processes are not 2 nodes × 4"),
        ("srun -N 2 -n 16 --ntasks-per-node=4 python", "16 processes are not 2 nodes × 4"),
    ],
)
def test_processes_that_nodes_do_not_share_evenly_are_refused(tmp_path, launcher, said):
    """The last two were read as 2 nodes of 5 and of 8."""
    text = GPT.replace("torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES", launcher)
    with pytest.raises(JobError, match=said):
        script(tmp_path, text=text)


def test_nodes_that_are_assumed_say_so(tmp_path):
    text = GPT.replace("torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES", "mpirun -np 64 python")
    assert any("nodes of 8 devices" in each.how for each in script(tmp_path, text=text).became)
