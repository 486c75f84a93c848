"""Conversions and merged adapters: nothing is lost on the way there and back, and nothing half is left behind."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.contents import contents, save_tensors
from checkpoint.test_save import flip_a_bit, forge
from checkpoint.trained import small_job
from generate.written import write_run
from model.kinds import KINDS
from phalanx.blocks.parameters import parameter_shapes, trained_shapes
from phalanx.check.load import as_dict
from phalanx.checkpoint.consolidated import open_source
from phalanx.checkpoint.convert import convert, merged
from phalanx.checkpoint.diff import compare
from phalanx.checkpoint.inventory import damage, newest_valid
from phalanx.checkpoint.manifest import Box, Manifest, job_of, problems, read, require_resumable
from phalanx.checkpoint.shard_file import Reader
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.model import LoRA, MoE
from phalanx.errors import CheckpointError, DamagedCheckpointError, JobError, PhalanxError, RunError
from phalanx.generate.load import load_run
from train.runs import change, moves_between, train

# Conversions: nothing is lost on the way there and back, and nothing half is left behind.


LAYOUTS = [(Layout(tp=2), "fp64"), (Layout(dp_shard=2, zero=3), "bf16"), (Layout(pp=2, accumulation=3), "fp32")]


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda param: f"{param[0].line()} {param[1]}")
def job(request, ranks, tmp_path_factory):
    """The job of a run of six steps, with checkpoints after four and six."""
    job = small_job(tmp_path_factory.mktemp("convert"), *request.param, every=4)
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


# Checkpoints with adapters: resumed in other layouts, and merged into a model without adapters.

ADAPTERS = LoRA(rank=2, alpha=3, targets="attention,experts.down,mlp.up")
EXPERTS = MoE(n_experts=4, top_k=2, d_ff=8, n_dense_layers=1)


@pytest.fixture(scope="module")
def adapted_job(tmp_path_factory):
    adapted_job = small_job(tmp_path_factory.mktemp("adapters"), every=4)
    return change(adapted_job, "model", lora=ADAPTERS, moe=EXPERTS)


@pytest.fixture(scope="module")
def adapted(adapted_job, ranks):
    """A run that changed its layout on the way, beside the one of one process."""
    moves_between(
        ranks, adapted_job, [Layout(dp_shard=2, tp=2, zero=1), Layout(pp=2, dp_shard=2, ep=2), Layout(dp_replicate=2)]
    )
    folder = Path(adapted_job.run.dir) / "moved"
    (folder / "config.yaml").touch()  # which the launcher writes
    return folder


def tensors_of(adapted: Path) -> dict[str, torch.Tensor]:
    manifest = newest_valid(adapted / "checkpoints")
    assert manifest is not None
    return contents(manifest.path)


def by_formula(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """W + alpha / rank · B A of every matrix with an adapter."""
    plain = {name: tensor for name, tensor in tensors.items() if "/" not in name and ".lora_" not in name}
    for name, tensor in plain.items():
        layer = name.removesuffix(".weight")
        if (a := tensors.get(f"{layer}.lora_a.weight")) is not None:
            plain[name] = tensor + 3 / 2 * (tensors[f"{layer}.lora_b.weight"] @ a)
    return plain


def test_the_optimizer_has_state_of_adapters_alone(adapted_job, adapted):
    kept = {name.partition("/")[2] for name in tensors_of(adapted) if "/" in name}
    assert kept == set(trained_shapes(adapted_job.model, 13))


@pytest.fixture(scope="module")
def whole(adapted, tmp_path_factory):
    """The run with merged weights."""
    target = tmp_path_factory.mktemp("merged") / "whole"
    with open_source(adapted) as source:
        done = convert(source, target, "phalanx", merge_lora=True)
    assert any("begins with new moments" in note for note in done.notes)
    return target


def test_a_merged_run_computes_the_same_without_adapters(adapted_job, adapted, whole):
    found, expected = tensors_of(whole), by_formula(tensors_of(adapted))
    assert found.keys() == expected.keys() == parameter_shapes(replace(adapted_job.model, lora=LoRA()), 13).keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    tokens = torch.arange(20).view(2, 10) % 13
    with torch.no_grad():
        plain, adapted = (load_run(path, device="cpu").decoder.model for path in (whole, adapted))
        assert not any(".lora_" in name for name, _ in plain.named_parameters())
        torch.testing.assert_close(plain(tokens), adapted(tokens), rtol=1e-10, atol=1e-12)


def test_it_resumes_with_every_weight_trained(adapted_job, whole, ranks, tmp_path):
    shutil.copytree(whole, tmp_path / "whole")
    longer = change(change(adapted_job, "run", dir=str(tmp_path), name="whole"), "train", steps=7)
    ranks(train, 1, change(longer, "model", lora=LoRA()))
    before, after = tensors_of(whole), tensors_of(tmp_path / "whole")
    assert not any(torch.equal(before[name], after[name]) for name in before if "router.bias" not in name)


def test_weights_may_be_merged_in_a_narrower_type(adapted, tmp_path):
    with open_source(adapted) as source:
        convert(source, tmp_path / "model.safetensors", "safetensors", merge_lora=True, dtype="bf16")
    expected = by_formula(tensors_of(adapted))
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(tensor, expected.pop(name).bfloat16())
    assert not expected


def test_boxes_are_merged_alone(adapted):
    expected = by_formula(tensors_of(adapted))
    with open_source(adapted) as source, merged(source) as reader:
        for name, shape in (("blocks.0.attn.wk.weight", (16, 16)), ("blocks.1.moe.experts.down.weight", (4, 16, 8))):
            offsets, sizes = tuple(n // 4 for n in shape), tuple(n // 2 for n in shape)
            part = expected[name][tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))]
            torch.testing.assert_close(reader.read(name, Box(offsets, sizes)), part, rtol=1e-13, atol=1e-15)
        with pytest.raises(CheckpointError, match="no parameter exp_avg/embed.weight"):
            reader.read("exp_avg/embed.weight")


def test_without_adapters_there_is_nothing_to_merge(adapted, whole, tmp_path):
    with open_source(whole) as source:
        assert merged(source) is source
        with pytest.raises(JobError, match="--merge-lora: .* has no adapters"):
            convert(source, tmp_path / "again", "phalanx", merge_lora=True)
    manifest = newest_valid(adapted / "checkpoints")
    assert manifest is not None
    with pytest.raises(CheckpointError, match="has adapters and no job"):
        merged(Reader(replace(manifest, meta={})))


# The types of a checkpoint's metadata.

GUARD = {"steps": 5, "losses": [1.0, 2], "norms": [0.5], "interventions": [3]}
META = {
    "job": as_dict(Job()),
    "samples": 60,
    "updates": 5,
    "replicas": 1,
    "loss_scale": {"value": 1.0, "good_steps": 5},
    "data": "ab12",
    "vocab_size": 13,
    "val_loss": 2.5,
    "val_step": 5,
    "guard": GUARD,
}


def manifest(**changes):
    return Manifest(Path("step-000005"), 5, True, META | changes, {}, {})


def test_good_metadata_pass():
    require_resumable(manifest())
    require_resumable(manifest(val_loss=None, val_step=None))
    assert job_of(manifest()).train == Job().train
    assert not problems({})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("job", []),
        ("samples", "60"),
        ("samples", True),
        ("updates", 5.0),
        ("updates", -1),
        ("replicas", 0),
        ("loss_scale", 1.0),
        ("loss_scale", {"value": 0.0, "good_steps": 5}),
        ("loss_scale", {"value": float("nan"), "good_steps": 5}),
        ("loss_scale", {"value": 1.0}),
        ("data", None),
        ("vocab_size", [13]),
        ("val_loss", "low"),
        ("val_step", 1.5),
        ("guard", {}),
        ("guard", GUARD | {"losses": 3}),
        ("guard", GUARD | {"norms": ["high"]}),
        ("guard", GUARD | {"interventions": [None]}),
    ],
    ids=str,
)
def test_every_wrong_type_is_one_message(name, value):
    wrong = rf"{name}[ .\w]*: (expected|must|\w+ is missing)"
    with pytest.raises(CheckpointError, match=f"step-000005: its metadata are not valid: {wrong}"):
        require_resumable(manifest(**{name: value}))


def test_all_problems_are_named_at_once():
    with pytest.raises(CheckpointError) as caught:
        require_resumable(manifest(samples=None, updates="x" * 100))
    shown = f"'{'x' * 79}…"
    assert str(caught.value).endswith(
        f"samples: expected a whole number, found null; updates: expected a whole number, found {shown}"
    )
    incomplete = Manifest(Path("step-000005"), 5, True, {"job": {}}, {}, {})
    with pytest.raises(CheckpointError, match="not of a training run: it lacks data, guard, loss_scale, replicas"):
        require_resumable(incomplete)
