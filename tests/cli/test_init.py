"""`phalanx init`: the file that it writes, what it asks, and that it replaces nothing unasked."""

import io
import json

import pytest
import yaml

from phalanx.check.load import load_file
from phalanx.cli import init
from phalanx.cli.main import main

MACHINE = """
cluster:
  devices_per_node: 2
  device: cpu
  accelerator: {name: a cpu, fp32_tflops: 0.2, memory_gib: 8.0, bandwidth_gbs: 20.0}
  intra: {gbs: 1.0, latency_us: 50.0}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to be in, on a machine that was measured."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path / "home"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "cluster.yaml").write_text(MACHINE)
    return tmp_path


def test_without_a_terminal_it_writes_a_planned_job_for_this_machine(here, capsys):
    assert main(["init"]) == 0
    text = (here / "job.yaml").read_text()
    loaded = load_file(here / "job.yaml")
    assert f"layout:  {loaded.job.layout.line()}" in capsys.readouterr().out
    assert text.startswith("# yaml-language-server: $schema=phalanx.schema.json\n# phalanx train job.yaml\n")
    assert "  # predicted: " in text
    assert json.loads((here / "phalanx.schema.json").read_text())["title"] == "Phalanx job"
    assert 1 <= loaded.job.layout.world <= 2
    assert max(map(len, text.splitlines())) <= 110
    for line in text.splitlines()[3:]:
        assert not line or line.endswith(":") or "#" in line


def test_an_existing_file_stays(here, capsys):
    (here / "job.yaml").write_text("mine")
    (here / "phalanx.schema.json").write_text("mine, too")
    assert main(["init", "--yes"]) == 2
    assert "job.yaml exists and was not changed; name another file, or --force replaces it" in capsys.readouterr().err
    assert (here / "job.yaml").read_text() == "mine"
    assert main(["init", "--yes", "--force", "--no-plan"]) == 0
    assert yaml.safe_load((here / "job.yaml").read_text())["layout"] == {"auto": True}
    assert (here / "phalanx.schema.json").read_text() == "mine, too"


def test_it_asks_until_the_answers_are_legal(here, capsys, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stdin", Terminal("dgx-h100:2\nfoo\nllama3-8b\n\n64\n1000\n"))
    monkeypatch.setattr(init.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("phalanx.cli.init.stderr_progress", init_progress)
    assert main(["init", "big.yaml"]) == 0
    asked = capsys.readouterr().err
    assert [f"{n}/5" for n in range(1, 6) if f"{n}/5  " in asked] == ["1/5", "2/5", "3/5", "4/5", "5/5"]
    assert "no model preset 'foo'" in asked
    job = load_file(here / "big.yaml").job
    assert (job.layout.world, job.train.global_batch, job.train.steps, job.train.precision) == (16, 64, 1000, "bf16")
    assert job.model.preset == "llama3-8b"


def init_progress():
    from contextlib import nullcontext

    from phalanx.data.files import silent

    return nullcontext(silent)


def test_the_input_may_end(here, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    monkeypatch.setattr(init.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(init.sys.stderr, "isatty", lambda: True, raising=False)
    assert main(["init"]) == 2
    assert "the input ended before all questions were answered: nothing was written" in capsys.readouterr().err
    assert not (here / "job.yaml").exists()


def test_a_file_of_conversations_is_recognised(here):
    (here / "chat.jsonl").write_text(json.dumps({"messages": []}))
    (here / "book.txt").write_text("a book")
    for data, corpus in (("chat.jsonl", "chat"), ("book.txt", "text")):
        assert main(["init", "data.yaml", "--force", "--no-plan", "--data", data]) == 0
        written = yaml.safe_load((here / "data.yaml").read_text())["data"]
        assert (written["corpus"], written.get("template")) == (corpus, "alpaca" if corpus == "chat" else None)


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (
            ["--data", "nowhere", "--cluster", "dgx-h10"],
            ["--cluster: no cluster preset 'dgx-h10'", "--data: neither a"],
        ),
        (["job.json"], ["a job file ends in .yaml, found 'job.json'; nearest: job.yaml"]),
        (["nowhere/job.yaml"], ["folder nowhere does not exist; create it, or name another file"]),
        (["--batch", "0"], ["--batch: must be at least 1, is 0"]),
    ],
)
def test_mistakes(words, messages, here, capsys):
    assert main(["init", *words]) == 2
    error = capsys.readouterr().err
    assert not [message for message in messages if message not in error]
    assert not (here / "job.yaml").exists()
