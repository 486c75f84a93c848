"""Published files of other frameworks: what the table holds, and how one is read from a clone."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest
from benchmarks.foreign import PRINTED, PublishedFile, misread, predicted, published_files

TOML = """\
[model]
name = "llama3"
flavor = "debugmodel"
[training]
local_batch_size = 1
seq_len = 512
[parallelism]
tensor_parallel_degree = 2
"""


def test_rows_name_a_commit_and_columns_that_are_read():
    rows = published_files()
    assert all(len(row.commit) == 40 and row.tokens > 0 and row.folders for row in rows)
    assert {word.partition("=")[0] for row in rows for word in row.printed.split()} <= {*PRINTED}


def test_a_file_is_read_as_it_was_and_as_the_run_had_it(tmp_path):
    clone = tmp_path / "clones" / "titan"
    (clone / "configs").mkdir(parents=True)
    (clone / "configs" / "a.toml").write_text(TOML)

    def git(*words: str) -> str:
        command = ["git", "-C", str(clone), "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD")
    (clone / "configs" / "a.toml").write_text("later")
    changes = (("local_batch_size = 1", "local_batch_size = 4"),)
    row = PublishedFile(
        "owner/titan", commit, ("configs",), "", "configs/a.toml", 1.0, "mbs=4 tp=2 ep=1", changes=changes
    )
    row = replace(row, words="cluster=dgx-h100:1")
    document = predicted(row, clone.parent, tmp_path)
    assert document["tokens_per_s_per_device"] > 0
    assert misread(row, document) == []
    assert misread(replace(row, printed="mbs=2 tp=2"), document) == ["mbs 4, printed 2"]
    with pytest.raises(RuntimeError, match="0 places hold"):
        predicted(replace(row, changes=(("absent", ""),)), clone.parent, tmp_path)
