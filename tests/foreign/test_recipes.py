"""Primus' YAML, and recipes of Megatron-Bridge and NeMo as jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.config.layout import Layout
from phalanx.errors import JobError
from phalanx.foreign.frame import ForeignJob
from phalanx.foreign.python_config import MOST_STEPS
from phalanx.foreign.read import read, write_back

PRIMUS = """\
work_group: ${TEAM:mine}
modules:
  pre_trainer:
    framework: megatron
    config: pre_trainer.yaml
    model: llama3.1_8B.yaml
    overrides:
      micro_batch_size: 2
      global_batch_size: 128
      seq_length: ${SEQ:4096}
      tensor_model_parallel_size: ${PRIMUS_TP:2}
      pipeline_model_parallel_size: 1
      overlap_grad_reduce: true
"""
BRIDGE = '''\
import torch
from megatron.bridge import AutoBridge
from megatron.bridge.training.config import ConfigContainer, TrainingConfig
from somewhere import common

LENGTH: int = 4096


def _parallel(cfg, tp=1):
    cfg.model.tensor_model_parallel_size = tp
    cfg.model.sequence_parallel = tp > 1


def llama3_8b_pretrain_16gpu_h100_bf16_config() -> ConfigContainer:
    """A recipe."""
    cfg = ConfigContainer(
        train=TrainingConfig(global_batch_size=64 * 2, micro_batch_size=1),
        mixed_precision="bf16_mixed",
    )
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-8B").get_model_config()
    cfg.model.seq_length = LENGTH
    _parallel(cfg, tp=2)
    cfg.model.pipeline_model_parallel_size = 1
    cfg.ddp.use_distributed_optimizer = True
    cfg.ddp.overlap_grad_reduce = True
    cfg.optimizer.exp_avg_dtype = torch.float32
    MORE
    return cfg
'''
NEMO = """\
import nemo_run as run
from nemo import lightning as nl
from nemo.collections.llm.gpt.model.llama import Llama3Config8B, LlamaModel


def model():
    return run.Config(LlamaModel, config=run.Config(Llama3Config8B))


def trainer(tensor_parallelism: int = 2, num_nodes: int = 1):
    strategy = run.Config(nl.MegatronStrategy, tensor_model_parallel_size=tensor_parallelism, context_parallel_size=2)
    return run.Config(nl.Trainer, devices=8, num_nodes=num_nodes, strategy=strategy, plugins=bf16_mixed())


def pretrain_recipe(num_nodes: int = 2):
    return run.Partial(
        pretrain,
        model=model(),
        trainer=trainer(num_nodes=num_nodes),
        data=run.Config(MockDataModule, seq_length=8192, global_batch_size=512, micro_batch_size=1),
    )
"""


def file(tmp_path: Path, name: str, text: str) -> ForeignJob:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return read(path)


def settings(theirs: ForeignJob) -> dict[str, object]:
    return {each.path: each.text for each in theirs.settings}


def test_primus_without_its_folders_takes_a_known_model(tmp_path):
    theirs = file(tmp_path, "exp.yaml", PRIMUS)
    assert (theirs.kind, theirs.unknown, dict(theirs.needed)) == ("Primus", (), {})
    found = settings(theirs)
    expected = {"model.preset": "llama3.1-8b", "layout.tp": "2", "model.seq_len": "4096", "layout.sp": "true"}
    assert {path: found[path] for path in expected} == expected
    assert found["layout.zero"] == "1"  # its pre_trainer.yaml: use_distributed_optimizer


def test_primus_with_its_folders_reads_the_model_and_what_it_begins_with(tmp_path):
    models = tmp_path / "primus/configs/models/megatron"
    models.mkdir(parents=True)
    (models / "llama3.1_8B.yaml").write_text("bases: [base.yaml, ../../../../../outside.yaml]\nnum_layers: 8\n")
    (models / "base.yaml").write_text(
        "includes: [llama3.1_8B.yaml]\nhidden_size: 512\nnum_attention_heads: 8\nvocab_size: 1000\n"
    )
    (tmp_path / "outside.yaml").write_text("hidden_size: 1\n")
    theirs = file(tmp_path, "exp.yaml", PRIMUS)
    found = settings(theirs)
    assert [found[f"model.{name}"] for name in ("n_layers", "d_model", "vocab_size")] == ["8", "512", "1024"]
    assert "model.preset" not in found


def test_primus_names_what_it_does_not_understand(tmp_path):
    theirs = file(tmp_path, "exp.yaml", PRIMUS.replace("${PRIMUS_TP:2}", "${PRIMUS_TP}") + "      new_name: 3\n")
    assert {each.name.rpartition(".")[2] for each in theirs.unknown} == {"tensor_model_parallel_size", "new_name"}
    with pytest.raises(JobError, match="framework is 'jax'"):
        file(tmp_path, "exp.yaml", PRIMUS.replace("framework: megatron", "framework: jax"))
    theirs = file(tmp_path, "exp.yaml", PRIMUS.replace("llama3.1_8B", "my_own"))
    assert "model.preset" in theirs.needed


def test_primus_is_written_back_in_place_of_defaults(tmp_path):
    theirs = file(tmp_path, "exp.yaml", PRIMUS)
    after = Layout(tp=4, dp_shard=2, zero=1, sp=True, sp_regather=True)
    lines = {each.line: each.after.strip() for each in write_back(theirs, Layout(tp=2, dp_shard=4, zero=1), after)}
    assert lines[11] == "tensor_model_parallel_size: ${PRIMUS_TP:4}"


def test_a_recipe_of_megatron_bridge(tmp_path):
    theirs = file(tmp_path, "recipe.py", BRIDGE.replace("MORE", "pass"))
    assert (theirs.kind, theirs.unknown, dict(theirs.needed)) == ("Megatron-Bridge", (), {})
    found = settings(theirs)
    expected = {
        "model.preset": "llama3-8b",
        "model.seq_len": "4096",
        "layout.tp": "2",
        "layout.sp": "true",
        "layout.zero": "1",
        "train.global_batch": "128",
        "train.precision": "bf16",
        "cluster.preset": "dgx-h100:2",
    }
    assert {path: found.get(path) for path in expected} == expected
    line = next(each for each in write_back(theirs, Layout(pp=1), Layout(pp=2)) if "pipeline" in each.after)
    assert line.after.strip() == "cfg.model.pipeline_model_parallel_size = 2"


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("cfg.model.context_parallel_size = int(open('x'))", "model.context_parallel_size"),
        ("common.change(cfg)", "call common.change(cfg)"),
        ("cfg.model.no_such_name = 1", "model.no_such_name"),
        ("cfg.model.context_parallel_size = 2 if common.large() else 1", "model.context_parallel_size"),
        ("for n in (1, 2):\n        cfg.model.context_parallel_size = n", "model.context_parallel_size"),
    ],
)
def test_what_does_not_follow_from_a_recipe_is_named(tmp_path, more, named):
    theirs = file(tmp_path, "recipe.py", BRIDGE.replace("MORE", more))
    assert [each.name for each in theirs.unknown] == [named]


ADAPTERS = """

def adapters(scheme, **more):
    if isinstance(scheme, PEFT):
        return scheme
    if scheme.lower() == "lora":
        return LoRA(**more)
    raise ValueError(scheme)


def stages(several):
    return [["decoder"] * each for each in several]


def doubtful():
    if somewhere.large():
        return 8
"""


def test_adapters_and_methods_of_text(tmp_path):
    more = "cfg.peft = adapters('LoRA')\n    cfg.peft.dim = 16\n    cfg.peft.target_modules = ['linear_qkv']"
    theirs = file(tmp_path, "recipe.py", BRIDGE.replace("MORE", f"{more}\n    cfg.mixed_precision = 'fp8'") + ADAPTERS)
    found = settings(theirs)
    expected = {"model.lora.rank": "16", "model.lora.targets": "wq,wk,wv", "train.precision": "bf16"}
    assert theirs.unknown == ()
    assert {path: found.get(path) for path in expected} == expected
    assert theirs.recipe["products"] == "fp8"


def test_a_list_of_lists_is_followed(tmp_path):
    more = "cfg.model.pipeline_model_parallel_size = 2\n    "
    more += "cfg.model.pipeline_model_parallel_layout = stages([12, 20])"
    theirs = file(tmp_path, "recipe.py", BRIDGE.replace("MORE", more) + ADAPTERS)
    assert settings(theirs)["layout.pp_cut"] == "12+20"


def test_what_a_function_may_return_is_not_known(tmp_path):
    text = BRIDGE.replace("MORE", "cfg.model.context_parallel_size = doubtful()") + ADAPTERS
    assert [each.name for each in file(tmp_path, "recipe.py", text).unknown] == ["model.context_parallel_size"]


def test_a_recipe_is_never_executed(tmp_path):
    target = tmp_path / "made"
    more = f"__import__('os').system('touch {target}')\n    open({str(target)!r}, 'w').write('x')"
    text = f"open({str(target)!r}, 'w')\n" + BRIDGE.replace("MORE", more)
    file(tmp_path, "recipe.py", text)
    assert not target.exists()


def test_one_of_several_recipes_is_named(tmp_path):
    text = BRIDGE.replace("MORE", "pass")
    path = tmp_path / "recipe.py"
    path.write_text(text + text[text.index("def llama3") :].replace("16gpu", "8gpu"), encoding="utf-8")
    with pytest.raises(JobError, match="2 configurations; name one, --from .*:NAME: llama3_8b_pretrain_16gpu"):
        read(path)
    theirs = read(Path(f"{path}:llama3_8b_pretrain_8gpu_h100_bf16_config"))
    assert settings(theirs)["cluster.preset"] == "dgx-h100:1"
    with pytest.raises(JobError, match="has no function other"):
        read(Path(f"{path}:other"))


def test_a_recipe_on_an_imported_one(tmp_path):
    start = BRIDGE.index("    cfg = ConfigContainer(")
    end = BRIDGE.index("    cfg.model.seq_length")
    text = BRIDGE[:start] + "    cfg = common.llama3_8b_pretrain_config()\n" + BRIDGE[end:].replace("MORE", "pass")
    theirs = file(tmp_path, "recipe.py", text)
    assert [each.name for each in theirs.unknown] == ["llama3_8b_pretrain_config()"]
    assert settings(theirs)["model.preset"] == "llama3-8b"


def test_a_recipe_that_never_ends_is_refused(tmp_path):
    text = BRIDGE.replace("    cfg.model.sequence_parallel = tp > 1", "    _parallel(cfg)\n    _parallel(cfg)")
    with pytest.raises(JobError, match="nested"):
        file(tmp_path, "recipe.py", text.replace("MORE", "pass"))
    assert MOST_STEPS


@pytest.mark.parametrize(
    "text", ["def f(:\n", "import nemo_run\n", "from megatron.bridge import x\n\ndef a_config():\n    return 1\n"]
)
def test_python_without_a_configuration(tmp_path, text):
    with pytest.raises(JobError, match="not valid Python|configuration|known kind"):
        file(tmp_path, "recipe.py", f"# megatron.bridge\n{text}")


def test_a_recipe_of_nemo(tmp_path):
    theirs = file(tmp_path, "llama.py", NEMO)
    assert (theirs.kind, theirs.unknown) == ("NeMo", ())
    found = settings(theirs)
    expected = {"model.preset": "llama3-8b", "layout.tp": "2", "layout.cp": "2", "cluster.nodes": "2"}
    expected |= {"cluster.devices_per_node": "8", "train.precision": "bf16", "train.global_batch": "512"}
    assert {path: found.get(path) for path in expected} == expected


def test_yaml_of_both(tmp_path):
    text = (
        "model:\n  _target_: a.Llama3ModelProvider8B\n  tensor_model_parallel_size: 4\ntrain: {global_batch_size: 64}\n"
    )
    theirs = file(tmp_path, "run.yaml", text + "mixed_precision: bf16_mixed\nddp: {use_distributed_optimizer: true}\n")
    assert (theirs.kind, theirs.unknown) == ("Megatron-Bridge (YAML)", ())
    assert [settings(theirs)[path] for path in ("model.preset", "layout.tp")] == ["llama3-8b", "4"]
    text = "trainer:\n  devices: 8\n  num_nodes: 2\n  strategy:\n    _target_: nemo.lightning.MegatronStrategy\n"
    text += "    tensor_model_parallel_size: 4\nmodel:\n  config: {_target_: nemo.Llama3Config70B}\n"
    theirs = file(tmp_path, "nemo.yaml", text)
    assert theirs.kind == "NeMo (YAML)"
    assert settings(theirs)["model.preset"] == "llama3-70b"


BRIDGE_YAML = """\
model: {num_layers: 4, hidden_size: 256, num_attention_heads: 4, seq_length: 128}
train: {micro_batch_size: 1, global_batch_size: 8}
"""


@pytest.mark.parametrize(
    "more", ["mixed_precision: bf32_mixed", "model: {activation_func: silu}", "precision: 64-true"]
)
def test_words_of_bridge_that_mean_nothing_here(tmp_path, more):
    path = tmp_path / "bridge.yaml"
    text = BRIDGE_YAML.replace("seq_length: 128", "seq_length: 128, activation_func: silu")
    path.write_text(text if "silu" in more else f"{BRIDGE_YAML}{more}\n")
    assert len(read(path).unknown) == 1


def test_two_lengths_of_one_recipe_are_told(tmp_path):
    path = tmp_path / "bridge.yaml"
    path.write_text(f"{BRIDGE_YAML}dataset: {{seq_length: 256}}\n")
    [told] = [each for each in read(path).without_counterpart if each.affects]
    assert (told.name, told.why) == ("dataset.seq_length", "model.seq_length 128 is predicted")
