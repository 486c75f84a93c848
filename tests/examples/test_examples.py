"""The jobs of examples/: legal, with whole conversations, and processes busy at every degree."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from exchange.folders import LLAMA, write_folder
from phalanx.check.job import problems_of
from phalanx.check.load import load_file
from phalanx.data.conversations import ConversationData
from phalanx.data.mixture import open_split
from phalanx.data.prepare import prepare
from phalanx.exchange.import_run import import_folder

# The job of examples/fine_tuning.yaml: legal, with sixty whole questions and answers in its samples.


ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not (ROOT / "examples").exists(), reason="the package is installed without its examples")
def test_the_example_packs_every_conversation_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    job = load_file(ROOT / "examples" / "fine_tuning.yaml").job
    assert not problems_of(job)
    data = replace(job.data, dir=str(tmp_path))
    samples = open_split(prepare(data), "train", job.model.seq_len, data)
    assert isinstance(samples, ConversationData)
    assert (samples.facts.conversations, samples.facts.truncated, samples.facts.dropped) == (60, 0, 0)
    assert samples.facts.efficiency > 0.8


# The example of FSDP with tensor parallelism takes ezpz's options, and keeps four processes busy at every degree.

JOB = Path(__file__).parents[2] / "examples" / "fsdp_tp.yaml"


@pytest.mark.parametrize(("tp", "dp_shard"), [(1, 4), (2, 2), (4, 1)])
def test_fsdp_shards_over_the_devices_that_tensor_parallelism_leaves(tp, dp_shard):
    job = load_file(JOB, [f"--tp={tp}"]).job
    assert (job.layout.dp_shard, job.layout.processes, job.layout.zero) == (dp_shard, 4, 3)


def test_it_is_a_llama_with_grouped_queries():
    model = load_file(JOB).job.model
    assert (model.norm, model.activation, model.positions, model.bias) == ("rmsnorm", "swiglu", "rope", False)
    assert model.kv_heads < model.n_heads


def test_ezpz_s_command_line():
    loaded = load_file(JOB, ["--tp=4", "--n-layers=8", "--dataset", "random"])
    job = loaded.job
    assert (job.layout.tp, job.model.n_layers, job.data.corpus) == (4, 8, "random")
    assert loaded.answers == ["--dataset random: taken as data.corpus=random"]
    assert load_file(JOB, ["--dataset", "shakespeare"]).job.data.corpus == "shakespeare_char"


# The job of examples/smollm2.yaml, on a small run in the place of SmolLM2: legal, with every conversation whole.

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.skipif(not (ROOT / "examples").exists(), reason="the package is installed without its examples")
def test_the_example_takes_shape_tokenizer_and_template_of_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_folder(tmp_path / "theirs", replace(LLAMA, seq_len=8192))
    (tmp_path / "theirs" / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples", "examples")
    import_folder([tmp_path / "theirs"], Path("runs/smollm2"))
    job = load_file(Path("examples/smollm2.yaml")).job
    assert not problems_of(job)
    assert (job.model.d_model, job.model.seq_len) == (LLAMA.d_model, 128)
    samples = open_split(prepare(job.data), "train", job.model.seq_len, job.data)
    assert isinstance(samples, ConversationData)
    assert samples.facts.conversations + samples.facts.dropped == 60
