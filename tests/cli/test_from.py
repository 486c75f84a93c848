"""`phalanx predict|plan --from FILE`: the verb around configurations of other frameworks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.config.fields import leaves
from phalanx.foreign.read import UNREAD

SCRIPT = """\
torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py --num-layers 16 --hidden-size 2048 --num-attention-heads 16 \\
  --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 64 --bf16 --lr 1e-4 \\
  --vocab-size 50257 --use-distributed-optimizer \\
  --tensor-model-parallel-size 8 --log-interval 10 --tp-comm-overlap
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    return str(path)


def document(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_predict_says_what_each_field_became(script, capsys):
    assert main(["predict", "--from", script, "cluster=dgx-h100"]) == 0
    text = capsys.readouterr().out
    assert "on 16 × h100-80gb" in text
    assert "read as Megatron-LM, predicted as megatron-core" in text
    assert "--tensor-model-parallel-size 8" in text
    assert "--tp-comm-overlap: the overlap" in text
    found = document(capsys, "predict", "--from", script, "cluster=dgx-h100", "tp=4")
    assert found["from"]["framework"] == "megatron-core"
    assert {each["field"]: each["to"] for each in found["from"]["became"]}["model.n_layers"] in (16, "16")


def test_plan_shows_a_better_layout_and_the_changed_lines(script, capsys):
    found = document(capsys, "plan", "--from", script, "cluster=dgx-h100:2")
    theirs = found["theirs"]
    assert theirs["best_step_time_s"] <= theirs["step_time_s"]
    changed = {each["before"].strip(): each["after"].strip() for each in theirs["changed"] if each["line"] == 4}
    assert all("--tensor-model-parallel-size" in after for after in changed.values())
    assert found["best"]["zero"] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "does not say which machine it runs on: name one, such as cluster=dgx-h100:2 for its 16 devices"),
        (["cluster=dgx-h100:2", "layout.tp=3"], "tp"),
    ],
)
def test_what_is_missing_is_said(script, words, message, capsys):
    assert main(["predict", "--from", script, *words]) == 2
    assert message in capsys.readouterr().err


def test_names_that_are_not_understood_are_refused_unless_they_are_ignored(tmp_path, capsys):
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT.replace("--log-interval 10", "--odd-name 1 --pipeline-model-parallel-size $PP"))
    words = ["predict", "--from", str(path), "cluster=dgx-h100:2"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "--odd-name 1: not understood" in error
    assert "PP is not set in the file (here layout.pp)" in error
    assert main([*words, "layout.pp=2", "--ignore", "odd_name"]) == 0
    assert main([*words, "--ignore", "all"]) == 0
    assert "read as if absent" in capsys.readouterr().out


def test_all_faults_of_a_script_are_listed_at_once(tmp_path, capsys):
    """Values of a wrong type, unknown names, what is missing, and what does not fit together."""
    text = SCRIPT.replace("--micro-batch-size 1", "--micro-batch-size few").replace("--lr 1e-4", "--lr high")
    text = text.replace("model-parallel-size 8", "model-parallel-size 3").replace("--vocab-size 50257", "--odd-name 1")
    path = tmp_path / "train.sh"
    path.write_text(text)
    assert main(["predict", "--from", str(path), "hidden=7"]) == 2
    error = capsys.readouterr().err
    for message in (
        "unknown key hidden",
        "train.sh:2 --lr: expected a number, found 'high'",
        "--odd-name 1: not understood",
        "is missing: set model.vocab_size",
        "does not say which machine it runs on",
        "train.sh:2 --micro-batch-size: layout.micro_batch: expected a whole number, found 'few'",
        "train.sh:4 --tensor-model-parallel-size: layout.tp: n_heads 16 / tp 3 and MLP",
    ):
        assert error.count(message) == 1, f"{message}: {error}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"source env.sh\n{SCRIPT}", "source env.sh: not understood: another script is not read"),
        (f"if grep -q x y; then\n{SCRIPT}fi\n", "command torchrun: not understood: the condition on line 1"),
        (SCRIPT.replace("--bf16", '"--bf16'), "not a script that can be read: what begins on line 2 has no closing"),
    ],
)
def test_what_a_script_may_do_besides_is_said(text, message, tmp_path, capsys):
    path = tmp_path / "train.sh"
    path.write_text(text)
    assert main(["predict", "--from", str(path), "cluster=dgx-h100:2"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("train.toml", "[model\n", "not valid TOML"),
        ("zero.json", '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}', "set train.precision"),
        ("train.sh:main", SCRIPT, "there is no such file"),
        ("run.yaml", "distributed_type: FSDP\nfsdp_config: {fsdp_version: 3}\n", "fsdp_version 3: not understood"),
    ],
)
def test_what_a_file_leaves_open_is_refused(name, text, message, tmp_path, capsys):
    (tmp_path / name.partition(":")[0]).write_text(text)
    assert main(["predict", "model=gpt2", "cluster=dgx-h100:1", "--from", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


def test_a_name_to_ignore_that_the_file_lacks_is_refused(script, capsys):
    assert main(["predict", "--from", script, "--ignore", "log-interval", "cluster=dgx-h100:2"]) == 2
    error = capsys.readouterr().err
    assert "--ignore cluster=dgx-h100:2: " in error
    assert "has no such name; key=value goes before --ignore" in error
    assert "--ignore log-interval" not in error


def test_a_folder_and_a_missing_file(tmp_path, capsys):
    assert main(["predict", "--from", str(tmp_path)]) == 2
    assert "model.from=" in capsys.readouterr().err
    assert main(["predict", "--from", str(tmp_path / "no.sh"), "cluster=dgx-h100"]) == 2
    assert "there is no such file" in capsys.readouterr().err


def test_a_layout_that_does_not_fit_has_no_speed_ratio(script, capsys):
    large = [
        "model.d_model=12288",
        "model.n_layers=48",
        "model.n_heads=96",
        "model.d_ff=49152",
        "train.global_batch=64",
    ]
    assert main(["plan", "--from", script, "cluster=dgx-h100:16", *large]) == 0
    _, _, beside = capsys.readouterr().out.partition("their layout: ")
    assert ": does not fit" in beside
    assert "per step, theirs does not fit" in beside
    assert "× as fast" not in beside


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "train.sh",
            SCRIPT,
            "is a configuration of Megatron-LM, not a job file; phalanx predict, plan and verify read",
        ),
        ("t.toml", "[model]\nname = 'llama3'\n[training]\n[parallelism]\n", "is a configuration of torchtitan"),
        ("ds.json", '{"zero_optimization": {"stage": 3}}', "is a configuration of DeepSpeed"),
        ("a.yaml", "distributed_type: FSDP", "is a configuration of accelerate"),
        ("config.json", '{"model_type": "llama", "hidden_size": 8}', "not a run; take it as model=hf:config.json"),
        ("job.yaml", "train: {micro_batch_size: 4}\nmodel: {n_layers: 2}", "did you mean layout.micro_batch?"),
        (
            "nanotron.yaml",
            "model: {}\noptimizer: {}\nparallelism: {pp: 1}\ntokens: {micro_batch_size: 2}",
            "configuration of nanotron, which Phalanx does not read: write a job file (`phalanx init` begins one)",
        ),
        (
            "neox.yml",
            '{"pipe-parallel-size": 1, "model-parallel-size": 2, "num-layers": 12, "zero_optimization": {"stage": 0},}',
            "configuration of GPT-NeoX, which Phalanx does not read",
        ),
        (
            "sft.yaml",
            "model_name_or_path: a\nstage: sft\nfinetuning_type: lora\ncutoff_len: 2048\noutput_dir: b",
            "of LLaMA-Factory, which Phalanx does not read: write a job file (`phalanx init` begins one), in which "
            "model_name_or_path is model.from (a folder, or a run of `phalanx import hf hub:OWNER/NAME --out RUN`), ",
        ),
        ("trl.yaml", "model_name_or_path: a\ndataset_name: b\nlearning_rate: 1e-5\nuse_peft: true", "of TRL or transf"),
        (
            "olmo.json",
            '{"run_name": "a", "model": {}, "dataset": {}, "data_loader": {}, "trainer": {}}',
            "of OLMo-core,",
        ),
        ("olmo.py", "from olmo_core.train import TrainerConfig\n", "of OLMo-core, which"),
        (
            "olmo.yaml",
            "run_name: a\nmodel: {d_model: 8}\nmax_duration: 9ba\nglobal_train_batch_size: 8\nsave_folder: b",
            "of OLMo, which",
        ),
        (
            "mpt.yaml",
            "max_seq_len: 2048\nmodel: {name: mpt_causal_lm}\ntrain_loader: {}\nmax_duration: 9ba",
            "of llm-foundry (Composer), which",
        ),
        ("tune.yaml", "model:\n  _component_: torchtune.models.llama3.llama3_8b\nbatch_size: 2", "of torchtune, which"),
        ("verl.yaml", "data: {}\nactor_rollout_ref: {}\ntrainer: {}", "of verl, which"),
    ],
)
def test_a_file_of_another_program_is_no_job(tmp_path, monkeypatch, name, text, said, capsys):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    assert main(["train", name]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_fields_that_values_of_unread_files_become_are_there():
    assert not [path for each in UNREAD.values() for path in each.fields.values() if path not in leaves()]


def test_a_file_that_is_not_read_is_named_by_from(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text("finetuning_type: full")
    assert main(["predict", "--from", str(tmp_path / "a.yaml"), "cluster=dgx-h100"]) == 2
    assert "is a configuration of LLaMA-Factory, which Phalanx does not read" in " ".join(
        capsys.readouterr().err.split()
    )


def test_problems_that_follow_from_what_is_missing_are_not_told(script, capsys):
    text = Path(script).read_text().replace("--nproc_per_node 8 --nnodes 2", "")
    Path(script).write_text(text)
    assert main(["predict", "--from", script, "train.steps=1.5"]) == 2
    found = capsys.readouterr().err
    assert found.count("\n  ") == 2
    assert "does not say which machine" in found
    assert "train.steps=1.5" in found


def test_accumulation_without_a_batch_asks_for_one(tmp_path, capsys):
    path = tmp_path / "a.yaml"
    path.write_text("distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\ngradient_accumulation_steps: 4\n")
    words = ["predict", "--from", str(path), "cluster=dgx-h100", "model=tiny", "model.vocab_size=256"]
    assert main(words) == 2
    message = "the batch that is accumulated is missing: set layout.micro_batch or train.global_batch"
    assert capsys.readouterr().err.strip() == f"phalanx: {path}: {message}"
    for batch in ("train.global_batch=32", "layout.micro_batch=1"):
        assert main([*words, batch]) == 0
        assert "global batch 32 = micro-batch 1 × accumulation 4" in capsys.readouterr().out
