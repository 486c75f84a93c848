"""`phalanx verify RUN_A --against RUN_B`: when and where two runs part, and why, from their files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.contents import save_tensors
from phalanx.blocks.parameters import parameter_shapes
from phalanx.check.load import as_dict, as_yaml, load_words
from phalanx.cli.main import main
from phalanx.config import overrides
from phalanx.verify.against import compare_runs

WORDS = [
    "model.n_layers=1",
    "model.d_model=8",
    "model.n_heads=2",
    "model.d_ff=8",
    "model.seq_len=8",
    "model.vocab_size=9",
]
STEPS = 20
Edit = Callable[[int, dict[str, Any]], dict[str, Any]]


def write(
    path: Path,
    *words: str,
    edit: Edit = lambda step, row: row,
    saved: Mapping[int, Mapping[str, float]] = {10: {}, 20: {}},
    steps: range = range(1, STEPS + 1),
    events: tuple[dict[str, Any], ...] = (),
    data: str = "d1",
    env: Mapping[str, Any] = {},
) -> Path:
    """Writes a run as training leaves it: `edit` changes rows of metrics, `saved` has by step what is added to
    tensors of its checkpoint."""
    loaded = load_words(overrides.parse([*WORDS, *words]))
    path.mkdir()
    (path / "config.yaml").write_text(as_yaml(loaded))
    (path / "env.json").write_text(json.dumps({"packages": {"torch": "2.13.0"}, "cores": 2} | dict(env)))
    rows: list[dict[str, Any]] = [{"event": "start", "time": 1.0, "step": 0, "vocab_size": 9}]
    for step in steps:
        row = {"event": "step", "time": 2.0 + step, "step": step, "loss": 5 / step**0.1, "grad_norm": 2.0, "lr": 1e-3}
        rows.append(edit(step, row))
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in (*rows, *events)))
    generator = torch.Generator().manual_seed(0)
    state: dict[str, torch.Tensor] = {}
    for name, shape in parameter_shapes(loaded.job.model, 9).items():
        state[name] = torch.randn(shape, generator=generator)
        state[f"exp_avg/{name}"] = 0.01 * torch.randn(shape, generator=generator)
    for step, added in saved.items():
        here = {name: tensor + added.get(name, 0.0) for name, tensor in state.items()}
        meta = {"job": as_dict(loaded.job), "vocab_size": 9, "samples": 8 * step, "updates": step, "data": data}
        save_tensors(path / "checkpoints", step, here, meta)
    return path


def times(factor: float, begin: int, name: str = "loss") -> Edit:
    return lambda step, row: row | ({name: row[name] * factor} if step >= begin else {})


def document(capsys: pytest.CaptureFixture[str], a: Path, b: Path, code: int) -> dict[str, Any]:
    found = main(["verify", str(a), "--against", str(b), "--json"])
    captured = capsys.readouterr()
    assert found == code, captured.err or captured.out
    return json.loads(captured.out)


def test_equal_runs_are_equal_to_the_bit(tmp_path, capsys):
    found = document(capsys, write(tmp_path / "a"), write(tmp_path / "b", "run.name=b"), 0)
    assert (found["verdict"], found["cause"], found["fields"]) == ("equal", "", {})
    assert found["summary"] == "equal to the bit: 20 steps and 2 checkpoints"


def test_the_step_the_tensor_and_the_cause_are_named(tmp_path, capsys):
    """The learning rate parts at step 12, the loss a step later, and the first tensor in the model's order is not the
    first in the file."""
    a = write(tmp_path / "a")
    changed = {"blocks.0.mlp.up.weight": 1e-2, "final_norm.weight": 2e-2, "exp_avg/blocks.0.attn.wq.weight": 1e-3}

    def edit(step: int, row: dict[str, Any]) -> dict[str, Any]:
        return times(1 + 3e-4, 13)(step, times(2.0, 12, "lr")(step, row))

    b = write(tmp_path / "b", "optimizer.lr=0.002", edit=edit, saved={10: {}, 20: changed})
    found = document(capsys, a, b, 1)
    assert found["verdict"] == "parts"
    loss, lr = found["curves"]["loss"], found["curves"]["lr"]
    assert (loss["different"], loss["parts"], loss["at_once"], lr["parts"]) == (13, 13, True, 12)
    assert loss["rel"] == pytest.approx(3e-4, rel=1e-3)
    assert found["curves"]["grad_norm"]["different"] is None
    before, after = found["checkpoints"]
    assert (before["different"], before["first"], after["different"]) == (0, "", 3)
    assert after["first"] == "blocks.0.mlp.up.weight"
    assert after["kinds"]["parameter"]["worst"] == "final_norm.weight"
    assert after["kinds"]["exp_avg"]["different"] == 1
    assert [side["value"] for side in found["fields"]["optimizer.lr"]] == ["0.001", "0.002"]
    assert [side["origin"] for side in found["fields"]["optimizer.lr"]] == [
        "default",
        "command line: optimizer.lr=0.002",
    ]
    assert found["cause"].startswith("another learning rate (optimizer.lr 0.001 and 0.002)")
    main(["verify", str(a), "--against", str(b)])
    text = capsys.readouterr().out
    assert (
        "Equal to the bit until step 11; lr parts at step 12 (rel 5.0e-01); loss parts at step 13 (rel 3.0e-04); "
        "first tensor: blocks.0.mlp.up.weight at step 20, where 3 of 40 differ." in text
    )


CAUSES: dict[str, tuple[dict[str, Any], str, str]] = {
    "seed": ({"words": ("train.seed=5",), "edit": times(1.1, 1)}, "parts", "another seed: other initial weights"),
    "precision": ({"words": ("train.precision=bf16",), "edit": times(1.001, 1)}, "rounding", "another precision"),
    "batch": ({"words": ("train.global_batch=64",), "edit": times(1.1, 1)}, "parts", "another batch size"),
    "later field": (
        {"words": ("optimizer.weight_decay=0.3", "train.eval_every=7"), "edit": times(1.1, 2)},
        "parts",
        "optimizer.weight_decay ",
    ),
    "layout": (
        {"words": ("tp=2",), "edit": times(1 + 1e-7, 3)},
        "rounding",
        "rounding: only the layout or the device differs (layout.tp 1 and 2)",
    ),
    "wrong layout": (
        {"words": ("tp=2",), "edit": times(1.01, 3)},
        "parts",
        "that is more than rounding: `phalanx verify`",
    ),
    "grown": (
        {"words": ("dp_replicate=2",), "edit": lambda step, row: row | {"loss": row["loss"] * (1 + 1e-8 * 3.0**step)}},
        "rounding",
        "rounding: only the layout",
    ),
    "data": ({"edit": times(1.1, 1), "data": "d2"}, "parts", "other data: the token shards"),
    "torch": (
        {"edit": times(1.1, 5), "env": {"packages": {"torch": "2.14.0"}}},
        "parts",
        "the same job with other programs: packages.torch 2.13.0 and 2.14.0",
    ),
    "guard": (
        {"edit": times(1.1, 5), "events": ({"event": "guard", "step": 4, "time": 9.0, "text": "skipped a spike"},)},
        "parts",
        "or its guard intervened",
    ),
    "nothing": ({"edit": times(1.1, 5)}, "parts", "nothing recorded differs"),
}


@pytest.mark.parametrize("name", CAUSES)
def test_causes(name, tmp_path):
    options, verdict, cause = CAUSES[name]
    options = {**options}
    words = options.pop("words", ())
    found = compare_runs(write(tmp_path / "a"), write(tmp_path / "b", *words, **options))
    assert found.verdict == verdict, found.text()
    assert cause in found.cause
    assert found.cause in found.text()


def test_steps_that_only_one_run_has_are_left_out(tmp_path):
    """A checkpoint may differ where no curve does."""
    a, b = write(tmp_path / "a"), write(tmp_path / "b", saved={10: {"blocks.0.attn.wk.bias": 1e-6}})
    found = compare_runs(a, b)
    assert [each.step for each in found.checkpoints] == [10]
    assert found.verdict == "parts"
    assert "a checkpoint was changed after its run" in found.cause
    assert found.checkpoints[0].first == "blocks.0.attn.wk.bias"
    assert "first tensor: blocks.0.attn.wk.bias" in found.summary()


def test_what_was_not_compared_is_said(tmp_path):
    a, b = write(tmp_path / "a"), write(tmp_path / "b", saved={})
    (b / "config.yaml").unlink()
    said = compare_runs(a, b).text()
    assert "Jobs were not compared: no config.yaml of b." in said
    assert "Tensors were not compared: no step has a checkpoint in both." in said
    c = write(tmp_path / "c")
    (c / "metrics.jsonl").write_text("")
    assert "Curves were not compared: metrics.jsonl has no step in both." in compare_runs(a, c).text()


def test_a_damaged_checkpoint_is_named(tmp_path, capsys):
    a, b = write(tmp_path / "a"), write(tmp_path / "b")
    (file,) = (b / "checkpoints" / "step-000020").glob("*.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:-8] + bytes(8))
    assert main(["verify", str(a), "--against", str(b)]) == 4
    assert f"{file} does not match its digest" in capsys.readouterr().err


def test_the_picture_has_both_curves_and_their_difference(tmp_path, capsys):
    a, b = write(tmp_path / "a"), write(tmp_path / "b", edit=times(1.1, 5))
    assert main(["verify", str(a), "--against", str(b), "--svg", str(tmp_path / "x.svg")]) == 1
    svg = (tmp_path / "x.svg").read_text()
    assert svg.count("<svg ") == 3
    assert "Loss of both runs" in svg
    assert "step 5: loss parts" in svg
    assert f"written: {tmp_path / 'x.svg'}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("a --against absent", "no run in absent: there is no such folder"),
        (
            "gone --against absent",
            "no run in gone: there is no such folder; there are: a, late, wide\nno run in absent",
        ),
        ("a --against a", "both are the same run"),
        ("a --against late", "no common step: a has steps 1 to 20, and late has steps 100 to 101"),
        ("a --against wide", "a and wide have different models (model.d_ff 8 and 12): blocks.0.mlp.up.weight (8, 8)"),
        ("--against a", "--against takes one run before it: phalanx verify RUN --against a"),
        ("a late --against wide", "--against takes one run before it"),
        ("a --against late --steps 3", "--steps is for layouts of a job"),
        ("a --against late --exchange a", "--against and --exchange: give one of them"),
        ("a --against late --svg x.gif", "--svg x.gif: a picture is written as .svg or .png"),
    ],
)
def test_mistakes_are_one_message(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a", saved={})
    write(tmp_path / "late", steps=range(100, 102), saved={})
    write(tmp_path / "wide", "++model.d_ff=12", saved={})
    assert main(["verify", *words.split()]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert not captured.out
