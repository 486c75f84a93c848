"""train.compile=auto is on for GPUs, and off on CPUs and where torch cannot compile the job."""

from dataclasses import replace

import pytest

from phalanx.check.load import as_dict, load_words
from phalanx.config.cluster import Cluster
from phalanx.config.job import Job, Train
from phalanx.config.layout import Layout
from phalanx.config.overrides import parse
from phalanx.techniques.memory import compile_problems, compiles

THREADS = Layout(dp_replicate=2, data_parallel="threads")


@pytest.mark.parametrize(("device", "on"), [("auto", True), ("cuda", True), ("cpu", False)])
def test_predictions_follow_the_cluster_and_runs_their_device(device, on):
    job = Job(cluster=Cluster(device=device))
    assert (compiles(job), compiles(job, "cuda"), compiles(job, "cpu")) == (on, True, False)


def test_what_torch_cannot_compile_is_left_alone_unless_it_was_asked_for():
    job = Job(layout=THREADS)
    assert (compiles(job, "cuda"), [*compile_problems(job)]) == (False, [])
    ((path, problem),) = compile_problems(replace(job, train=Train(compile=True)))
    assert path == "train.compile"
    assert problem.endswith("graphs of its own; nearest legal: train.compile=auto, which leaves it off")


@pytest.mark.parametrize(
    ("words", "value"),
    [([], "auto"), (["--compile"], True), (["--no-compile"], False), (["train.compile=auto"], "auto")],
    ids=str,
)
def test_a_config_keeps_what_was_set(words, value):
    assert as_dict(load_words(parse(words)).job)["train"]["compile"] == value
