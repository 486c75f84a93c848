"""benchmarks/regret: which layouts it measures, and what it makes of the times."""

from itertools import pairwise

import pytest
from benchmarks.regret_layouts import MODELS, SHARES, WORLDS, family, job_of, layouts
from benchmarks.regret_record import Entry, Record, kendall

from phalanx.check.job import problems_of
from phalanx.config.layout import Layout


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("world", WORLDS)
def test_every_layout_is_legal_and_there_once(name, world):
    found = layouts(name, world)
    assert len(set(found)) == len(found)
    for layout in found:
        assert layout.world == world
        assert not problems_of(job_of(name, layout))
        assert layout.micro_batch * layout.accumulation * layout.data_ranks == MODELS[name][1]


def test_one_process_has_its_micro_batches_alone():
    assert [layout.accumulation for layout in layouts("small", 1)] == list(SHARES[1])


def test_two_processes_have_every_axis():
    found = layouts("small", 2)
    assert {family(layout) for layout in found} == {"data parallel, or one", "cp", "tp", "pp"}
    assert {(layout.dp_replicate, layout.dp_shard) for layout in found} == {(1, 1), (1, 2), (2, 1)}
    assert {layout.zero for layout in found if layout.dp_shard == 2} == {1, 2, 3}
    assert {layout.cp_ulysses for layout in found if layout.cp == 2} == {1, 2}
    assert {layout.sp for layout in found if layout.tp == 2} == {False, True}
    assert {layout.schedule for layout in found if layout.pp == 2} == {"1f1b", "gpipe", "interleaved_1f1b", "zb_h1"}


def test_experts_are_dealt_out():
    assert {layout.ep for layout in layouts("experts", 4)} == {1, 2, 4}
    assert {layout.ep for layout in layouts("small", 4)} == {1}


def test_the_simplest_come_first():
    settings = [layout.line().count("=") for layout in layouts("small", 4)]
    assert all(few <= many for few, many in pairwise(settings))


def test_a_record_goes_on_where_it_was(tmp_path):
    path, one, two = tmp_path / "steps.jsonl", Layout(dp_replicate=2), Layout(tp=2)
    record = Record(path, resume=False)
    for number, seconds in ((0, (1.0, 3.0)), (1, (2.0,))):
        record.add(Entry("final", number, "small", one, seconds))
        record.add(Entry("final", number, "small", two, tuple(2 * s for s in seconds)))
    again = Record(path, resume=True)
    assert again.entries == record.entries
    assert again.has("final", 1, "small", two)
    assert not again.has("survey", 1, "small", two)
    assert again.seconds("small", "final") == {one: 2.0, two: 4.0}
    assert again.ratio("small", two, one) == 2.0
    assert not Record(path, resume=False).entries
    assert not path.exists()


def test_kendall_s_tau():
    assert kendall([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert kendall([1, 2, 3, 4], [4, 3, 2, 1]) == -1
    assert kendall([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3)
    assert kendall([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / 6**0.5)
    assert kendall([1, 1], [1, 2]) == 0
