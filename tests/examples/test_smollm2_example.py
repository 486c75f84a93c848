"""The job of examples/smollm2.yaml, on a small run in the place of SmolLM2: legal, with every conversation whole."""

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

ROOT = Path(__file__).parents[2]
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
