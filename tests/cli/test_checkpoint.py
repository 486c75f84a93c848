"""`phalanx checkpoint` as a user calls it: what is printed, exit codes, and what it never imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import phalanx
from checkpoint.contents import save_tensors
from checkpoint.test_save import flip_a_bit, forge
from generate.written import write_run
from model.kinds import KINDS
from phalanx.check.load import as_dict
from phalanx.checkpoint import inventory, manifest
from phalanx.cli.main import main
from phalanx.config.job import Checkpoint, Job
from phalanx.config.layout import Layout

JOB = Job(layout=Layout(dp_shard=2, zero=1), checkpoint=Checkpoint(keep=2, keep_every=20, keep_best=True))
ROOT = Path(phalanx.__file__).parents[2]
SHARDS = "rank-00000.safetensors"


def save(run: Path, step: int, loss: float | None = None) -> Path:
    tensors = {"embed.weight": torch.full((4, 3), float(step)), "exp_avg/embed.weight": torch.ones(4, 3)}
    meta = {"job": as_dict(JOB), "samples": 8 * step, "val_loss": loss, "val_step": step}
    return save_tensors(run / "checkpoints", step, tensors, meta)


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """Six checkpoints, of which the newest are damaged."""
    monkeypatch.chdir(tmp_path)
    for step, loss in {10: 2.5, 20: 3.5, 30: None, 40: 3.0, 50: 2.75, 60: None}.items():
        save(tmp_path / "run", step, loss)
    flip_a_bit(tmp_path / "run" / "checkpoints" / "step-000050" / SHARDS)
    os.truncate(tmp_path / "run" / "checkpoints" / "step-000060" / SHARDS, 9)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.yaml").touch()
    return tmp_path / "run"


def command(capsys, *words: str) -> tuple[int, str, str]:
    code = main(["checkpoint", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def document(capsys, *words: str, code: int = 0):
    found, out, _ = command(capsys, *words, "--json")
    assert found == code
    return json.loads(out)


def test_list_tells_what_there_is_and_what_will_be_removed(run, capsys):
    (run / "checkpoints" / ".step-000070.tmp-ab").mkdir()
    code, out, _ = command(capsys, "list", "run")
    assert code == 0
    head, _, _, *lines = out.splitlines()
    assert head.startswith("run/checkpoints: 6 checkpoints, 5 whole, ")
    rows = [line.split() for line in lines[:6]]
    assert [(row[0], row[3]) for row in rows[1:]] == [(str(step), "whole") for step in (50, 40, 30, 20, 10)]
    assert rows[0][0] == "60"
    assert rows[0][-2:] == ["damaged", "latest"]
    assert rows[2][4:] == ["3.0000", "dp_shard=2,zero=1", "permanent"]
    assert rows[3][4:] == ["dp_shard=2,zero=1", "expired"]
    assert rows[5][4:] == ["2.5000", "dp_shard=2,zero=1", "best"]
    assert f"checkpoint file run/checkpoints/step-000060/{SHARDS} has 9 bytes" in out
    assert "retention: keep=2, keep_every=20, keep_best=true; the next save removes 1 (" in out
    assert "unfinished: .step-000070.tmp-ab" in out


def test_list_as_a_document(run, capsys):
    found = document(capsys, "list", "run/checkpoints")
    assert found["retention"] == {"keep": 2, "keep_every": 20, "keep_best": True}
    steps = {each["step"]: each for each in found["checkpoints"]}
    assert [step for step, each in steps.items() if each["expired"]] == [30]
    assert [step for step, each in steps.items() if each["permanent"]] == [40, 20]
    assert [step for step, each in steps.items() if each["best"]] == [10]
    assert [step for step, each in steps.items() if not each["whole"]] == [60]
    assert steps[10]["bytes"] == inventory.bytes_in(Path("run/checkpoints/step-000010"))
    assert found["bytes"] == sum(each["bytes"] for each in steps.values())
    assert 0 <= steps[10]["age_s"] < 3600


def test_list_of_other_versions_foreign_jobs_and_nothing(run, capsys):
    forge(run / "checkpoints" / "step-000040", version=1)
    forge(run / "checkpoints" / "step-000030", meta={"job": {"x": 1}})
    _, out, _ = command(capsys, "list", "run")
    assert "unreadable" in out
    assert "format version 1" in out
    assert "unknown" in out
    (run.parent / "none" / "checkpoints").mkdir(parents=True)
    assert command(capsys, "list", "none") == (0, "none/checkpoints: no checkpoint yet\n", "")


def test_show_names_sizes_tensors_and_boxes(run, capsys):
    code, out, _ = command(capsys, "show", "run", "--step", "40", "--boxes", "--tensors", "exp_avg/*")
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert lines[0][:3] == ["run/checkpoints/step-000040:", "step", "40,"]
    assert ["layout:", "dp_shard=2,zero=1", "precision:", "fp32"] in lines
    assert ["parameters", "1", "12", "48B"] in lines
    assert ["total", "2", "24", "96B"] in lines
    assert ["exp_avg/embed.weight", "F32", "4×3", "1"] in lines
    assert ["[0:4,0:3]", SHARDS] in lines
    assert not any(line[:1] == ["embed.weight"] for line in lines)
    assert "and 1 more tensors" in command(capsys, "show", "run", "--limit", "1")[1]
    assert command(capsys, "show", "run")[1].startswith("run/checkpoints/step-000050: step 50"), "the newest whole"
    assert (
        f"damaged: checkpoint file run/checkpoints/step-000060/{SHARDS} has 9"
        in command(capsys, "show", "run", "--step", "60")[1]
    )


def test_show_as_a_document(run, capsys):
    found = document(capsys, "show", "run/checkpoints/step-000040")
    assert found["meta"]["samples"] == 320
    assert found["problem"] is None
    assert found["tensors"]["embed.weight"] == {
        "dtype": "F32",
        "shape": [4, 3],
        "bytes": 48,
        "boxes": [{"file": SHARDS, "offsets": [0, 0], "sizes": [4, 3]}],
    }
    assert set(found["kinds"]) == {"parameters", "exp_avg", "total"}


def test_verify_finds_all_damage_and_exits_4(run, capsys):
    code, out, _ = command(capsys, "verify", "run")
    assert code == 4
    assert out.count(": whole\n") == 4
    assert out.endswith("4 of 6 whole\n")
    assert f"{SHARDS} has 9 bytes" in out
    assert f"{SHARDS} does not match its digest" in out
    assert command(capsys, "verify", "run", "--step", "40")[0] == 0
    found = document(capsys, "verify", "run", code=4)
    assert [each["ok"] for each in found["checkpoints"]] == [False, False, True, True, True, True]


def test_verify_tells_every_problem_of_a_checkpoint_at_once(run, capsys):
    path = run / "checkpoints" / "step-000040"
    facts = manifest.read(path)
    missing = {"gone.safetensors": {"bytes": 1, "xxh3_128": ""}}
    corrupt = {SHARDS: {"bytes": facts.files[SHARDS].bytes, "xxh3_128": "0" * 64}}
    forge(path, files=missing | corrupt, meta=facts.meta | {"samples": "x"}, finite=False)
    found = document(capsys, "verify", path, code=4)
    [entry] = found["checkpoints"]
    assert len(entry["problems"]) == 4
    for text in (
        "samples: expected a whole number, found 'x'",
        "not checked for NaN",
        "gone.safetensors is missing",
        "does not match its digest",
    ):
        assert any(text in problem for problem in entry["problems"]), text


def test_an_interrupted_verify_tells_what_it_knows(run, capsys, monkeypatch):
    real = inventory.damage

    def interrupted(path, progress):
        if path.name == "step-000040":
            raise KeyboardInterrupt
        return real(path, progress)

    monkeypatch.setattr(inventory, "damage", interrupted)
    code, out, err = command(capsys, "verify", "run")
    assert code == 130
    assert "step-000060: damaged" in out
    assert "interrupted" in err


def test_an_interruption_ends_the_threads_that_hash(run, monkeypatch):
    monkeypatch.setattr(inventory, "CHUNK_BYTES", 1)

    def interrupt(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(inventory, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        inventory.damage(run / "checkpoints" / "step-000040")


def test_convert_and_diff(run, capsys):
    code, out, _ = command(capsys, "convert", "run", "w.safetensors", "--to", "safetensors", "--step", "40")
    assert code == 0
    assert out.startswith("w.safetensors: 2 tensors, 96B\n")
    code, out, _ = command(capsys, "diff", "w.safetensors", "run/checkpoints/step-000040")
    assert (code, out) == (0, "equal: 2 tensors bit-equal\n")
    found = document(capsys, "diff", "w.safetensors", "run/checkpoints/step-000020", code=1)
    assert (found["equal"], found["tensors_equal"]) == (False, 1)
    [tensor] = found["tensors"]
    assert tensor["values"] == {"elements": 12, "max_abs": 20, "max_rel": 0.5, "at": [0, 0], "a": 40, "b": 20}
    assert {each["name"] for each in found["fields"]} == {"step", "samples", "val_loss", "val_step"}
    code, out, _ = command(capsys, "diff", "w.safetensors", "run/checkpoints/step-000020")
    assert code == 1
    assert "1 tensor bit-equal, 1 different; 4 fields of the metadata different" in out
    assert "embed.weight  F32 4×3  F32 4×3        12       20      0.5  [0, 0]       40       20" in out
    words = ("diff", "w.safetensors", "run/checkpoints/step-000020", "--tensors", "exp_avg/*")
    assert command(capsys, *words)[0] == 1
    assert command(capsys, *words, "--tensors-only")[0] == 0


def test_numbers_that_json_lacks_are_text(run, capsys):
    save_tensors(run.parent / "nan" / "checkpoints", 1, {"embed.weight": torch.full((4, 3), torch.nan)}, {})
    found = document(capsys, "diff", "nan", "run", "--tensors", "embed*", code=1)
    assert found["tensors"][0]["values"]["max_abs"] == "inf"


def test_a_run_is_converted_there_and_back(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", KINDS["llama"])
    assert document(capsys, "convert", "run", "dcp", "--to", "dcp")["form"] == "dcp"
    code, _, err = command(capsys, "convert", "dcp", "again", "--to", "phalanx")
    assert code == 2
    assert "is pickle and not read without --trust" in err
    code, out, _ = command(capsys, "convert", "dcp", "again", "--to", "phalanx", "--trust")
    assert code == 0
    assert "resume:  phalanx train again/config.yaml" in out
    assert command(capsys, "diff", "run", "again")[0] == 0
    assert command(capsys, "show", "dcp", "--trust")[0] == 0


def test_a_folder_that_is_named_after_another_step_is_no_newer_checkpoint(run, capsys):
    os.rename(run / "checkpoints" / "step-000040", run / "checkpoints" / "step-000400")
    said = "step-000400 holds step 40: name its folder step-000040"
    assert command(capsys, "show", "run/checkpoints/step-000400")[0] == 4
    code, out, _ = command(capsys, "list", "run")
    assert (code, said in " ".join(out.split())) == (0, True)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["lst", "run"], 2, "did you mean `phalanx checkpoint list`"),
        (["run"], 2, "put the command first: `phalanx checkpoint list run`"),
        (["list"], 2, "list takes RUN, found nothing"),
        (["diff", "run"], 2, "diff takes A and B, found run"),
        (["show", "run", "--stp", "4"], 2, "unknown option --stp; did you mean --step?"),
        (["show", "run", "--step", "0"], 2, "must be at least 1"),
        (["convert", "run", "x"], 2, "needs --to safetensors, --to dcp or --to phalanx"),
        (["convert", "run", "x", "--to", "hf"], 2, "expected one of safetensors, dcp, phalanx, found 'hf'"),
        (["diff", "run", "run", "--tensors", "none.*"], 2, "no tensor has such a name"),
        (["show", "run", "--tensors", "embed.wieght"], 2, "no tensor has such a name; there is embed.weight"),
        (["list", "nowhere"], 2, "no run in nowhere: there is no such folder"),
        (["list", "."], 2, "no checkpoints in .: it is neither a run's directory nor"),
        (["list", "begun"], 2, "begun has no checkpoint yet; it writes one at its end"),
        (["verify", "run/checkpoints/step-000040", "--step", "3"], 4, "is the checkpoint of another step than 3"),
        (["show", "run", "--step", "41"], 2, "no checkpoint of step 41; there are: 60, 50, 40, 30, 20, 10"),
        (["convert", "run", "x", "--to", "dcp"], 4, "does not match its digest"),
        (["diff", "run", "nowhere.safetensors"], 4, "nowhere.safetensors"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_message(run, capsys, words, code, message):
    found, out, err = command(capsys, *words)
    assert (found, out) == (code, "")
    assert message in err
    assert "phalanx: " in err
    assert "Traceback" not in err


@pytest.mark.parametrize("words", [["list"], ["show"], ["verify", "--step", "40"]], ids=str)
def test_looking_at_checkpoints_imports_no_torch(run, words):
    program = (
        "import sys; from phalanx.cli.main import main; code = main(sys.argv[1:]); "
        "sys.exit(code or any(name.split('.')[0] in ('torch', 'safetensors', 'rich') for name in sys.modules))"
    )
    argv = [sys.executable, "-c", program, "checkpoint", words[0], str(run), *words[1:]]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
