"""Ranges of fields: stated for every number, and compared for all fields at once."""

import dataclasses

import pytest

from phalanx.check.job import out_of_range, problems_of
from phalanx.config.clusters import CLUSTERS
from phalanx.config.constraints import Constraint, FolderName, Interval, Printable
from phalanx.config.fields import constraints, leaves, replace
from phalanx.config.job import Job

PAIRS = (tuple[float, float], tuple[int, int])
NUMBERS = {path: kind for path, kind in leaves().items() if kind in (int, float, *PAIRS)}


def test_every_number_has_a_range():
    assert set(constraints()) == {
        *NUMBERS,
        "layout.loss_chunk",
        "run.name",
        "run.dir",
        "run.nnodes",
        "run.rdzv_endpoint",
        "checkpoint.remote",
        "model.from",
    }


@pytest.mark.parametrize("path", NUMBERS)
def test_every_number_is_refused_far_below_its_range(path):
    value = (-7, -7) if NUMBERS[path] in PAIRS else -7
    found = problems_of(replace(Job(), path, value))
    assert [(where, "-7" in said) for where, said in found] == [(path, True)]


def test_all_fields_out_of_range_are_found_at_once():
    job = Job()
    for path in ("optimizer.lr", "model.d_model", "layout.tp", "data.workers"):
        job = replace(job, path, -1)
    assert problems_of(job) == [
        ("model.d_model", "must be at least 1, is -1"),
        ("layout.tp", "must be at least 1, is -1"),
        ("data.workers", "must not be negative, is -1"),
        ("optimizer.lr", "must be above 0, is -1"),
    ]


@pytest.mark.parametrize("name", CLUSTERS)
def test_known_machines_are_in_range(name):
    assert not list(out_of_range(CLUSTERS[name]))


@pytest.mark.parametrize(
    ("constraint", "legal", "illegal", "said"),
    [
        (Interval(1), 1, 0, "must be at least 1, is 0"),
        (Interval(0), 0, -1, "must not be negative, is -1"),
        (Interval(above=0), 0.1, 0.0, "must be above 0, is 0.0"),
        (Interval(below=1), 0.9, 1.0, "must be below 1, is 1.0"),
        (Interval(0, 1), 1, 1.5, "must lie between 0 and 1, is 1.5"),
        (Interval(0, below=1), 0.0, 1.0, "must lie in [0, 1), is 1.0"),
        (Interval(0, below=1), (0.0, 0.9), (0.9, 1.0), "must lie in [0, 1), are (0.9, 1.0)"),
        (Interval(0), 1.0, float("nan"), "must not be negative, is nan"),
    ],
)
def test_a_range_says_what_is_outside(constraint: Constraint, legal, illegal, said):
    assert constraint.problem(legal) == ""
    assert constraint.problem(illegal) == said


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("../../x", "x"),
        ("/tmp/runs/big/", "big"),
        ("..", "run"),
        (".hidden", "hidden"),
        ("a\x1b[2Jb\0", "a-[2Jb-"),
        ("ü" * 300, "ü" * 100),
        ("\udce4", "-"),
    ],
)
def test_a_run_s_name_is_one_folder(name, nearest):
    [(path, said)] = problems_of(replace(Job(), "run.name", name))
    assert path == "run.name"
    assert said.endswith(f"; nearest legal: {nearest}")
    assert said.isprintable()
    assert len(said) < 600


def test_names_of_runs_that_are_legal():
    for name in ("", "run", "läufe 2", "a..b", "-x", "x" * 200):
        assert FolderName(200).problem(name) == ""
    assert Printable().problem("runs") == ""
    assert "must be printable" in Printable().problem("a\nb")


def test_types_are_read_without_their_ranges():
    assert leaves()["model.n_layers"] is int
    assert leaves()["optimizer.betas"] == tuple[float, float]
    assert all(dataclasses.is_dataclass(each) for ranges in constraints().values() for each in ranges)
