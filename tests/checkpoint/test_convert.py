"""Conversions: nothing is lost on the way there and back, and nothing half is left behind."""

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.contents import contents
from checkpoint.test_validity import flip_a_bit, forge
from checkpoint.trained import small_job
from generate.written import write_run
from model.kinds import KINDS
from phalanx.checkpoint.consolidated import open_source
from phalanx.checkpoint.convert import convert
from phalanx.checkpoint.diff import compare
from phalanx.checkpoint.inventory import damage
from phalanx.checkpoint.manifest import read
from phalanx.checkpoint.save import save_tensors
from phalanx.config.layout import Layout
from phalanx.errors import CheckpointError, DamagedCheckpointError, JobError, PhalanxError, RunError
from phalanx.generate.load import load_run
from train.runs import change, train

LAYOUTS = [(Layout(tp=2), "fp64"), (Layout(dp_shard=2, zero=3), "bf16"), (Layout(pp=2, accumulation=3), "fp32")]


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda param: f"{param[0].line()} {param[1]}")
def job(request, ranks, tmp_path_factory):
    """The job of a run of six steps, with checkpoints after four and six."""
    job = small_job(tmp_path_factory.mktemp("convert"), *request.param)
    ranks(train, job.layout.processes, job)
    return job


def convert_all(source, target, form, **options):
    with open_source(source, trusted=True) as tensors:
        return convert(tensors, target, form, **options)


def difference(a, b):
    with open_source(a, trusted=True) as left, open_source(b, trusted=True) as right:
        return compare(left, right)


def test_a_run_resumes_from_what_was_converted_as_if_nothing_had_happened(job, ranks, tmp_path):
    run = Path(job.run.dir) / job.run.name
    step = run / "checkpoints" / "step-000004"
    convert_all(step, tmp_path / "dcp", "dcp")
    convert_all(tmp_path / "dcp", tmp_path / "one", "phalanx")
    convert_all(step, tmp_path / "folder", "safetensors", most_file_bytes=8_000)
    assert (tmp_path / "folder" / "model.safetensors.index.json").is_file()
    convert_all(tmp_path / "folder", tmp_path / "two", "phalanx", most_file_bytes=8_000)
    before = contents(step)
    for name in ("one", "two"):
        path = tmp_path / name / "checkpoints" / "step-000004"
        assert damage(path) == []
        assert difference(step, path).is_empty
        found = contents(path)
        assert found.keys() == before.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in before.items())
        assert all(found[key].dtype == tensor.dtype for key, tensor in before.items())
        assert read(path).meta == read(step).meta
        assert (tmp_path / name / "latest").read_text() == "checkpoints/step-000004\n"
    resumed = change(job, "run", dir=str(tmp_path), name="two")
    ranks(train, job.layout.processes, resumed)
    straight = contents(run / "checkpoints" / "step-000006")
    again = contents(tmp_path / "two" / "checkpoints" / "step-000006")
    assert all(torch.equal(again[key], tensor) for key, tensor in straight.items())
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_weights_alone_begin_a_run_with_new_moments(job, ranks, tmp_path):
    done = convert_all(Path(job.run.dir) / job.run.name, tmp_path / "w", "safetensors", weights_only=True, dtype="bf16")
    found = load_file(tmp_path / "w" / "model.safetensors")
    assert len(found) == done.tensors
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    done = convert_all(tmp_path / "w", tmp_path / "new", "phalanx")
    assert done.notes[0].startswith("no optimizer state")
    assert read(tmp_path / "new" / "checkpoints" / "step-000006").meta["updates"] == 0
    ranks(train, job.layout.processes, change(change(job, "run", dir=str(tmp_path), name="new"), "train", steps=7))
    assert read(tmp_path / "new" / "checkpoints" / "step-000007").meta["updates"] == 1


@pytest.fixture
def run(tmp_path):
    """A run without optimizer."""
    write_run(tmp_path / "run", KINDS["llama"])
    return tmp_path / "run"


@pytest.fixture
def step(run):
    return run / "checkpoints" / "step-000001"


def test_one_file_has_everything_and_generates_the_same_text(run, tmp_path):
    convert_all(run, tmp_path / "one.safetensors", "safetensors")
    shutil.copy(run / "tokenizer.json", tmp_path)
    convert_all(tmp_path / "one.safetensors", tmp_path / "again", "phalanx")
    texts = [load_run(path, device="cpu").text("5 0 1", max_new_tokens=8, seed=1) for path in (run, tmp_path / "again")]
    assert texts[0] == texts[1]
    assert "\n  name: again  # step 1\n" in (tmp_path / "again" / "config.yaml").read_text()


def left(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("target", "form", "options", "message"),
    [
        ("run", "dcp", {}, "run exists, and nothing is overwritten"),
        ("run/latest/x", "dcp", {}, "run/latest is no folder"),
        ("x", "safetensors", {"dtype": "bf16"}, "--dtype needs --weights-only"),
        ("x.safetensors", "phalanx", {}, "--to phalanx writes a folder"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused_before_anything_is_written(run, tmp_path, target, form, options, message):
    with pytest.raises(JobError, match=message):
        convert_all(run, tmp_path / target, form, **options)
    assert left(tmp_path) == ["run"]


def test_a_damaged_source_gets_no_new_digests(run, step, tmp_path):
    flip_a_bit(step / "rank-00000.safetensors")
    with pytest.raises(DamagedCheckpointError, match="does not match its digest"):
        convert_all(step, tmp_path / "x", "safetensors")
    assert left(tmp_path) == ["run"]


def test_values_that_a_type_cannot_hold_are_named(tmp_path):
    meta = {"job": {}}
    save_tensors(tmp_path / "run" / "checkpoints", 1, {"a": torch.ones(2), "b": torch.tensor([1e38])}, meta)
    with pytest.raises(CheckpointError, match="b exceeds the range of fp16"):
        convert_all(tmp_path / "run", tmp_path / "x", "safetensors", weights_only=True, dtype="fp16")
    assert left(tmp_path) == ["run"]


def test_nan_never_gets_into_a_checkpoint(run, tmp_path):
    convert_all(run, tmp_path / "a.safetensors", "safetensors")
    tensors = load_file(tmp_path / "a.safetensors")
    tensors["embed.weight"].view(-1)[3] = torch.nan
    with open_source(tmp_path / "a.safetensors") as source:
        facts = {"step": 1, "meta": source.manifest.meta}
    save_file(tensors, tmp_path / "b.safetensors", {"phalanx": json.dumps(facts)})
    with pytest.raises(CheckpointError, match="embed.weight holds NaN"):
        convert_all(tmp_path / "b.safetensors", tmp_path / "x", "phalanx")


def test_without_space_nothing_is_written(run, tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1000))
    with pytest.raises(RunError, match="could not be written: it needs .*, and .* has 1000B free"):
        convert_all(run, tmp_path / "x", "dcp")
    assert left(tmp_path) == ["run"]


@pytest.mark.parametrize("form", ["safetensors", "dcp", "phalanx"])
def test_an_interrupted_conversion_leaves_nothing(run, tmp_path, form):
    def interrupt(what, done, total):
        if what == "writing":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_all(run, tmp_path / "x", form, progress=interrupt)
    assert left(tmp_path) == ["run"]


@pytest.mark.parametrize(
    ("change_meta", "message"),
    [
        (None, "has no job and no step"),
        (lambda meta: meta | {"samples": "many"}, "samples: expected a whole number, found 'many'"),
        (lambda meta: meta | {"vocab_size": 5}, "does not fit the model: embed.weight is"),
        (lambda meta: meta | {"job": {"model": 3}}, "was written by a job this program cannot read"),
    ],
    ids=["none", "type", "shape", "job"],
)
def test_a_run_needs_the_metadata_of_one(step, tmp_path, change_meta, message):
    manifest = read(step)
    forge(step, meta=change_meta(manifest.meta) if change_meta else {})
    with pytest.raises(CheckpointError, match=message):
        convert_all(step, tmp_path / "x", "phalanx")
    assert left(tmp_path) == ["run"]


def test_a_part_of_the_optimizer_is_not_enough(run, step, tmp_path):
    tensors, meta = contents(step), read(step).meta
    shutil.rmtree(step)
    save_tensors(run / "checkpoints", 1, tensors | {"exp_avg/embed.weight": tensors["embed.weight"]}, meta)
    with pytest.raises(CheckpointError, match="lacks .* tensors of the optimizer, such as exp_avg/"):
        convert_all(step, tmp_path / "x", "phalanx")


def sharded(run, tmp_path):
    convert_all(run, tmp_path / "folder", "safetensors", most_file_bytes=5000)
    return tmp_path / "folder"


FOLDER_DAMAGE = {
    "missing": (lambda p: next(p.glob("model-00002*")).unlink(), "tensors that its files lack"),
    "index": (lambda p: (p / "model.safetensors.index.json").write_text("[1]"), "is no index"),
    "nested": (lambda p: (p / "model.safetensors.index.json").write_text("[" * 10**5), "is no index"),
    "twice": (lambda p: shutil.copy(next(p.glob("*00002*")), p / "z.safetensors"), "both .* and .* have"),
    "no safetensors": (lambda p: next(p.glob("*00001*")).write_bytes(b"{}" * 20), "00001.* cannot be read"),
    "device": (lambda p: (p / "a.safetensors").symlink_to("/dev/zero"), "a character device"),
    "step": (
        lambda p: save_file({"x": torch.ones(1)}, p / "a.safetensors", {"phalanx": '{"step": "1"}'}),
        "about another checkpoint than that of the other files",
    ),
    "type": (
        lambda p: save_file({"x": torch.ones(1, dtype=torch.complex64)}, p / "a.safetensors"),
        "x has the type C64",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), FOLDER_DAMAGE.values(), ids=FOLDER_DAMAGE)
def test_every_damage_of_a_folder_is_named(run, tmp_path, spoil, message):
    path = sharded(run, tmp_path)
    spoil(path)
    with pytest.raises(PhalanxError, match=message) as caught:
        convert_all(path, tmp_path / "x", "phalanx")
    assert caught.value.exit_code == 4


def test_files_of_others_are_converted_between_formats_under_their_names(tmp_path):
    save_file({"layers.0.w": torch.arange(6.0).view(2, 3)}, tmp_path / "a.safetensors")
    convert_all(tmp_path / "a.safetensors", tmp_path / "dcp", "dcp")
    convert_all(tmp_path / "dcp", tmp_path / "b.safetensors", "safetensors")
    assert torch.equal(load_file(tmp_path / "b.safetensors")["layers.0.w"], torch.arange(6.0).view(2, 3))
    with pytest.raises(JobError, match="--step 3: .* is no run"):
        open_source(tmp_path / "b.safetensors", 3)
