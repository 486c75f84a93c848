"""Every field has an effect in each job, or a stated condition: what is set in vain is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.check.effect import CONDITIONS
from phalanx.check.load import as_dict, from_dict, load_file, load_words
from phalanx.config.corpora import vocabulary_of
from phalanx.config.fields import leaves
from phalanx.config.overrides import parse
from phalanx.data.settings import vocabulary_size
from phalanx.data.tokenizer import ByteTokenizer
from phalanx.errors import JobError
from phalanx.train.run_directory import RunDirectory
from phalanx.train.start import vocabulary_of as vocabulary_of_run

ELSEWHERE = {
    "model": """
        preset from n_layers d_model n_heads n_kv_heads head_dim vocab_size seq_len
        shared_keys layer_embedding
        window_pattern query_growth.rate attention feed_forward norm norm_place parallel_block positions activation
        bias qk_norm sinks
        attention_scale attention_softcap logit_softcap scaled_embedding tied reward embedding_multiplier v_norm
        values_are_keys layer_scale
        residual_multiplier logit_divisor
        dropout norm_eps window_rope_theta
        init_std moe.n_experts mla.kv_rank lora.rank mtp
    """,
    "layout": """
        auto dp_replicate dp_shard cp cp_ulysses tp pp ep hpz quantise_weights
        quantise_gradients accumulate tiles sp_regather
        micro_batch accumulation recompute recompute_cut loss_chunk offload
        sync compression
    """,
    "data": """
        corpus mix document_mask val_fraction dir prefetch on_corruption
    """,
    "optimizer": """
        name lr betas eps momentum nesterov newton_schulz state master options weight_decay clip schedule warmup_steps
        batch_scaling
    """,
    "train": """
        steps global_batch batch_ramp seq_ramp precision seed compile cpu_linear deterministic log_every
        eval_samples label_smoothing neftune_alpha dpo.beta dpo.label_smoothing grpo.group grpo.reward grpo.pattern
        grpo.max_new_tokens grpo.temperature grpo.updates grpo.clip grpo.clip_high grpo.beta grpo.scale
        grpo.average grpo.max_batch grpo.max_gap grpo.on_gap profile.steps profile.ranks profile.memory profile.python
    """,
    "plan": """
        headroom
    """,
    "checkpoint": """
        every every_minutes verify background on_failure timeout_s stripes remote
    """,
    "guard": """
        every repeat_every on_corruption on_spike on_nan limit
    """,
    "run": """
        name dir threads device_budget_mib timeout_s hang_s grace_s max_restarts min_replicas nnodes
        trackers report live log_level all_ranks sample_tokens metrics_port
    """,
}
"""Fields by section that have an effect in every job, or whose condition another rule of check/ states. A new field
fails the test below until it is here or in CONDITIONS. Every field of `cluster` describes the machine."""
SET = {
    "model.moe.z_loss": "10",
    "model.moe.aux_loss": "0.1",
    "model.moe.capacity": "2",
    "model.mla.q_rank": "8",
    "model.lora.alpha": "8",
    "model.rope_scaling.kind": "yarn",
    "data.skip_quota": "5",
    "layout.zero": "1",
    "layout.bucket_mb": "50",
    "layout.data_parallel": "threads",
    "checkpoint.keep_every": "100",
    "checkpoint.keep_best": "true",
    "layout.sp": "true",
    "layout.schedule": "zb_h1",
    "layout.pp_cut": "1+3",
    "layout.reshard": "false",
    "layout.tile": "head",
    "layout.offload_to": "/tmp",
    "layout.sync_every": "3",
    "guard.spike_norm": "9",
    "run.node_lost_s": "5",
    "run.sync_grace_s": "5",
    "optimizer.outer_lr": "0.5",
    "optimizer.decay_fraction": "0.5",
    "optimizer.base_batch": "8",
    "optimizer.rounding": "nearest",
    "data.path": "book.txt",
    "data.template": "chatml",
    "data.loss_on": "all",
    "data.packing": "true",
    "data.bpe_vocab": "300",
    "data.random_vocab": "300",
    "data.columns": "[a:b]",
    "model.ignore_config": "[colour]",
    "train.gradients": "fp32",
}


@pytest.mark.parametrize(("path", "value"), SET.items())
def test_a_field_without_effect_is_refused_with_its_condition(path: str, value: str) -> None:
    with pytest.raises(JobError) as caught:
        load_words(parse([f"{path}={value}"]))
    assert path in str(caught.value)
    assert CONDITIONS[path][1] in str(caught.value) or "nearest legal" in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("model.positions=rope model.rope_scaling.factor=2 beta_fast=3", "and model.rope_scaling.kind=yarn"),
        (
            "model.positions=rope model.rope_scaling.factor=2 model.rope_scaling.kind=linear original_seq_len=64",
            "=llama3 or yarn",
        ),
        (
            "model.moe.n_experts=4 model.moe.d_ff=32 model.d_ff=64",
            "model.d_ff=64: has no effect here: it is for dense MLPs",
        ),
        ("window=8 full_every=1", "command line: window=8: model.window: has no effect here: it is for layers with a"),
        ("window=8 window_pattern=full", "model.window: has no effect here"),
        ("window=8 n_layers=4 full_every=5", "full_every=5: model.full_every: has no effect here: it is for models of"),
        (
            "model.bias=true qkv_bias=true",
            "qkv_bias=true: model.qkv_bias: has no effect here: it is for model.bias=false",
        ),
        (
            "min_lr=1e-5 schedule=constant",
            "min_lr=1e-5: optimizer.min_lr_ratio: has no effect here: it is for a schedule",
        ),
        ("eval_samples=0 eval_every=10", "it is for train.eval_samples above 0"),
        ("data=random limit_mb=3", "limit_mb=3: data.limit_mb: has no effect here: it is for a corpus of text"),
        ("train.dpo.beta=0.5", "command line: train.dpo.beta=0.5: is for pairs"),
    ],
)
def test_a_field_whose_kind_does_not_use_it_is_refused(words: str, said: str) -> None:
    with pytest.raises(JobError) as caught:
        load_words(parse(words.split()))
    assert said in str(caught.value)


@pytest.mark.parametrize("switch", ["0", "1"])
def test_a_budget_that_reads_like_a_switch_is_refused(switch: str) -> None:
    """recompute=1 would keep everything, as torch's activation_memory_budget does, and recompute=0 nothing."""
    with pytest.raises(JobError, match=f"layout.recompute={switch}: must be above 0 and below 1"):
        load_words(parse([f"layout.recompute={switch}"]))


def test_a_default_that_is_spelled_out_is_none() -> None:
    job = load_words(parse(["model.moe.z_loss=0", "data.packing=false", "optimizer.decay_fraction=0.2"])).job
    assert from_dict(as_dict(job), "itself") == job


def test_every_field_is_in_one_of_the_two_tables() -> None:
    elsewhere = {f"{section}.{name}" for section, names in ELSEWHERE.items() for name in names.split()}
    fields = {path for path in leaves() if not path.startswith("cluster.") or path in CONDITIONS}
    assert elsewhere | CONDITIONS.keys() == fields
    assert not elsewhere & CONDITIONS.keys()


def test_layout_options_of_a_file_rest_where_the_command_line_changes_the_layout(tmp_path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("layout: {tp: 2, sp: true}\n")
    assert load_file(path, ["layout.tp=2"]).answers == load_file(path).answers
    (told,) = (each for each in load_file(path, ["layout.tp=1"]).answers if "layout.sp" in each)
    assert told.endswith("layout.tp above 1; the command line changes that")
    with pytest.raises(JobError, match="layout.sp=true: has no effect here"):
        load_file(path, ["layout.tp=1", "layout.sp=true"])


def test_what_the_command_line_makes_idle_is_said_and_what_was_idle_before_is_refused(tmp_path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("data: {limit_mb: 1}\ntrain: {eval_every: 10}\n")
    said = load_file(path, ["eval_samples=0", "data=random"]).answers
    assert [each.partition(": has")[0] for each in said] == [f"{path}:1: data.limit_mb", f"{path}:2: train.eval_every"]
    path.write_text("layout: {zero: 1}\n")
    with pytest.raises(JobError, match="layout.zero: has no effect here"):
        load_file(path, ["train.steps=5", "layout.tp=2"])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("data.tokenizer=byte model.vocab_size=100", "is 100, and data.tokenizer=byte has 256 tokens"),
        ("data.tokenizer=bpe bpe_vocab=300 model.vocab_size=280", "set at least 300; more rows are padding"),
        (
            "model=gpt2 data.tokenizer=byte model.vocab_size=50257",
            "has no effect here: it is that of the preset's own tokenizer, and the embedding gets the rows of "
            "data.tokenizer; another number of rows, such as 50304, pads it",
        ),
    ],
)
def test_a_vocabulary_that_the_tokenizer_excludes_is_refused(argv: str, said: str) -> None:
    with pytest.raises(JobError) as caught:
        load_words(parse(argv.split()))
    assert said in str(caught.value)


def test_rows_for_padding_have_their_effect() -> None:
    assert load_words(parse(["data.tokenizer=byte", "model.vocab_size=512"])).job.model.vocab_size == 512


@pytest.mark.parametrize(
    ("content", "tokens"),
    [
        ({"model": {"vocab": {"a": 0, "b": 300}}, "added_tokens": [{"id": 311, "content": "<eos>"}]}, 312),
        ({"model": {"vocab": [["a", 0.0], ["b", -1.0]]}, "added_tokens": None}, 2),
        ({"format": "phalanx-tokenizer", "version": 1, "kind": "char", "characters": "abc", "unknown": True}, 4),
        ({"format": "phalanx-tokenizer", "version": 1, "kind": "byte"}, 256),
        ({"model": {"vocab": "abc"}}, 0),
        ([1, 2], 0),
    ],
)
def test_the_vocabulary_of_a_tokenizer_file_is_known_without_a_corpus(content: object, tokens: int, tmp_path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    words = ["data.corpus=text", f"data.path={tmp_path}", f"data.tokenizer={path}"]
    assert vocabulary_of(load_words(parse(words)).job.data) == tokens
    if tokens > 1:
        with pytest.raises(JobError, match=f"is {tokens - 1:,}, and data.tokenizer={path} has {tokens:,} tokens"):
            load_words(parse([*words, f"model.vocab_size={tokens - 1}"]))


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        ("model=gpt2", 50257),
        ("model=gpt2 data.tokenizer=byte", 256),
        ("model=gpt2 data.tokenizer=bpe", 4096),
        ("model=gpt2 data=random random_vocab=300", 300),
        ("model=gpt2 data.tokenizer=byte model.vocab_size=50304", 50304),
        ("data.tokenizer=byte", 256),
    ],
)
def test_predictions_have_the_rows_of_training(words: str, rows: int) -> None:
    job = load_words(parse(words.split())).job
    assert vocabulary_size(job) == rows
    if tokens := vocabulary_of(job.data):
        assert vocabulary_of_run(job, RunDirectory(job), tokens) == rows


def test_rows_of_a_preset_that_give_way_are_said() -> None:
    assert not load_words(parse(["model=gpt2"])).answers
    [said] = load_words(parse(["model=gpt2", "data.tokenizer=byte"])).answers
    assert said == "model.vocab_size: 50,257 rows of gpt2 give way to the 256 of data.tokenizer=byte"


def run_of(folder: Path) -> Path:
    """Writes what a job reads of a finished run of bytes."""
    (folder / "config.yaml").write_text("model: {preset: gpt2, n_layers: 2, vocab_size: 50257}\n")
    (folder / "tokenizer.json").write_text(ByteTokenizer().definition())
    return folder


def test_weights_bring_their_rows(tmp_path) -> None:
    run = run_of(tmp_path)
    assert vocabulary_size(load_words(parse([f"model.from={run}"])).job) == 256
    assert load_words(parse([f"model.from={run}", "model.vocab_size=256"])).job.model.vocab_size == 256
    with pytest.raises(JobError, match=f"is 512, and the embedding of {run} has 256 rows: leave it out"):
        load_words(parse([f"model.from={run}", "model.vocab_size=512"]))
    with pytest.raises(
        JobError, match="data.tokenizer=bpe: bpe has 4,096 tokens, and the embedding of .* has 256 rows"
    ):
        load_words(parse([f"model.from={run}", "data.tokenizer=bpe"]))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.n_layers=3"], "command line: model.n_layers=3: the model has other parameters than .* n_layers 3 "),
        (["model.tied=false", "model.bias=false"], r"bias=false: .*: bias False \(there True\), tied False"),
        (["model=llama3-8b"], "model=llama3-8b: model.preset: the model has other parameters"),
    ],
)
def test_a_shape_that_the_weights_do_not_have_is_refused_before_ranks_start(words, said, tmp_path) -> None:
    with pytest.raises(JobError, match=said):
        load_words(parse([f"model.from={run_of(tmp_path)}", *words]))
    assert load_words(parse([f"model.from={tmp_path}", "model.lora.rank=4", "model.dropout=0.1"])).job


@pytest.mark.parametrize(
    ("path", "words"), [("train.eval_every", ()), ("guard.spike_warmup", ("guard.on_spike=skip",))]
)
def test_an_interval_beyond_the_last_step_is_said(tmp_path, path: str, words: tuple[str, ...]):
    (tmp_path / "job.yaml").write_text("train: {steps: 20}\ncluster: {device: cpu}\n")
    said = load_words(parse([str(tmp_path / "job.yaml"), f"{path}=21", *words])).answers
    assert any(f"{path}=21: train.steps=20 does not reach step 21: " in answer for answer in said)
    assert not load_words(parse([str(tmp_path / "job.yaml"), f"{path}=20", *words])).answers


def test_a_job_that_the_command_line_shortens_keeps_its_intervals_in_peace(tmp_path):
    (tmp_path / "job.yaml").write_text("train: {steps: 20, eval_every: 10}\ncluster: {device: cpu}\n")
    assert not load_words(parse([str(tmp_path / "job.yaml"), "train.steps=5"])).answers
