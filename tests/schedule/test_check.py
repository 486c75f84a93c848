"""The validator, the catalogue and files of schedules: mistakes are named, and what is too large is refused."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import JobError
from phalanx.schedule import catalogue, file
from phalanx.schedule.catalogue import SCHEDULES
from phalanx.schedule.catalogue import problems as refusals
from phalanx.schedule.check import blocked, check, in_flight, problems
from phalanx.schedule.schedule import MOST_ACTIONS, Action, Schedule, Size, too_large

# The validator: passes every schedule of the catalogue, and names every kind of mistake.


NAMES = list(catalogue.SCHEDULES)


def built(name: str, ranks: int, micro_batches: int) -> Schedule | None:
    """The schedule, or None where it does not exist in that size."""
    return None if catalogue.problems(name, ranks, micro_batches) else catalogue.build(name, ranks, micro_batches)


def line(*programs: str, micro_batches: int = 2, placements: tuple[tuple[int, ...], ...] = ((0, 1),)) -> Schedule:
    """A schedule from its actions as words, without a look at them."""
    return Schedule(
        "line", placements, micro_batches, tuple(tuple(map(action, program.split())) for program in programs)
    )


def action(word: str) -> Action:
    return Action(word[1], int(word[0]), int(word[2:]))


def with_program(schedule: Schedule, rank: int, program: list[Action]) -> Schedule:
    programs = list(schedule.programs)
    programs[rank] = tuple(program)
    return replace(schedule, programs=tuple(programs))


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_is_one(name):
    tried = 0
    for ranks in range(1, 7):
        for micro_batches in range(1, 17):
            schedule = built(name, ranks, micro_batches)
            if schedule is not None:
                tried += 1
                assert problems(schedule) == [], (ranks, micro_batches)
    assert tried >= 30


@st.composite
def chosen(draw) -> tuple[Schedule, int, int]:
    """A schedule, a rank of it and one of its actions."""
    name = draw(st.sampled_from(NAMES))
    schedule = built(name, 2 * draw(st.integers(1, 2)), 2 * draw(st.integers(2, 4)))
    assert schedule is not None
    rank = draw(st.integers(0, schedule.ranks - 1))
    return schedule, rank, draw(st.integers(0, len(schedule.programs[rank]) - 1))


@given(chosen())
@settings(deadline=None, max_examples=60)
def test_an_action_that_is_dropped_is_missed(case):
    schedule, rank, place = case
    program = list(schedule.programs[rank])
    gone = program.pop(place)
    found = problems(with_program(schedule, rank, program))
    assert len(found) == 1
    assert found[0].startswith(f"rank {rank}: {gone} is missing")


@given(chosen())
@settings(deadline=None, max_examples=60)
def test_an_action_that_is_repeated_is_named(case):
    schedule, rank, place = case
    program = list(schedule.programs[rank])
    assert f"rank {rank}: {program[place]} appears more than once" in problems(
        with_program(schedule, rank, [*program, program[place]])
    )


@given(chosen())
@settings(deadline=None, max_examples=60)
def test_an_action_on_the_wrong_rank_is_named(case):
    schedule, rank, place = case
    program = list(schedule.programs[rank])
    moved = program.pop(place)
    other = (rank + 1) % schedule.ranks
    wrong = with_program(schedule, rank, program)
    wrong = with_program(wrong, other, [*wrong.programs[other], moved])
    of = f" for micro-batch {moved.micro}" if len(schedule.placements) > 1 else ""
    expected = f"rank {other}: {moved} is on the wrong rank: stage {moved.stage}{of} is on rank {rank}"
    assert expected in problems(wrong)


@given(chosen())
@settings(deadline=None, max_examples=60)
def test_a_backward_pass_before_its_forward_pass_is_named(case):
    schedule, rank, place = case
    program = list(schedule.programs[rank])
    moved = program[place]
    forward = moved._replace(kind="F")
    first = next(a for a in program if a.kind in "BI" and a[1:] == moved[1:])
    program.remove(first)
    program.insert(program.index(forward), first)
    assert f"rank {rank}: {first} comes before {forward}, whose result it needs" in problems(
        with_program(schedule, rank, program)
    )


def test_gradients_of_weights_before_those_of_inputs_are_named():
    found = problems(line("0F0 0W0 0I0 0F1 0B1", placements=((0,),)))
    assert found == ["rank 0: 0W0 comes before 0I0, whose result it needs"]


def test_both_a_whole_backward_pass_and_a_half_is_too_much_and_a_half_is_too_little():
    found = problems(line("0F0 0B0 0W0 0F1 0I1", placements=((0,),)))
    assert found == [
        "rank 0: 0B0 appears together with 0W0: a backward pass is B, or its halves I and W",
        "rank 0: 0W1 is missing, the other half of 0I1",
    ]
    assert problems(line("0F0 0F1 0B1", placements=((0,),))) == ["rank 0: 0B0 is missing (or its halves, 0I0 and 0W0)"]


def test_what_does_not_exist_is_named():
    found = problems(line("0F0 0F1 0B0 0B1 0F9 5F0", "1F0 1B0 1F1 1B1"))
    kinds = "there are the kinds F, B, I and W, stages 0 to 1, micro-batches 0 to 1"
    assert found == [f"rank 0: 0F9 does not exist: {kinds}", f"rank 0: 5F0 does not exist: {kinds}"]
    whole = line("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    assert problems(whole) == []
    assert problems(replace(whole, placements=((0, 2),))) == ["stage 1 is on rank 2; the ranks are 0 to 1"]
    assert problems(replace(whole, steps=3)) == [
        "micro_batches 2 % steps 3 = 2: steps take equal shares; nearest: 1, 2"
    ]
    assert problems(replace(whole, slices=0)) == ["slices must be at least 1, is 0"]
    assert problems(replace(whole, programs=(*whole.programs, ()))) == ["rank 2 has no actions"]
    assert problems(replace(whole, placements=((0, 1), (1,)))) == ["stages in each direction: 2, 1; must be equal"]


def test_a_cycle_of_waits_is_described():
    # Rank 0 wants its gradients before it has sent what rank 1 waits for.
    found = problems(line("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"))
    assert found == [
        "deadlock: rank 0 cannot begin 0B0: it waits for 1B0 or 1I0 on rank 1",
        "deadlock: rank 1 cannot begin 1F1: it waits for 0F1 on rank 0",
        "deadlock: the ranks wait in a cycle, rank 0 -> rank 1 -> rank 0",
    ]


def test_a_rank_that_waits_for_itself_is_described():
    found = problems(line("1F0 0F0 1B0 0B0", micro_batches=1, placements=((0, 0),)))
    assert found == [
        "deadlock: rank 0 cannot begin 1F0: it waits for 0F0 later in its own program",
        "deadlock: the ranks wait in a cycle, rank 0 -> rank 0",
    ]


@given(chosen(), st.randoms())
@settings(deadline=None, max_examples=40)
def test_in_any_order_a_schedule_runs_or_its_cycle_is_found(case, random):
    schedule, rank, _ = case
    program = list(schedule.programs[rank])
    random.shuffle(program)
    found = problems(with_program(schedule, rank, program))
    assert not found or "comes before" in found[0] or "in a cycle" in found[-1]


def test_an_error_lists_all_problems_but_of_very_many_only_the_first():
    whole = catalogue.build("1f1b", 4, 8)
    check(whole)
    with pytest.raises(JobError) as raised:
        check(with_program(whole, 0, [Action("F", 0, 0)]))
    assert len(raised.value.problems) == 8 + 7
    with pytest.raises(JobError) as raised:
        check(with_program(catalogue.build("1f1b", 4, 100), 0, [Action("F", 0, 0)]))
    assert raised.value.problems[-1] == "and 159 more problems"


def test_activations_are_kept_until_the_end_of_the_backward_pass_or_of_its_second_half():
    assert in_flight(line("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")) == (2, 1)
    assert in_flight(line("0F0 0F1 0I0 0W0 0B1", "1F0 1I0 1F1 1W0 1B1")) == (2, 2)


def test_sends_that_block_suit_1f1b_and_not_what_goes_round_the_ranks_both_ways():
    assert blocked(catalogue.build("1f1b", 4, 8)) == []
    assert blocked(catalogue.build("interleaved_1f1b", 4, 8)) == [
        "deadlock: rank 0 cannot send the result of 4B0: rank 3 has not posted its receive",
        "deadlock: rank 1 cannot send the result of 5B1: rank 0 has not posted its receive",
        "deadlock: rank 2 cannot send the result of 6B2: rank 1 has not posted its receive",
        "deadlock: rank 3 cannot send the result of 7B3: rank 2 has not posted its receive",
        "deadlock: the ranks wait in a cycle, rank 0 -> rank 3 -> rank 2 -> rank 1 -> rank 0",
    ]


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "zb_h1", "terapipe", "pipedream"])
def test_sends_may_block_in_schedules_that_go_one_way_at_a_time(name):
    for ranks in range(1, 6):
        for micro_batches in range(1, 9):
            schedule = built(name, ranks, micro_batches)
            assert schedule is None or blocked(schedule) == [], (ranks, micro_batches)


# What the catalogue refuses, and in which words.


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_one_rank_and_one_micro_batch_are_a_pipeline(name: str):
    assert refusals(name, ranks=1, micro_batches=1) == []
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
    assert refusals(written, 4, 8) == [
        f"no schedule {written!r}; did you mean {meant}? (known: {', '.join(SCHEDULES)})",
    ]


def test_a_name_like_no_other_gets_the_list():
    assert refusals("sideways", 4, 8) == [f"no schedule 'sideways' (known: {', '.join(SCHEDULES)})"]


def test_all_problems_are_told_at_once():
    assert refusals("1f1b", ranks=0, micro_batches=-1, chunks=2, slices=4, steps=3) == [
        "1f1b: 0 ranks; nearest legal: 1",
        "1f1b: -1 micro-batches; nearest legal: 1",
        "1f1b: chunks 2, it has 1 stages per rank; nearest legal: 1",
        "1f1b: slices 4, it takes whole sequences; nearest legal: 1, or schedule terapipe",
        "1f1b: steps 3, it flushes after each; nearest legal: 1, or schedule pipedream",
    ]


def test_stages_a_rank_are_the_schedules_own_or_in_its_range():
    assert refusals("interleaved_1f1b", 4, 8, chunks=3) == []
    assert refusals("interleaved_1f1b", 4, 8, chunks=1) == [
        "interleaved_1f1b: chunks 1, it has 2 or more stages per rank; nearest legal: 2",
    ]
    assert refusals("zb_v", 4, 8, chunks=3) == ["zb_v: chunks 3, it has 2 stages per rank; nearest legal: 2"]
    assert refusals("dualpipe", 4, 8, chunks=-1) == ["dualpipe: chunks -1, it has 2 stages per rank; nearest legal: 2"]


def test_two_versions_of_the_weights_need_a_micro_batch_for_each_rank():
    assert refusals("pipedream", ranks=4, micro_batches=3) == [
        "pipedream: 3 micro-batches < 4 ranks, and two versions of the weights would not suffice; nearest legal: "
        "4 micro-batches, or 3 ranks",
    ]
    assert refusals("pipedream", ranks=4, micro_batches=4) == []


def test_each_way_has_a_micro_batch():
    assert refusals("dualpipe", ranks=4, micro_batches=1) == [
        "dualpipe: 1 micro-batches cannot be split over 2 directions: the stages of one direction would get no "
        "gradients; nearest legal: 2 micro-batches, or schedule 1f1b",
    ]
    assert refusals("dualpipe", ranks=4, micro_batches=2) == []
    assert refusals("dualpipe", ranks=4, micro_batches=3) == []


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
    assert refused.value.problems == refusals("zbv", 0, 0)


def test_numbers_asked_for_are_taken():
    assert catalogue.build("terapipe", 2, 4, slices=7).slices == 7
    assert catalogue.build("terapipe", 2, 4, slices=1).slices == 1
    assert catalogue.build("pipedream", 2, 4, steps=5).micro_batches == 20
    assert catalogue.build("pipedream", 2, 4, steps=1).steps == 1


# Schedules as files: what is written is read again, torch reads it too, mistakes are named by line and cell.

GOOD = "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"


@pytest.fixture
def stated(tmp_path):
    """A file with some content."""

    def write(content: str | bytes):
        path = tmp_path / "mine.csv"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (6, 12)])
def test_every_schedule_is_read_as_it_was_written(name, ranks, micro_batches, tmp_path):
    schedule = catalogue.build(name, ranks, micro_batches)
    path = tmp_path / f"{name}.csv"
    path.write_text(file.text(schedule))
    assert file.read(path) == schedule


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zb_v", "dualpipe"])
def test_torch_reads_every_cell_and_writes_it_the_same(name):
    from torch.distributed.pipelining import schedules

    cells = file.text(catalogue.build(name, 4, 8)).replace("\n", ",").split(",")
    assert [str(schedules._Action.from_str(cell) or "") for cell in cells] == cells


def test_blank_cells_comments_and_other_line_ends_say_nothing(stated):
    schedule = file.read(stated(GOOD))
    assert (schedule.name, schedule.steps, schedule.placements) == ("mine", 1, ((0, 1),))
    written = "# a comment\n#name: of my own\n# steps: 2\n\n" + GOOD.replace("0F1", ' "0F1" ').replace("\n", "\r\n")
    assert file.read(stated(written)) == replace(schedule, name="of my own", steps=2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            GOOD.replace("0F1", "0X1"),
            "line 1 (rank 0), cell 2: '0X1' is not an action; expected stage, F, B, I or W, and",
        ),
        (GOOD.replace("1B0", "1b0"), "line 2 (rank 1), cell 3: '1b0' is not an action: did you mean 1B0?"),
        (
            GOOD.replace("1B0", "1SEND_F0"),
            "cell 3: '1SEND_F0': SEND_F is not supported, only F, B, I and W: use torch's",
        ),
        (GOOD.replace("1B0", "(0F1;1B0)OVERLAP_F_B"), "OVERLAP_F_B is not supported"),
        (GOOD.replace("0F1", "9" * 40), f"'{'9' * 20}...' is not an action"),
        (GOOD.replace("0F1", "0F99999999"), "2 stages x 100000000 micro-batches = 200000000 forward passes, and as"),
        (GOOD.replace("1F", "2F").replace("1B", "2B"), "stage 1 has no forward pass on any rank"),
        (
            "0F0,1F1,0F2,0B0,1B1,0B2\n1F0,0F1,1F2,1B0,0B1,1B2\n",
            "stage 0 is on rank 0 (micro-batches 0, 2) and rank 1 (micro-batches 1); a stage is on one rank, or, if "
            "half of the micro-batches run in reverse, on one for 0 to 1 and one for 2",
        ),
        (GOOD.replace("0B1", "0B0"), "rank 0: 0B0 appears more than once"),
        (GOOD.replace("1B0,1F1", "1F1,1F1"), "rank 1: 1F1 appears more than once"),
        ("# steps: two\n" + GOOD, "line 1: steps must be a whole number of at least 1, is 'two'"),
        ("# steps: 3\n" + GOOD, "micro_batches 2 % steps 3 = 2"),
        ("", "no actions: expected one row per rank, with cells such as 0F0 and 0B0"),
        ("# nothing\n,,\n", "no actions"),
        (GOOD + ",,\n", "rank 2 has no actions"),
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "the ranks wait in a cycle, rank 0 -> rank 1 -> rank 0"),
        (b"\xff\xfe0F0", "not a text file in UTF-8 (byte 0)"),
    ],
)
def test_mistakes_are_named(stated, content, message):
    path = stated(content)
    with pytest.raises(JobError) as raised:
        file.read(path)
    assert message in str(raised.value)
    assert all(problem.startswith(f"{path}: ") for problem in raised.value.problems)


def test_all_mistakes_are_named_at_once(stated):
    with pytest.raises(JobError) as raised:
        file.read(stated("0F0,x,0B0\n1G0,1B0\n# steps: 0\n"))
    assert len(raised.value.problems) == 3


def test_files_that_are_not_there_or_too_large(tmp_path):
    with pytest.raises(JobError, match=r"none\.csv: cannot be read: No such file or directory"):
        file.read(tmp_path / "none.csv")
    with pytest.raises(JobError, match="cannot be read: it is a directory"):
        file.read(tmp_path)
    large = tmp_path / "large.csv"
    with large.open("wb") as opened:
        opened.truncate(file.MOST_BYTES + 1)
    with pytest.raises(JobError, match="cannot be read: it is larger than 64.0MiB"):
        file.read(large)


# What is too large is refused before it is built, with numbers that are not.

ABSURD = [
    {"ranks": 100_000, "micro_batches": 100_000},
    {"ranks": 100_000, "micro_batches": 2},
    {"ranks": 4, "micro_batches": 10**12},
    {"ranks": 10**30, "micro_batches": 10**30},
]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("micro_batches", [4, 8, 9, 24])
def test_the_number_of_actions_is_known_before(name: str, micro_batches: int):
    entry = SCHEDULES[name]
    size = Size(4, micro_batches, entry.chunks[0], entry.slices, entry.steps)
    built = sum(map(len, catalogue.build(name, 4, micro_batches).programs))
    if name.startswith("dualpipe"):  # of whose backward passes some are whole
        assert built <= size.actions(entry) <= 2 * built or micro_batches < 8
    else:
        assert size.actions(entry) == built * max(micro_batches, 8) / micro_batches


@pytest.mark.parametrize("absurd", ABSURD, ids=str)
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_absurd_sizes_are_refused_in_milliseconds(name: str, absurd: dict[str, int]):
    began = time.process_time()
    with pytest.raises(JobError) as refused:
        catalogue.build(name, **absurd)
    assert time.process_time() - began < 0.1
    (message,) = refused.value.problems
    assert f"the limit is {MOST_ACTIONS:,}; nearest legal: " in message or name == "pipedream"


@pytest.mark.parametrize("absurd", ABSURD, ids=str)
@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"pipedream"}))
def test_what_is_named_as_legal_is_the_largest_that_is(name: str, absurd: dict[str, int]):
    (message,) = catalogue.problems(name, **absurd)
    legal = message.partition("nearest legal: ")[2]
    for choice in legal.split(", or "):
        numbers = {what.replace("-", "_"): int(number) for number, what in re.findall(r"(\d+) ([a-z-]+)", choice)}
        assert catalogue.problems(name, **absurd | numbers) == []
        field, number = next(iter(numbers.items()))
        assert catalogue.problems(name, **absurd | numbers | {field: number + 1}) != []


def test_chunks_slices_and_steps_count():
    assert "nearest legal: 156250 chunks" in catalogue.problems("interleaved_1f1b", 4, 8, chunks=900_000)[0]
    assert "nearest legal: 156250 slices" in catalogue.problems("terapipe", 4, 8, slices=10**9)[0]
    assert "nearest legal: 156250 steps" in catalogue.problems("pipedream", 4, 8, steps=10**9)[0]


def test_the_largest_published_pipelines_are_small_enough():
    for name, entry in SCHEDULES.items():
        if entry.searched:
            assert not too_large(name, entry, Size(126 // entry.chunks[0], 16_384, entry.chunks[0]))
