"""Schedules as files: what is written is read again, torch reads it too, mistakes are named by line and cell."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.errors import JobError
from phalanx.schedule import catalogue, file

NAMES = list(catalogue.SCHEDULES)
GOOD = "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"


@pytest.fixture
def given(tmp_path):
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


def test_blank_cells_comments_and_other_line_ends_say_nothing(given):
    schedule = file.read(given(GOOD))
    assert (schedule.name, schedule.steps, schedule.placements) == ("mine", 1, ((0, 1),))
    written = "# a comment\n#name: of my own\n# steps: 2\n\n" + GOOD.replace("0F1", ' "0F1" ').replace("\n", "\r\n")
    assert file.read(given(written)) == replace(schedule, name="of my own", steps=2)


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
def test_mistakes_are_named(given, content, message):
    path = given(content)
    with pytest.raises(JobError) as raised:
        file.read(path)
    assert message in str(raised.value)
    assert all(problem.startswith(f"{path}: ") for problem in raised.value.problems)


def test_all_mistakes_are_named_at_once(given):
    with pytest.raises(JobError) as raised:
        file.read(given("0F0,x,0B0\n1G0,1B0\n# steps: 0\n"))
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
