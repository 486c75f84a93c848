"""What the catalogue refuses, and in which words."""

from __future__ import annotations

import pytest

from phalanx.errors import JobError
from phalanx.schedule import catalogue
from phalanx.schedule.catalogue import SCHEDULES, problems


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_one_rank_and_one_micro_batch_are_a_pipeline(name: str):
    assert problems(name, ranks=1, micro_batches=1) == []
    assert catalogue.build(name, ranks=1, micro_batches=1).ranks == 1


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("1F1B", "1f1b"),
        ("Interleaved1F1B", "interleaved_1f1b"),
        ("InterleavedZeroBubble", "zb_h1"),
        ("ZBVZeroBubble", "zb_v"),
        ("DualPipeV", "dualpipe_v"),
        ("GPipe", "gpipe"),
        ("LoopedBFS", "looped_bfs"),
        ("ZB-H2", "zb_h2"),
        ("V-Half", "v_half"),
        ("PipeDream-Flush", "1f1b"),
        ("PipeDream-2BW", "pipedream"),
        ("AFAB", "gpipe"),
        ("teripipe", "terapipe"),
    ],
)
def test_other_spellings_are_hints_and_not_names(written: str, meant: str):
    assert problems(written, 4, 8) == [
        f"no schedule {written!r}; did you mean {meant}? (known: {', '.join(SCHEDULES)})",
    ]


def test_a_name_like_no_other_gets_the_list():
    assert problems("sideways", 4, 8) == [f"no schedule 'sideways' (known: {', '.join(SCHEDULES)})"]


def test_all_problems_are_told_at_once():
    assert problems("1f1b", ranks=0, micro_batches=-1, chunks=2, slices=4, steps=3) == [
        "1f1b: 0 ranks; nearest legal: 1",
        "1f1b: -1 micro-batches; nearest legal: 1",
        "1f1b: chunks 2, it has 1 stages per rank; nearest legal: 1",
        "1f1b: slices 4, it takes whole sequences; nearest legal: 1, or schedule terapipe",
        "1f1b: steps 3, it flushes after each; nearest legal: 1, or schedule pipedream",
    ]


def test_stages_a_rank_are_the_schedules_own_or_in_its_range():
    assert problems("interleaved_1f1b", 4, 8, chunks=3) == []
    assert problems("interleaved_1f1b", 4, 8, chunks=1) == [
        "interleaved_1f1b: chunks 1, it has 2 or more stages per rank; nearest legal: 2",
    ]
    assert problems("zb_v", 4, 8, chunks=3) == ["zb_v: chunks 3, it has 2 stages per rank; nearest legal: 2"]
    assert problems("dualpipe", 4, 8, chunks=-1) == ["dualpipe: chunks -1, it has 2 stages per rank; nearest legal: 2"]


def test_two_versions_of_the_weights_need_a_micro_batch_for_each_rank():
    assert problems("pipedream", ranks=4, micro_batches=3) == [
        "pipedream: 3 micro-batches < 4 ranks, and two versions of the weights would not suffice; nearest legal: "
        "4 micro-batches, or 3 ranks",
    ]
    assert problems("pipedream", ranks=4, micro_batches=4) == []


def test_each_way_has_a_micro_batch():
    assert problems("dualpipe", ranks=4, micro_batches=1) == [
        "dualpipe: 1 micro-batches cannot be split over 2 directions: the stages of one direction would get no "
        "gradients; nearest legal: 2 micro-batches, or schedule 1f1b",
    ]
    assert problems("dualpipe", ranks=4, micro_batches=2) == []
    assert problems("dualpipe", ranks=4, micro_batches=3) == []


@pytest.mark.parametrize(
    ("name", "chunks", "stages"),
    [
        ("1f1b", 0, 4),
        ("interleaved_1f1b", 0, 8),
        ("interleaved_1f1b", 3, 12),
        ("looped_bfs", 0, 8),
        ("zb_v", 0, 8),
        ("v_half", 2, 8),
        ("dualpipe_v", 0, 8),
        ("dualpipe", 0, 4),
        ("terapipe", 0, 4),
    ],
)
def test_stages_of_four_ranks(name: str, chunks: int, stages: int):
    assert catalogue.stages(name, 4, chunks) == stages
    assert catalogue.build(name, 4, 8, chunks).stages == stages


def test_build_raises_what_problems_tells():
    with pytest.raises(JobError) as refused:
        catalogue.build("zbv", 0, 0)
    assert refused.value.problems == problems("zbv", 0, 0)


def test_numbers_asked_for_are_taken():
    assert catalogue.build("terapipe", 2, 4, slices=7).slices == 7
    assert catalogue.build("terapipe", 2, 4, slices=1).slices == 1
    assert catalogue.build("pipedream", 2, 4, steps=5).micro_batches == 20
    assert catalogue.build("pipedream", 2, 4, steps=1).steps == 1
