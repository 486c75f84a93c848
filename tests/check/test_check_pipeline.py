"""What is refused of a pipeline, with the equation and the nearest legal choice."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.check.job import problems_of
from phalanx.config.job import Job, Train
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.partition.derived import schedule_of
from phalanx.schedule import catalogue, file
from phalanx.schedule.generators import pipedream

JOB = Job(model=ModelConfig(n_layers=8, seq_len=64), train=Train(global_batch=16))


def problems(job: Job = JOB, **layout) -> list[str]:
    return [f"{path}: {message}" for path, message in problems_of(replace(job, layout=Layout(**layout)))]


def shallow(layers: int) -> Job:
    return replace(JOB, model=replace(JOB.model, n_layers=layers))


def test_every_schedule_with_a_name_goes_with_four_ranks():
    untied = replace(JOB, model=replace(JOB.model, tied=False), optimizer=replace(JOB.optimizer, clip=0.0))
    for name, entry in catalogue.SCHEDULES.items():
        layout = Layout(pp=4, schedule=name, accumulation=8)
        assert problems_of(replace(untied if entry.stashes else JOB, layout=layout)) == []
        assert schedule_of(layout, 8) == catalogue.build(name, 4, 8)


def test_without_a_pipeline_its_settings_do_not_matter():
    assert problems(schedule="zb_h1", pp_chunks=7, pp_slices=3, pp_cut="1+1") == []
    assert problems(schedule="mine.csv") == []
    assert problems(pp_chunks=-1, pp_slices=-2) == [
        "layout.pp_chunks: must not be negative, is -1",
        "layout.pp_slices: must not be negative, is -2",
    ]


def test_what_is_too_large_is_refused_before_it_is_built():
    began = time.process_time()
    many = replace(shallow(1024), train=Train(global_batch=1 << 20))
    (found,) = problems(many, pp=1024, micro_batch=1)
    assert found.startswith("layout.schedule: 1f1b: 1,024 stages × 1,048,576 micro-batches × 2 passes")
    assert "nearest legal: " in found
    assert time.process_time() - began < 0.5


def test_an_unknown_schedule():
    (found,) = problems(pp=2, schedule="interleaved_1f1")
    assert found.startswith("layout.schedule: no schedule 'interleaved_1f1'; did you mean interleaved_1f1b? (known: ")
    assert found.endswith("a schedule of your own: the path of its file")
    assert problems(schedule="interleaved_1f1") == [found]
    (found,) = problems(pp=2, schedule="none/mine.csv")
    assert found == "layout.schedule: none/mine.csv: cannot be read: No such file or directory"


def test_the_micro_batches_come_from_the_batch_equation():
    assert problems(pp=4, schedule="pipedream", accumulation=4) == []
    (found,) = problems(pp=4, schedule="pipedream", micro_batch=8)
    assert found.startswith("layout.schedule: pipedream: 2 micro-batches < 4 ranks")
    assert found.endswith("(accumulation in global batch 16 = micro-batch 8 × accumulation 2 × data ranks 1)")
    (found,) = problems(pp=4, schedule="dualpipe", cp=2, tiles=2, accumulation=1)
    assert found.startswith("layout.schedule: dualpipe: 1 micro-batches cannot be split over 2 directions")
    assert found.endswith("(accumulation in global batch 16 = micro-batch 16 × accumulation 1 × data ranks 1)")
    assert problems(pp=4, schedule="dualpipe", cp=2, tiles=2, accumulation=2) == []
    (found,) = problems(pp=4, micro_batch=3)
    assert found.startswith("train.global_batch: "), "an equation without a solution is told once"


@pytest.mark.parametrize(
    ("layers", "layout", "message"),
    [
        (6, {"pp": 8}, "layout.pp: pp 8 stages need at least as many layers, the model has 6; nearest legal: pp 6"),
        (
            6,
            {"pp": 4, "schedule": "interleaved_1f1b", "pp_chunks": 2},
            "layout.pp: pp 4 × chunks 2 = 8 stages need at least as many layers, the model has 6; nearest legal: pp 3",
        ),
        (
            6,
            {"pp": 2, "schedule": "interleaved_1f1b", "pp_chunks": 4},
            "layout.pp: pp 2 × chunks 4 = 8 stages need at least as many layers, the model has 6; nearest legal: pp 1, "
            "or "
            "pp_chunks 3",
        ),
        (
            6,
            {"pp": 1000},
            "layout.pp: pp 1000 stages need at least as many layers, the model has 6; nearest legal: pp 6",
        ),
        (
            3,
            {"pp": 4, "schedule": "dualpipe"},
            "layout.pp: pp 4 stages need at least as many layers, the model has 3; nearest legal: pp 3",
        ),
    ],
)
def test_stages_need_layers(layers, layout, message):
    assert problems(shallow(layers), **layout) == [message]


def test_stages_need_layers_that_can_be_cut():
    found = problems(replace(JOB, model=replace(JOB.model, n_layers=4, shared_keys=8)), pp=2)
    assert any(problem.startswith("layout.pp: ") and problem.endswith("nearest legal: pp 1") for problem in found)


def test_a_cut_of_the_users_own_fits_the_stages_and_the_layers():
    assert problems(pp=4, pp_cut="1+3+3+1") == []
    assert problems(pp=4, pp_cut="1+3+3") == [
        "layout.pp_cut: 1+3+3 are 3 stages, the pipeline has 4; legal: 2+2+2+2",
        "layout.pp_cut: 1+3+3 = 7 layers, the model has 8; legal: 2+2+2+2",
    ]
    (found,) = problems(pp=4, pp_cut="2,2,2,2")
    assert found.startswith("layout.pp_cut: '2,2,2,2' is not a list of layers per stage")


def test_slices_are_equal_parts_of_a_sequence():
    for slices in (0, 1, 16):
        assert problems(pp=2, schedule="terapipe", pp_slices=slices) == []
    (found,) = problems(pp=2, schedule="terapipe", pp_slices=5)
    assert found == "layout.pp_slices: seq_len 64 / (slices 5) is not an integer; nearest pp_slices: 2, 4, 8"
    (found,) = problems(pp=2, schedule="terapipe", pp_slices=32, tp=4, sp=True)
    assert (
        found == "layout.pp_slices: seq_len 64 / (slices 32 × tp 4 (sp)) is not an integer; nearest pp_slices: 4, 8, 16"
    )
    assert problems(pp=2, schedule="terapipe", cp=2) == []


def test_a_schedule_without_flush_keeps_whole_weights():
    assert problems(pp=2, schedule="pipedream", dp_replicate=2) == []
    fp16 = replace(JOB, train=replace(JOB.train, precision="fp16"))
    found = problems(fp16, pp=2, schedule="pipedream", dp_shard=2, zero=3, accumulate="sharded")
    assert [problem.split(":")[0] for problem in found] == ["layout.accumulate", "layout.dp_shard", "train.precision"]
    (found,) = problems(pp=2, schedule="pipedream", cp=2)
    assert found.startswith("layout.cp: pipedream keeps two versions of the weights whole on each rank, cp 2 shards")
    assert found.endswith("nearest legal: cp=1 with dp_replicate=2, or schedule=1f1b")
    (found,) = problems(pp=2, schedule="pipedream", dp_replicate=2, sync="local_sgd")
    assert "nearest legal: sync=bsp, or schedule=1f1b" in found


def test_a_parameter_server_trains_whole_models():
    assert problems(pp=2, dp_replicate=2, sync="asp") == [
        "layout.sync: asp needs replicas with whole models, pp 2 cuts them; nearest legal: sync=bsp, or pp=1"
    ]
    assert problems(pp=2, dp_replicate=2, sync="local_sgd") == []
    assert problems(pp=2, dp_replicate=2, sync="diloco") == []


def test_a_schedule_in_a_file_says_its_own_numbers(tmp_path):
    path = str(tmp_path / "mine.csv")
    Path(path).write_text(file.text(catalogue.build("interleaved_1f1b", 2, 4, chunks=2)))
    layout = {"pp": 2, "schedule": path, "accumulation": 4}
    assert problems(**layout) == []
    assert schedule_of(Layout(**layout), 4) == file.read(path)
    assert problems(pp=4, schedule=path, accumulation=4) == [
        f"layout.pp: {path} is for pp 2, pp is 4; nearest legal: pp 2, or another schedule"
    ]
    assert problems(pp=2, schedule=path, accumulation=8) == [
        f"layout.schedule: {path} is for 4 micro-batches per step, but global batch 16 = micro-batch 2 × accumulation "
        "8 "
        "× data ranks 1; nearest legal: accumulation 4 with a global batch that is a multiple of 4"
    ]
    assert problems(**layout, pp_chunks=3) == [
        f"layout.pp_chunks: {path} has 2, pp_chunks is 3; nearest legal: pp_chunks=0"
    ]
    assert problems(shallow(3), **layout) == [
        f"layout.pp: {path}: 4 stages need at least as many layers, the model has 3; nearest legal: n_layers 4"
    ]


def test_what_is_wrong_in_a_file_is_told(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0B0\n1F0,1X0\n")
    (found,) = problems(pp=2, schedule=str(path), accumulation=1)
    assert found.startswith(f"layout.schedule: {path}: line 2 (rank 1), cell 2: '1X0' is not an action")


def test_a_file_without_a_flush_has_to_be_pipedreams(tmp_path):
    own = pipedream(2, 2, 2)
    path = tmp_path / "mine.csv"
    path.write_text(file.text(own))
    assert problems(pp=2, schedule=str(path), accumulation=2) == []
    first = (*own.programs[0][:2], own.programs[0][3], own.programs[0][2], *own.programs[0][4:])
    path.write_text(file.text(replace(own, programs=(first, own.programs[1]))))
    (found,) = problems(pp=2, schedule=str(path), accumulation=2)
    assert "spans 2 optimizer steps without a flush in an order of its own" in found
