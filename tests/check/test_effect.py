"""Every field has an effect in each job, or a stated condition: what is set in vain is refused by name."""

from __future__ import annotations

import pytest

from phalanx.check.effect import CONDITIONS
from phalanx.check.load import from_dict, load_file, load_words
from phalanx.check.show import as_dict
from phalanx.config.fields import leaves
from phalanx.config.overrides import parse
from phalanx.errors import JobError

ELSEWHERE = {
    "model": """
        preset from n_layers d_model n_heads n_kv_heads head_dim d_ff vocab_size seq_len window full_every
        attention feed_forward norm norm_place parallel_block positions activation bias qkv_bias qk_norm sinks
        attention_scale attention_softcap logit_softcap scaled_embedding tied dropout norm_eps window_rope_theta
        init_std moe.n_experts mla.kv_rank lora.rank
    """,
    "layout": """
        auto dp_replicate dp_shard cp cp_ulysses tp pp ep hpz quantise_weights
        quantise_gradients accumulate tiles sp_regather
        micro_batch accumulation recompute recompute_cut loss_chunk offload
        sync
    """,
    "data": """
        corpus mix document_mask val_fraction limit_mb dir workers prefetch on_corruption skip_quota
    """,
    "optimizer": """
        name lr betas eps momentum nesterov newton_schulz options weight_decay clip schedule warmup_steps
        batch_scaling
    """,
    "train": """
        steps global_batch precision gradients seed compile cpu_linear deterministic log_every eval_every
        eval_samples dpo.beta dpo.label_smoothing profile.steps profile.ranks profile.memory profile.python
    """,
    "checkpoint": """
        every every_minutes verify background on_failure timeout_s remote
    """,
    "guard": """
        every repeat_every on_corruption on_spike on_nan limit
    """,
    "run": """
        name dir threads device_budget_mib timeout_s hang_s grace_s max_restarts nnodes
        trackers report live log_level all_ranks sample_tokens
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
    "optimizer.outer_lr": "0.5",
    "optimizer.decay_fraction": "0.5",
    "optimizer.base_batch": "8",
    "data.path": "book.txt",
    "data.template": "chatml",
    "data.loss_on": "all",
    "data.packing": "true",
    "data.bpe_vocab": "300",
    "data.random_vocab": "300",
    "data.columns": "[a:b]",
    "model.ignore_config": "[colour]",
}


@pytest.mark.parametrize(("path", "value"), SET.items())
def test_a_field_without_effect_is_refused_with_its_condition(path: str, value: str) -> None:
    with pytest.raises(JobError) as caught:
        load_words(parse([f"{path}={value}"]))
    assert path in str(caught.value)
    assert CONDITIONS[path][1] in str(caught.value) or "nearest legal" in str(caught.value)


def test_a_default_that_is_spelled_out_is_none() -> None:
    job = load_words(parse(["model.moe.z_loss=0", "data.packing=false", "optimizer.decay_fraction=0.2"])).job
    assert from_dict(as_dict(job), "itself") == job


def test_every_field_is_in_one_of_the_two_tables() -> None:
    elsewhere = {f"{section}.{name}" for section, names in ELSEWHERE.items() for name in names.split()}
    fields = {path for path in leaves() if not path.startswith("cluster.")}
    assert elsewhere | CONDITIONS.keys() == fields
    assert not elsewhere & CONDITIONS.keys()


def test_layout_options_of_a_file_rest_where_the_command_line_changes_the_layout(tmp_path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("layout: {tp: 2, sp: true}\n")
    assert load_file(path, ["layout.tp=2"]).answers == load_file(path).answers
    (told,) = (each for each in load_file(path, ["layout.tp=1"]).answers if "layout.sp" in each)
    assert told.endswith("layout.tp above 1; the command line changes the layout")
    with pytest.raises(JobError, match="layout.sp=true: has no effect here"):
        load_file(path, ["layout.tp=1", "layout.sp=true"])


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


def test_rows_for_padding_have_their_effect_but_not_beside_weights(tmp_path) -> None:
    assert load_words(parse(["data.tokenizer=byte", "model.vocab_size=512"])).job.model.vocab_size == 512
    (tmp_path / "config.yaml").write_text("model: {n_layers: 2}\n")
    with pytest.raises(JobError, match="with model.from the embedding has the rows of those weights"):
        load_words(parse([f"model.from={tmp_path}", "model.vocab_size=512"]))
