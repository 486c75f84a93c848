"""`layout: auto` in a verb that takes a job: on which devices, with what fixed, and what is told. The planner is a
fake, but for the runs at the end."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml

from phalanx.cli import auto_layout, predict, train
from phalanx.cli.data import VERB as DATA
from phalanx.cli.verb import Verb, Words, job_verb
from phalanx.config import layout_line
from phalanx.config.layout import Layout
from phalanx.errors import JobError, RunError
from phalanx.plan.notes import NO_HEADROOM
from phalanx.train.run_directory import RunDirectory

VERB = job_verb("test", "A verb.", ())
MACHINE = """
cluster:
  devices_per_node: 2
  device: cpu
  accelerator: {name: a cpu, fp32_tflops: 0.2, memory_gib: 8.0, bandwidth_gbs: 20.0}
"""
LINKS = "  intra: {gbs: 1.0, latency_us: 50.0}\n"
VOCAB = "model.vocab_size=64"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder to be in, a home for the machine's file, and nobody who launched this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHALANX_HOME", str(tmp_path / "home"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    return tmp_path


@pytest.fixture
def measured(home):
    (home / "home" / "cluster.yaml").write_text(MACHINE + LINKS)
    return home


@pytest.fixture
def asked(monkeypatch):
    """What the planner is asked; it answers with as many replicas as it may have, or what `answer` says."""
    found = SimpleNamespace(calls=[], answer=None, notes=())

    def choose(request, progress):
        vocab, worlds = request.model.vocab_size, request.worlds
        found.calls.append(SimpleNamespace(fixed=sorted(request.fixed), vocab=vocab, worlds=worlds))
        layout = Layout(**{"dp_replicate": worlds[-1], **(found.answer or {}), **request.fixed})
        best = SimpleNamespace(layout=layout, seconds=0.0123)
        return SimpleNamespace(best=(best,), searched=1234, seconds=0.5, notes=found.notes)

    monkeypatch.setattr("phalanx.plan.planner.choose", choose)
    return found


def parse(*argv: str, verb: Verb = VERB) -> Words:
    words = verb.parse(argv)
    assert words is not None
    return words


def test_the_verb_goes_on_with_what_the_planner_chose(measured, asked, capsys):
    words = parse("layout=auto", "layout.zero=2", VOCAB)
    assert words.job.layout == Layout(dp_replicate=2, zero=2)
    assert (asked.calls[0].fixed, asked.calls[0].vocab, asked.calls[0].worlds) == (["zero"], 64, (1, 2))
    assert words.loaded.origins["layout.dp_replicate"] == words.loaded.origins["layout.auto"] == "planned"
    assert words.loaded.origins["layout.zero"] == "command line: layout.zero=2"
    out, err = capsys.readouterr()
    assert out == ""
    quality, layout = err.splitlines()
    assert quality.startswith(
        "cluster=local: compute and comm of unknown quality (no fit error or spread is stored); this machine"
    )
    assert (
        layout
        == "layout: dp_replicate=2,zero=2  (planned: 1,234 layouts searched in 500ms; predicted 12.3 ms per step)"
    )


def test_a_choice_that_leaves_no_room_says_so(measured, asked, capsys):
    asked.notes = ("Step time: 99% computing.", f"{NO_HEADROOM}: one step in ten needs 5% more than predicted.")
    parse("layout=auto", VOCAB)
    _, first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("layout: dp_replicate=2")
    assert second == asked.notes[1]


def test_a_job_that_says_its_layout_is_not_planned(home, asked, capsys):
    assert parse("layout=dp_replicate=2").job.layout == Layout(dp_replicate=2)
    assert asked.calls == []
    assert capsys.readouterr().err == ""


def test_print_config_shows_the_planned_layout(measured, asked, capsys):
    assert VERB.parse(["layout=auto", VOCAB, "--print-config"]) is None
    out = capsys.readouterr().out
    assert "  auto: false  # planned\n  dp_replicate: 2  # planned\n" in out
    assert f"name: a cpu  # measured: {measured}/home/cluster.yaml" in out


def test_fewer_processes_than_the_cpu_could_run(measured, asked):
    asked.answer = {"dp_replicate": 1}
    words = parse("layout=auto", VOCAB)
    assert (words.job.layout.world, words.job.cluster.devices) == (1, 1)
    assert words.loaded.origins["cluster.devices_per_node"] == "planned"


def test_a_cluster_that_is_named_is_used_whole(home, asked):
    words = parse("layout=auto", "cluster=dgx-h100:2", VOCAB)
    assert asked.calls[0].worlds == (16,)
    assert (words.job.cluster.preset, words.job.cluster.devices_per_node) == ("dgx-h100:2", 8)


def test_what_the_job_says_about_this_machine_stays(measured, asked):
    words = parse("layout=auto", "cluster.devices_per_node=4", VOCAB)
    assert asked.calls[0].worlds == (1, 2, 3, 4)
    assert words.loaded.origins["cluster.devices_per_node"] == "command line: cluster.devices_per_node=4"


def test_a_choice_that_is_not_legal_is_a_problem_and_no_crash(measured, asked):
    asked.answer = {"dp_replicate": 1, "tp": 2, "sp_regather": True}
    with pytest.raises(JobError, match=r"layout tp=2,sp_regather=true, planned: layout.sp_regather: is a part of"):
        parse("layout=auto", VOCAB)


def test_micro_batch_zero_fixes_nothing(measured, asked):
    parse("layout=auto", "layout.micro_batch=0", "layout.accumulation=2", "layout.loss_chunk=0", VOCAB)
    assert asked.calls[0].fixed == ["accumulation", "loss_chunk"]


def test_preparing_data_needs_no_layout(home, asked):
    assert parse("layout=auto", verb=DATA).job.layout.auto
    assert asked.calls == []


def test_a_verb_that_does_not_measure_says_what_to_do(home, asked):
    with pytest.raises(JobError) as caught:
        parse("layout=auto", VOCAB)
    assert (
        "cluster=dgx-h100:8, or measure this one with `phalanx bench compute` and `phalanx bench comm`"
        in (caught.value.problems[0])
    )
    assert "does not exist" in caught.value.problems[1]


def test_figures_of_another_device_are_refused(measured, asked):
    with pytest.raises(JobError, match="cluster.device is cuda, but .* describes cpu"):
        parse("layout=auto", "cluster.device=cuda", VOCAB)


class Bench:
    """In place of subprocess.run: writes what `phalanx bench` would."""

    def __init__(self, home, code=0):
        self.commands, self.home, self.code = [], home, code

    def __call__(self, argv, **_):
        assert argv[:4] == [sys.executable, "-P", "-m", "phalanx"]
        self.commands.append(argv[4:])
        if not self.code:
            (self.home / "home" / "cluster.yaml").write_text(MACHINE + LINKS)
        return subprocess.CompletedProcess(argv, self.code)


def test_an_unknown_machine_is_measured_by_the_verbs_that_may(home, asked, monkeypatch, capsys):
    bench = Bench(home)
    monkeypatch.setattr(auto_layout.subprocess, "run", bench)
    words = parse("layout=auto", VOCAB, verb=predict.VERB)
    assert bench.commands == [["bench", "comm", "--quick"], ["bench", "compute", "--quick"]]
    told = f"layout auto: measuring this machine for {home}/home/cluster.yaml: phalanx bench comm --quick\n"
    assert capsys.readouterr().err.startswith(told)
    assert (words.job.cluster.preset, words.job.cluster.accelerator.name) == ("local", "a cpu")


def test_only_what_is_missing_is_measured(home, asked, monkeypatch):
    (home / "home" / "cluster.yaml").write_text(MACHINE)
    bench = Bench(home)
    monkeypatch.setattr(auto_layout.subprocess, "run", bench)
    parse("layout=auto", "train.precision=bf16", "cluster.device=cpu", VOCAB, verb=train.VERB)
    assert bench.commands == [["bench", "comm", "--quick", "--device", "cpu"]]
    (home / "home" / "cluster.yaml").unlink()
    parse("layout=auto", "train.precision=bf16", "cluster.devices_per_node=1", VOCAB, verb=train.VERB)
    assert bench.commands[1:] == [["bench", "compute", "--quick", "--precision", "bf16"]]


def test_a_measurement_that_fails_says_which_command_to_run(home, asked, monkeypatch):
    monkeypatch.setattr(auto_layout.subprocess, "run", Bench(home, code=1))
    with pytest.raises(RunError, match=r"exit code 1\): run `phalanx bench compute` and `phalanx bench comm`"):
        parse("layout=auto", VOCAB, verb=predict.VERB)


def of_torchrun(monkeypatch, rank, world, local_world):
    variables = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank % local_world, "LOCAL_WORLD_SIZE": local_world}
    more = {"GROUP_RANK": rank // local_world, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    for name, value in {**variables, **more}.items():
        monkeypatch.setenv(name, str(value))


def test_the_ranks_that_were_started_are_the_devices(measured, asked, monkeypatch, capsys):
    of_torchrun(monkeypatch, rank=0, world=4, local_world=2)
    (measured / "home" / "cluster.yaml").write_text(MACHINE + LINKS + "  inter: {gbs: 1.0, latency_us: 99.0}\n")
    words = parse("layout=auto", VOCAB, verb=train.VERB)
    assert asked.calls[0].worlds == (4,)
    assert (words.job.cluster.nodes, words.job.cluster.devices_per_node, words.job.layout.world) == (2, 2, 4)
    assert "planned" in capsys.readouterr().err


def test_one_rank_speaks_and_none_measures(home, asked, monkeypatch, capsys):
    of_torchrun(monkeypatch, rank=1, world=2, local_world=2)
    with pytest.raises(JobError, match="the planner needs the devices"):
        parse("layout=auto", VOCAB, verb=train.VERB)
    (home / "home" / "cluster.yaml").write_text(MACHINE + LINKS)
    parse("layout=auto", VOCAB, verb=train.VERB)
    assert capsys.readouterr().err == ""


@pytest.fixture
def checkpoint(monkeypatch):
    """A run with a checkpoint at step 7 in a layout."""

    def make(job, line):
        RunDirectory.of(job).checkpoints.mkdir(parents=True)
        there = replace(job, layout=layout_line.parse(line))
        monkeypatch.setattr(auto_layout, "newest_valid", lambda *_, **__: SimpleNamespace(step=7))
        monkeypatch.setattr(auto_layout, "job_of", lambda _: there)

    return make


def test_a_run_keeps_the_layout_of_its_checkpoint(measured, asked, checkpoint, capsys):
    first = parse("layout=auto", VOCAB, verb=train.VERB).job
    checkpoint(first, "tp=2,sp=true")
    capsys.readouterr()
    words = parse("layout=auto", VOCAB, verb=train.VERB)
    assert words.job.layout == Layout(tp=2, sp=True)
    where = "the checkpoint of runs/job at step 7"
    assert words.loaded.origins["layout.tp"] == where
    assert capsys.readouterr().err == f"layout: tp=2,sp=true  (from {where}; layout=LINE resumes in another)\n"
    assert len(asked.calls) == 1


@pytest.mark.parametrize(
    ("line", "argv"),
    [
        ("tp=2,sp=true", ["--fresh"]),
        ("tp=2,sp=true", ["layout.sp=false"]),
        ("tp=4", []),
        ("dp_shard=2,micro_batch=2,accumulation=4", ["train.global_batch=24"]),
    ],
)
def test_but_not_one_that_it_may_not_have(measured, asked, checkpoint, line, argv):
    checkpoint(parse("layout=auto", VOCAB, verb=train.VERB).job, line)
    words = parse("layout=auto", VOCAB, *argv, verb=train.VERB)
    assert len(asked.calls) == 2
    assert words.job.layout.dp_replicate == 2


JOB = """
model: {n_layers: 1, d_model: 16, n_heads: 2, seq_len: 16}
cluster: {peak_tflops: 1.0}
layout: auto
data: {corpus: text, path: corpus.txt}
train: {steps: 4, global_batch: 4, eval_samples: 4, log_every: 2}
run: {sample_tokens: 0}
"""


def phalanx(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "phalanx", *argv], capture_output=True, text=True, check=False, timeout=120
    )


def test_a_job_is_trained_as_planned_and_goes_on_so(measured):
    (measured / "job.yaml").write_text(JOB)
    (measured / "corpus.txt").write_text("the cat sat on the mat. " * 100)
    first = phalanx("train", "job.yaml")
    assert first.returncode == 0, first.stderr
    assert "  (planned: " in first.stderr
    config = yaml.safe_load((measured / "runs/job/config.yaml").read_text())
    assert config["layout"]["auto"] is False
    line = first.stderr.split("layout: ")[1].split("  (planned")[0]
    assert config["layout"] == {name: each for name, each in vars(layout_line.parse(line)).items() if name != "axes"}
    (measured / "home" / "cluster.yaml").write_text(MACHINE + LINKS.replace("50.0", "60.0"))
    again = phalanx("train", "job.yaml", "train.steps=6")
    assert again.returncode == 0, again.stderr
    assert f"layout: {line}  (from the checkpoint of runs/job at step 4; " in again.stderr
    assert "resuming with a change: layout" not in again.stderr
