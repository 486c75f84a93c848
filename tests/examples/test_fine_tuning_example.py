"""The job of examples/fine_tuning.yaml: legal, with sixty whole questions and answers in its samples."""

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.check.job import problems_of
from phalanx.check.load import load_file
from phalanx.data.conversations import ConversationData
from phalanx.data.mixture import open_split
from phalanx.data.prepare import prepare

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
