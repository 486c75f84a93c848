"""The types of a checkpoint's metadata."""

from pathlib import Path

import pytest

from phalanx.check.load import as_dict
from phalanx.checkpoint.manifest import Manifest, job_of, problems, require_resumable
from phalanx.config.job import Job
from phalanx.errors import CheckpointError

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
    with pytest.raises(
        CheckpointError,
        match=rf"step-000005: its metadata are not valid: {name}[ .\w]*: (expected|must|\w+ is missing)",
    ):
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
