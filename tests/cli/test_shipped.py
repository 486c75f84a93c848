"""The verbs `examples` and `docs`: what a user without a clone starts from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.check.load import load_file
from phalanx.cli.main import run
from phalanx.errors import JobError


def test_every_example_is_listed_written_and_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["examples", "--json"]) == 0
    names = json.loads(capsys.readouterr().out)
    assert {"main", "pipeline", "preferences"} <= set(names)
    assert run(["examples", "all"]) == 0
    written = capsys.readouterr().out
    for name in names:
        assert f"written: examples/{name}.yaml" in written
        if name not in ("preferences", "smollm2"):  # starts from another run
            assert load_file(Path(f"examples/{name}.yaml")).job.run.name == name
    assert "written: examples/preferences.jsonl" in written


def test_an_example_brings_its_rows_and_overwrites_nothing(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["examples", "preferences", "--out", "jobs"]) == 0
    assert sorted(path.name for path in Path("jobs").iterdir()) == ["preferences.jsonl", "preferences.yaml"]
    assert run(["examples", "preferences", "--out", "jobs"]) == 0  # the same again changes nothing
    Path("jobs/preferences.yaml").write_text("mine")
    with pytest.raises(JobError, match="is there and differs"):
        run(["examples", "preferences", "--out", "jobs"])
    assert Path("jobs/preferences.yaml").read_text() == "mine"
    capsys.readouterr()


@pytest.mark.parametrize("word", ["job", "docs/reference/job.md", "job.md"])
def test_a_page_is_found_by_the_name_that_messages_have(word: str, capsys) -> None:
    assert run(["docs", word]) == 0
    assert capsys.readouterr().out.startswith("# The job file")


def test_a_mistyped_name_gets_a_near_one() -> None:
    with pytest.raises(JobError, match="did you mean main?"):
        run(["examples", "mian"])
    with pytest.raises(JobError, match="did you mean"):
        run(["docs", "tutorial/first-run"])
