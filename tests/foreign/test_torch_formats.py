"""Files of torchtitan, NeMo AutoModel, Axolotl, DeepSpeed and accelerate as jobs, and layouts written back into them.

The inputs are made here, with figures of the examples that those projects publish."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.blocks.parameters import count
from phalanx.check.load import load_words
from phalanx.config import overrides
from phalanx.config.fields import leaves
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.cost.frameworks import FRAMEWORKS
from phalanx.errors import JobError
from phalanx.foreign.frame import ForeignJob, table_of
from phalanx.foreign.read import read, write_back
from phalanx.foreign.shared import cut_of

FORMATS = ("torchtitan", "automodel", "axolotl", "deepspeed", "accelerate")


def put(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def job(theirs: ForeignJob, *words: str) -> Job:
    line = overrides.parse(words)
    line.base = list(theirs.settings)
    return load_words(line).job


def settings(theirs: ForeignJob) -> dict[str, object]:
    return {each.path: each.text for each in theirs.settings}


def left(theirs: ForeignJob) -> dict[str, bool]:
    return {each.name: each.affects for each in theirs.without_counterpart}


def after(theirs: ForeignJob, before: str, best: str) -> list[tuple[int, str]]:
    def layout(text: str) -> Layout:
        return job(theirs, "cluster=dgx-h100:8", *text.split()).layout

    changed = write_back(theirs, layout(before), layout(best))
    return [(each.line, each.note or each.after.strip()) for each in changed]


@pytest.mark.parametrize("table", FORMATS)
def test_tables_name_fields_and_pages(table):
    found = table_of(table)
    assert all(page.startswith("https://") for page in found.source)
    assert not {each.path for each in found.names.values() if each.path} - set(leaves())


TITAN = """\
[model]
name = "llama3"
flavor = "8B"  # as published
[optimizer]
lr = 3e-4
[lr_scheduler]
warmup_steps = 200
[training]
local_batch_size = 1
seq_len = 8192
steps = 1000
MORE
[parallelism]
data_parallel_shard_degree = -1
AXES
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""


def titan(tmp_path: Path, more: str = "", axes: str = "", text: str = TITAN) -> ForeignJob:
    return read(put(tmp_path, "job.toml", text.replace("MORE", more).replace("AXES", axes)))


def test_a_toml_of_torchtitan_is_the_job_that_it_means(tmp_path):
    theirs = titan(tmp_path, more="[compile]\nenable = true")
    assert (theirs.kind, theirs.unknown, theirs.framework) == ("torchtitan", (), "torchtitan-2025")
    found = job(theirs, "cluster=dgx-h100:8")
    assert (found.model.preset, found.model.seq_len, found.train.precision) == ("llama3.1-8b", 8192, "bf16")
    assert (found.layout.dp_shard, found.layout.zero, found.layout.reshard) == (64, 3, True)
    assert (found.layout.micro_batch, found.layout.accumulation, found.layout.recompute) == (1, 1, "selective")
    assert (found.optimizer.schedule, found.optimizer.warmup_steps, found.optimizer.min_lr_ratio) == ("linear", 200, 0)


@pytest.mark.parametrize(
    ("name", "flavor", "axes", "batch", "line"),
    [
        ("llama3", "70B", "tensor_parallel_degree = 8", 8, "dp_shard=8 tp=8 sp=true"),
        ("llama3", "405B", "tensor_parallel_degree = 8", 2, "dp_shard=8 tp=8 sp=true"),
        ("llama4", "17bx16e", "tensor_parallel_degree = 8", 8, "dp_shard=8 tp=8 sp=true"),
        ("deepseek_v3", "671B", "expert_parallel_degree = 8", 4, "dp_shard=64 ep=8"),
        ("deepseek_v3", "16B", "expert_parallel_degree = 8", 4, "dp_shard=64 ep=8"),
        (
            *("deepseek_v3", "16B", "tensor_parallel_degree = 4\nexpert_parallel_degree = 8", 4),
            "dp_shard=16 tp=4 sp=true ep=8 etp=1",
        ),
        ("qwen3", "32B", "context_parallel_degree = 2", 2, "dp_shard=32 cp=2"),
        ("gpt_oss", "debugmodel", "", 8, "dp_shard=64"),
    ],
)
def test_models_and_degrees_of_published_files(tmp_path, name, flavor, axes, batch, line):
    text = TITAN.replace('"llama3"', f'"{name}"').replace('"8B"', f'"{flavor}"').replace("= 1\n", f"= {batch}\n", 1)
    theirs = titan(tmp_path, axes=axes, text=text)
    assert theirs.unknown == ()
    layout = job(theirs, "cluster=dgx-h100:8").layout
    shown = {name: str(getattr(layout, name)).lower() for name in ("dp_shard", "tp", "cp", "ep", "etp", "sp")}
    assert {
        **dict.fromkeys(("tp", "cp", "ep"), "1"),
        "sp": "false",
        "etp": "0",
        **dict(w.split("=") for w in line.split()),
    } == shown
    assert layout.micro_batch == batch


@pytest.mark.parametrize(
    ("name", "flavor", "billions"),
    [
        ("llama4", "17bx16e", 107.8),
        ("llama4", "17bx128e", 400.7),
        ("deepseek_v3", "16B", 15.7),
        ("deepseek_v3", "236B", 235.7),
    ],
)
def test_shapes_have_as_many_parameters_as_their_names_say(tmp_path, name, flavor, billions):
    theirs = titan(tmp_path, text=TITAN.replace('"llama3"', f'"{name}"').replace('"8B"', f'"{flavor}"'))
    assert count(job(theirs, "cluster=dgx-h100:8").model) / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_pipeline_of_torchtitan(tmp_path):
    axes = 'pipeline_parallel_degree = 2\npipeline_parallel_schedule = "Interleaved1F1B"\n'
    theirs = titan(tmp_path, more="", axes=axes, text=TITAN.replace("local_batch_size = 1", "local_batch_size = 8"))
    layout = job(theirs, "cluster=dgx-h100:8").layout
    assert (layout.schedule, layout.pp_chunks, layout.pp_cut) == ("interleaved_1f1b", 2, "8+9+8+7")
    assert (layout.micro_batch, layout.accumulation, layout.reshard) == (1, 8, False)
    assert cut_of(32, 4, 1, 1) == "8+9+8+7"
    assert cut_of(2, 4, 1, 1) == ""  # a stage without a layer has no cut here


def test_names_of_torchtitan_before_its_first_release(tmp_path):
    text = TITAN.replace("[parallelism]", "[experimental]").replace("local_batch_size = 1", "batch_size = 32")
    text = text.replace("[lr_scheduler]\nwarmup_steps = 200\n[training]", "[training]\nwarmup_steps = 200")
    theirs = titan(tmp_path, axes="pipeline_parallel_degree = 4\npipeline_parallel_schedule = '1F1B'", text=text)
    assert theirs.unknown == ()
    found = {each.path: each.text for each in theirs.settings}
    assert (found["layout.pp"], found["layout.micro_batch"], found["layout.accumulation"]) == ("4", "8", "4")


def test_other_words_of_torchtitan(tmp_path):
    more = 'global_batch_size = 128\nenable_cpu_offload = true\ndtype = "bfloat16"'
    text = TITAN.replace('selective_ac_option = "op"', 'selective_ac_option = "2"')
    theirs = titan(tmp_path, more=more, axes="enable_async_tensor_parallel = true", text=text)
    found = settings(theirs)
    assert found["layout.recompute_cut"] == "+".join(["1*none", "1*full"] * 16)
    assert (found["train.global_batch"], found["layout.offload"]) == ("128", "optimizer+parameters")
    assert theirs.recipe == {"parameter_bytes": 2, "state_bytes": 4, "gradient_bytes": 2}
    assert left(theirs)["parallelism.enable_async_tensor_parallel"] is False  # without compile it does nothing
    eight = TITAN.replace("# as published", '\nconverters = ["float8"]')
    gathers = "[quantize.linear.float8]\nenable_fsdp_float8_all_gather = true"
    found = settings(titan(tmp_path, more=gathers, text=eight))
    assert (found["train.precision"], found["train.fp8_scaling"]) == ("fp8", "tensorwise")
    assert found["layout.quantise_weights"] == "fp8"
    found = settings(titan(tmp_path, more=gathers))
    assert found["train.precision"] == "bf16"
    assert "layout.quantise_weights" not in found


DUMP = {
    "model_spec": {"name": "llama3", "flavor": "8B", "model": {"dim": 4096}},
    "optimizer": {"param_groups": [{"optimizer_name": "AdamW", "optimizer_kwargs": {"lr": 0.0003}}]},
    "training": {"num_tokens_per_microbatch_per_dp_rank": 16384, "max_context_length": 8192, "steps": 10},
    "parallelism": {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "num_pp_microbatches": 8},
    "activation_checkpoint": {"preserve_rng_state": True},
    "loss": {"num_chunks": 8},
}


def test_what_torchtitan_saves_as_json(tmp_path):
    theirs = read(put(tmp_path, "config.json", json.dumps(DUMP, indent=1)))
    assert (theirs.kind, theirs.unknown) == ("torchtitan", ())
    layout = job(theirs, "cluster=dgx-h100:8").layout
    assert (layout.micro_batch, layout.accumulation, layout.dp_shard, layout.sp) == (2, 8, 16, True)
    assert (layout.recompute, layout.loss_chunk, layout.schedule) == ("full", 2048, "1f1b")
    lines = after(theirs, "", "pp=1 dp_shard=32 tp=2 pp_cut= micro_batch=1 accumulation=4 schedule=1f1b recompute=none")
    assert (0, "[training] num_tokens_per_train_step = 1048576") in lines  # -1 would mean another batch


def test_a_layout_goes_back_into_toml(tmp_path):
    theirs = titan(tmp_path)
    lines = after(theirs, "", "dp_shard=32 tp=2 sp=true recompute=full micro_batch=2")
    assert lines == [
        (9, "local_batch_size = 2"),
        (14, "data_parallel_shard_degree = 32"),
        (17, 'mode = "full"'),
        (18, ""),
        (0, "[parallelism] tensor_parallel_degree = 2"),
    ]


AUTOMODEL = """\
recipe: BenchmarkingRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 512, local_batch_size: 8, max_steps: 30}
distributed:
  strategy: fsdp2
  dp_size: none
  tp_size: 1
  pp_size: 2
  ep_size: 8
  activation_checkpointing: true
  pipeline: {pp_schedule: interleaved1f1b, pp_microbatch_size: 2, layers_per_stage: 2}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_config
  config: {_target_: transformers.AutoConfig.from_pretrained, pretrained_model_name_or_path: Qwen/Qwen3-30B-A3B}
  backend: {attn: te, dispatcher: deepep}
optimizer: {_target_: torch.optim.Adam, lr: 1.0e-5, betas: [0.9, 0.999]}
MORE
"""


def automodel(tmp_path: Path, more: str = "dataset: {seq_len: 4096}", text: str = AUTOMODEL) -> ForeignJob:
    return read(put(tmp_path, "recipe.yaml", text.replace("MORE", more)))


def test_a_recipe_of_automodel(tmp_path):
    theirs = automodel(tmp_path)
    assert (theirs.kind, theirs.unknown, theirs.needed) == ("NeMo AutoModel", (), {})
    assert theirs.recipe["dispatcher"] == "deepep"
    found = job(theirs, "cluster=dgx-h100:4")
    assert (found.model.preset, found.model.seq_len) == ("qwen3-30b-a3b", 4096)
    layout = found.layout
    assert (layout.dp_shard, layout.pp, layout.ep, layout.pp_chunks, layout.micro_batch) == (16, 2, 8, 12, 2)
    assert (layout.recompute, layout.reshard, found.train.global_batch) == ("full", False, 512)


def test_the_first_seed_of_automodel_counts(tmp_path):
    for text, seed in (("rng: {seed: 2}", "2"), ("seed: 1\nrng: {seed: 2}", "1")):
        theirs = automodel(tmp_path, f"dataset: {{seq_len: 8}}\n{text}")
        assert (settings(theirs)["train.seed"], theirs.unknown) == (seed, ())


def test_automodel_asks_for_what_it_does_not_state(tmp_path):
    assert automodel(tmp_path, "").needed == {"model.seq_len": "the length of a sample in tokens"}
    packed = automodel(
        tmp_path, "packed_sequence: {packed_sequence_size: 1024}\npeft: {dim: 8, match_all_linear: true}"
    )
    found = settings(packed)
    assert (found["model.seq_len"], found["model.lora.rank"], found["model.lora.targets"]) == ("1024", "8", "all")
    other = automodel(tmp_path, text=AUTOMODEL.replace("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-31B-A3B"))
    (unknown,) = other.unknown
    assert (unknown.path, "no preset" in unknown.why) == ("model.preset", True)


AXOLOTL = """\
base_model: NousResearch/Llama-3.2-1B
sequence_len: 2048
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: adamw_torch_fused
learning_rate: 2e-5
bf16: auto
gradient_checkpointing: true
sample_packing: true
plugins:
  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin
MORE
"""


def axolotl(tmp_path: Path, more: str = "") -> ForeignJob:
    return read(put(tmp_path, "tune.yaml", AXOLOTL.replace("MORE", more)))


def test_axolotl_with_fsdp_and_adapters(tmp_path):
    more = "adapter: lora\nlora_r: 16\nlora_alpha: 32\nlora_target_modules: [q_proj, v_proj]\nfsdp_version: 2\n"
    theirs = axolotl(tmp_path, more + "fsdp_config: {reshard_after_forward: true, offload_params: false}")
    assert (theirs.kind, theirs.unknown, theirs.framework) == ("Axolotl", (), "torchtitan")
    found = job(theirs, "cluster=dgx-h100")
    assert (found.model.preset, found.model.lora.rank, found.model.lora.targets) == ("llama3.2-1b", 16, "wq,wv")
    assert (found.layout.dp_shard, found.layout.recompute, found.train.precision) == (8, "full", "bf16")
    assert left(theirs)["sample_packing"] is True
    assert settings(theirs)["layout.loss_chunk"] == "auto"
    assert after(theirs, "", "recompute=none micro_batch=4 accumulation=2") == [
        (3, "micro_batch_size: 4"),
        (8, "gradient_checkpointing: false"),
    ]


def test_axolotl_follows_a_deepspeed_file(tmp_path):
    put(tmp_path, "zero2.json", '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, "x": 1}')
    theirs = axolotl(tmp_path, "deepspeed: zero2.json")
    layout = job(theirs, "cluster=dgx-h100").layout
    assert (layout.zero, layout.dp_shard, layout.accumulate) == (2, 8, "sharded")
    assert [(each.name, each.value) for each in theirs.unknown] == [("x", 1)]
    (stated,) = (each for each in theirs.settings if each.path == "layout.zero")
    assert stated.origin.endswith("zero2.json:1 zero_optimization.stage")


def test_two_numbers_in_a_file_and_its_deepspeed_file(tmp_path):
    for own in ('"auto"', "4"):
        put(tmp_path, "zero2.json", f'{{"zero_optimization": {{"stage": 2}}, "gradient_accumulation_steps": {own}}}')
        assert settings(axolotl(tmp_path, "deepspeed: zero2.json"))["layout.accumulation"] == "4"
    put(tmp_path, "zero2.json", '{"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 8}')
    with pytest.raises(JobError, match="gradient_accumulation_steps 8: .*tune.yaml has 4; transformers refuses"):
        axolotl(tmp_path, "deepspeed: zero2.json")


def test_a_file_that_is_not_there_or_is_this_one(tmp_path):
    (unknown,) = axolotl(tmp_path, "deepspeed: none/zero9.json").unknown
    assert (unknown.name, "no such file" in unknown.why) == ("deepspeed", True)
    (unknown,) = axolotl(tmp_path, "deepspeed: tune.yaml").unknown
    assert "this file itself" in unknown.why
    put(tmp_path, "broken.json", '{"zero_optimization": {')
    with pytest.raises(JobError, match=r"broken\.json.*not valid"):
        axolotl(tmp_path, "deepspeed: broken.json")


def test_axolotl_without_sharding_is_ddp(tmp_path):
    theirs = axolotl(tmp_path)
    assert job(theirs, "cluster=dgx-h100").layout.dp_replicate == 8
    assert theirs.recipe == {"parameter_bytes": 2, "state_bytes": 4}


DEEPSPEED = """\
{
\t"bf16": {"enabled": true},
\t"zero_optimization": {
\t\t"stage": 3,
\t\t"offload_optimizer": {"device": "cpu", "pin_memory": true},
\t\t"zero_hpz_partition_size": 8,
\t\t"stage3_prefetch_bucket_size": "auto"
\t},
\t"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95]}},
\t"train_micro_batch_size_per_gpu": 4,
\t"gradient_accumulation_steps": 2
}
"""


def test_deepspeed_alone_asks_for_the_model(tmp_path):
    theirs = read(put(tmp_path, "ds.json", DEEPSPEED))
    assert (theirs.kind, theirs.unknown, [*theirs.needed]) == ("DeepSpeed", (), ["model.preset"])
    layout = job(theirs, "cluster=dgx-h100:2", "model=llama3.1-8b").layout
    assert (layout.zero, layout.dp_shard, layout.hpz, layout.offload) == (3, 16, 8, "optimizer")
    assert (layout.micro_batch, layout.accumulation, layout.accumulate) == (4, 2, "sharded")
    assert left(theirs)["optimizer.params.lr"] is True  # the trainer fills it in
    assert left(theirs)["model.seq_len"] is True
    lines = after(theirs, "model=llama3.1-8b", "model=llama3.1-8b offload=none micro_batch=2 accumulation=4")
    assert lines[0] == (5, '"offload_optimizer": {"device": "none", "pin_memory": true},')
    assert [at for at, _ in lines] == [5, 10, 11]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('"zero_optimization": {"stage": 0}, "fp16": {"enabled": true}', ("-1", "1", "fp16")),
        ('"zero_optimization": {"stage": 1}', ("1", "-1", "fp32")),
        ('"zero_optimization": {"stage": 3, "mics_shard_size": 8}, "bf16": {"enabled": true}', ("-1", "8", "bf16")),
    ],
)
def test_stages_of_zero(tmp_path, text, found):
    fields = settings(read(put(tmp_path, "ds.json", f'{{{text}, "train_batch_size": 64}}')))
    data = fields.get("layout.dp_replicate", "1"), fields.get("layout.dp_shard", "1"), fields["train.precision"]
    assert (data, fields["train.global_batch"]) == (found, "64")


ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: KIND
mixed_precision: bf16
num_machines: 2
num_processes: 16
MORE
"""


def accelerate(tmp_path: Path, kind: str, more: str = "") -> ForeignJob:
    return read(put(tmp_path, "launch.yaml", ACCELERATE.replace("KIND", kind).replace("MORE", more)))


def test_accelerate_with_each_plugin(tmp_path):
    size = "parallelism_config: {parallelism_config_dp_shard_size: 4, parallelism_config_tp_size: 4}\n"
    fsdp = accelerate(tmp_path, "FSDP", size + "fsdp_config: {fsdp_version: 2, fsdp_activation_checkpointing: true}")
    assert (fsdp.kind, fsdp.unknown, fsdp.framework) == ("accelerate", (), "torchtitan")
    assert (settings(fsdp)["cluster.nodes"], settings(fsdp)["cluster.devices_per_node"]) == ("2", "8")
    layout = job(fsdp, "cluster=dgx-h100:2", "model=llama3.1-8b").layout
    assert (layout.dp_shard, layout.tp, layout.recompute) == (4, 4, "full")
    first = accelerate(tmp_path, "FSDP", "fsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP}")
    assert (settings(first)["layout.reshard"], first.framework) == ("false", "fsdp1")
    zero = accelerate(tmp_path, "DEEPSPEED", "deepspeed_config: {zero_stage: 2, offload_optimizer_device: cpu}")
    assert (settings(zero)["layout.zero"], settings(zero)["layout.offload"]) == ("2", "optimizer")
    megatron = accelerate(
        tmp_path, "MEGATRON_LM", "megatron_lm_config: {megatron_lm_tp_degree: 2, megatron_lm_pp_degree: 2}"
    )
    assert (settings(megatron)["layout.tp"], settings(megatron)["layout.pp"]) == ("2", "2")
    plain = accelerate(tmp_path, "NO")  # which YAML reads as false
    assert (plain.unknown, settings(plain)["layout.dp_replicate"]) == ((), "-1")


def test_what_is_not_understood_is_listed(tmp_path):
    theirs = titan(
        tmp_path, more="sequence_length = 4096\n[fault_tolerence]\nenable = true\n", axes="tensor_paralel_degree = 2"
    )
    shown = {each.name: each.why for each in theirs.unknown}
    assert [*shown] == ["training.sequence_length", "fault_tolerence.enable", "parallelism.tensor_paralel_degree"]
    assert "did you mean parallelism.tensor_parallel_degree?" in shown["parallelism.tensor_paralel_degree"]
    (unknown,) = titan(tmp_path, text=TITAN.replace('"8B"', '"9B"')).unknown
    assert (unknown.name, unknown.path, "known: 8B, 70B, 405B" in unknown.why) == ("model.flavor", "model.preset", True)
    (unknown,) = axolotl(tmp_path, "expert_paralel_size: 2").unknown
    assert "did you mean expert_parallel_size?" in unknown.why
    schedule = titan(tmp_path, axes='pipeline_parallel_degree = 2\npipeline_parallel_schedule = "Zigzag"')
    assert [each.path for each in schedule.unknown] == ["layout.schedule"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.toml", TITAN.replace("steps = 1000", "steps = "), "not valid TOML"),
        ("a.toml", TITAN.replace("size = 1", 'size = "many"'), "local_batch_size: expected a whole number"),
        ("a.toml", TITAN.replace("size = 1", "size = [1]"), "expected a whole number"),
        ("a.toml", "[tool.poetry]\nname = 'x'\n", "not a configuration of a known kind"),
        ("a.json", DEEPSPEED.replace('"stage": 3', '"stage": "three"'), "expected a whole number"),
        ("a.json", '{"zero_optimization": {"stage": 3}', "not valid JSON"),
        ("a.yaml", AXOLOTL + "dp_shard_size: {a: 1}\ndp_replicate_size: x", "expected a whole number"),
        (
            "a.yaml",
            AUTOMODEL.replace("local_batch_size: 8", "local_batch_size: 7"),
            "no multiple of micro-batches of 2",
        ),
        ("a.yaml", ACCELERATE.replace("num_processes: 16", "num_processes: 15"), "not the same number on each"),
        ("a.yaml", "base_model: x\nsequence_len: 1\nb: " + "[" * 500, "nested"),
        ("a.yaml", "a: &a [1, 2, 3]\n" + "".join(f"b{n}: [*a, {{c: *a}}]\n" for n in range(9)), "known kind"),
        ("a.yaml", AXOLOTL + "x: " + "y" * 2**20, "larger than"),
        ("config.json", '{"model_type": "llama", "architectures": ["X"], "hidden_size": 8}', "take it as model=hf:"),
        (
            "a.yaml",
            ACCELERATE + "mixed_precision: fp16\nnum_machines: 1\n",
            "mixed_precision is set again .first",
        ),
        (
            "a.json",
            '{"zero_optimization": {"stage": 3,\n"stage": 1}}',
            ":2 zero_optimization.stage is set again",
        ),
        (
            "a.json",
            '{"train_batch_size": 8, "bf16": {"enabled": true}, "fp16": {"enabled": true}}',
            "bf16.enabled and fp16.enabled exclude each other",
        ),
    ],
)
def test_bad_files(tmp_path, name, text, said):
    with pytest.raises(JobError, match=said):
        read(put(tmp_path, name, text.replace("MORE", "").replace("AXES", "").replace("KIND", "FSDP")))


@pytest.mark.parametrize(
    ("kind", "text", "names"),
    [
        (titan, "mixed_precision_param = 'float16'", ["training.mixed_precision_param"]),
        (axolotl, "fp16: 1", ["fp16"]),
        (axolotl, "fsdp: [no_shard]", ["fsdp"]),
        (axolotl, "context_parallel_size: 2\nsequence_parallel_degree: 4", ["sequence_parallel_degree"]),
        (axolotl, "max_steps: ${STEPS}\nwarmup_ratio: 0.1", ["max_steps"]),
        (automodel, "dataset: {seq_len: 8}\nfp8: {enabled: '${oc.env:FP8}'}", ["fp8.enabled"]),
    ],
)
def test_words_and_names_that_mean_nothing_here_are_no_defaults(tmp_path, kind, text, names):
    assert [each.name for each in kind(tmp_path, text).unknown] == names


def test_accelerate_compiles_only_with_a_compiler(tmp_path):
    for word, compiled in (("no", "false"), ("'no'", "false"), ("INDUCTOR", "true")):
        theirs = accelerate(tmp_path, "MULTI_GPU", f"dynamo_config: {{dynamo_backend: {word}}}\n")
        assert (settings(theirs)["train.compile"], theirs.unknown) == (compiled, ())
    again = "fsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP, fsdp_reshard_after_forward: WORD}\n"
    for word, several in (("true", 1), ("false", 0), ("maybe", 1)):
        assert len(accelerate(tmp_path, "FSDP", again.replace("WORD", word)).unknown) == several


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("batch_size: 16", "batch_size and gradient_accumulation_steps exclude each other"),
        ("warmup_steps: 1\nwarmup_ratio: 0.1", "warmup_steps and warmup_ratio exclude each other"),
        ("bfloat16: true\nfloat16: true", "bfloat16 and float16 exclude each other"),
        ("adapter: lora\nlora_r: 8\nload_in_4bit: true\nload_in_8bit: true", "load_in_4bit and load_in_8bit exclude"),
        ("adapter: qlora\nlora_r: 8", "qlora needs load_in_4bit"),
        ("deepspeed: z.json\nfsdp: [full_shard]", "deepspeed and fsdp exclude"),
    ],
)
def test_what_axolotl_refuses_together(tmp_path, text, said):
    put(tmp_path, "z.json", "{}")
    with pytest.raises(JobError, match=said):
        axolotl(tmp_path, text)


def test_axolotl_leaves_bf16_off_beside_fp16(tmp_path):
    assert settings(axolotl(tmp_path, "fp16: true"))["train.precision"] == "fp16"
    with pytest.raises(JobError, match="bf16 and fp16 exclude each other"):
        read(put(tmp_path, "tune.yaml", AXOLOTL.replace("bf16: auto", "bf16: true").replace("MORE", "fp16: true")))


def test_numbers_that_programs_read_differently_are_not_guessed(tmp_path):
    (unknown,) = axolotl(tmp_path, "max_steps: 010").unknown
    assert unknown.why == "programs read it differently: write 10 without the leading 0, or 8 as octal"
    assert settings(axolotl(tmp_path, "max_steps: 1_000"))["train.steps"] == "1000"
    with pytest.raises(JobError, match="max_steps: expected a whole number, found '1:30'"):
        axolotl(tmp_path, "max_steps: 1:30")


def test_two_files_with_two_precisions_and_two_learning_rates(tmp_path):
    put(tmp_path, "z.json", '{"fp16": {"enabled": true}, "zero_optimization": {"stage": 2}}')
    with pytest.raises(JobError, match="fp16.enabled: mixed_precision bf16 says otherwise"):
        accelerate(tmp_path, "DEEPSPEED", "deepspeed_config: {deepspeed_config_file: z.json}")
    text = '{"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-4}}, "scheduler": {"params": '
    for top, several in (("1e-4", 0), ("2e-4", 1)):
        found = read(put(tmp_path, "z.json", f'{text}{{"warmup_max_lr": {top}}}}}}}')).unknown
        assert [each.name for each in found] == ["scheduler.params.warmup_max_lr"] * several


def test_a_shape_that_axolotl_changes_is_no_detail(tmp_path):
    name = "overrides_of_model_config.num_hidden_layers"
    assert left(axolotl(tmp_path, "overrides_of_model_config: {num_hidden_layers: 4}"))[name]


def test_names_of_two_releases_of_torchtitan(tmp_path):
    with pytest.raises(JobError, match="keep one of them"):
        titan(tmp_path, "tensor_parallel_degree = 4", "tensor_parallel_degree = 2")


def test_frameworks_that_predict_are_known(tmp_path):
    put(tmp_path, "z.json", '{"zero_optimization": {"stage": 3}}')
    found = [titan(tmp_path), automodel(tmp_path), axolotl(tmp_path, "deepspeed: z.json"), accelerate(tmp_path, "FSDP")]
    assert {each.framework for each in found} <= FRAMEWORKS.keys()
