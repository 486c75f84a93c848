"""The pool of warm ranks. (The session's pool is the fixture `ranks`.)"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from phalanx.errors import JobError
from phalanx.launch.pool import Pool
from phalanx.launch.ranks import Ranks, detect

Run = Callable[..., list[Any]]


def summed(ranks: Ranks, values: torch.Tensor, *, factor: int = 1) -> torch.Tensor:
    total = values * (ranks.rank + 1) * factor
    dist.all_reduce(total)
    return total


@pytest.mark.parametrize("world", [1, 2, 8])
def test_each_rank_s_result_in_order(ranks: Run, world: int) -> None:
    values = torch.arange(4.0, requires_grad=True)
    results = ranks(summed, world, values.detach(), factor=2)
    assert len(results) == world
    for result in results:
        assert torch.equal(result, values.detach() * world * (world + 1))


def myself(ranks: Ranks) -> tuple[Ranks, Ranks | None, int]:
    return ranks, detect(os.environ), os.getpid()


def test_ranks_know_who_they_are_and_stay_warm(ranks: Run) -> None:
    first, again = ranks(myself, 3), ranks(myself, 3)
    assert first == again
    for rank, (given, found, _) in enumerate(first):
        assert (given.rank, given.world, given.local_rank, given.one_node) == (rank, 3, rank, True)
        assert found is not None
        assert (found.rank, found.world) == (rank, 3)


def disturb(ranks: Ranks) -> tuple[str, torch.dtype, str | None, str, int]:
    """Leaves everything in disorder, and says what it found."""
    number = torch.rand(())
    found = (str(number), number.dtype, os.environ.get("LEFT_BEHIND"), str(Path.cwd()), torch.get_num_threads())
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(ranks.rank + time.time_ns())
    os.environ["LEFT_BEHIND"] = "yes"
    os.chdir("/")
    return found


def test_every_call_finds_a_fresh_process(ranks: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, again = ranks(disturb, 2), ranks(disturb, 2)
    assert first == again
    assert first[0] == first[1]
    assert first[0][1:] == (torch.float32, None, str(tmp_path), 1)


def held_in_a_circle(ranks: Ranks) -> int:
    """Threads of the process; the call's group is held by an object that refers to itself."""
    circle: list[Any] = [dist.new_group([0, 1])]
    circle.append(circle)
    dist.barrier(circle[0])
    return threads()


def held_by_dtensor(ranks: Ranks) -> int:
    """The same; DTensor remembers how it added sharded tensors on the call's mesh."""
    tensor = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
    assert (tensor + tensor).to_local().sum() == 16
    return threads()


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the threads")
@pytest.mark.parametrize("fn", [held_in_a_circle, held_by_dtensor])
def test_threads_of_a_call_s_groups_end_with_it(ranks: Run, fn: Callable[..., int]) -> None:
    _, second, *_, last = (ranks(fn, 2) for _ in range(6))  # torch keeps the first group that it sees
    assert last == second


def big(ranks: Ranks, size: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((size,), float(ranks.rank))}


def test_results_outlive_the_processes() -> None:
    with Pool(2) as pool:
        results = pool.run(big, 2, 1_000_000)
    assert not results[1]["x"].is_shared()
    assert results[1]["x"].sum().item() == 1_000_000


class OddError(Exception):
    """Cannot be sent: it does not take back what it stores."""

    def __init__(self, first: int, second: int):
        super().__init__(f"odd {first} {second}")


def fail(ranks: Ranks, on: int | None, error: str) -> None:
    if on in (None, ranks.rank):
        raise {"job": JobError(["one", "two"]), "odd": OddError(1, 2)}[error]
    dist.barrier()


def test_an_error_of_one_rank(ranks: Run) -> None:
    began = time.monotonic()
    with pytest.raises(JobError, match="one\ntwo") as error:
        ranks(fail, 4, 2, "job")
    assert time.monotonic() - began < 5  # the others, in their barrier, are not waited for
    assert error.value.problems == ["one", "two"]
    [note] = error.value.__notes__
    assert note.startswith("Raised on rank 2 of 4:\nTraceback")
    assert "in fail" in note
    assert len(ranks(myself, 4)) == 4


def test_an_error_of_all_ranks_is_found_at_once(ranks: Run) -> None:
    ranks(myself, 4)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"OddError: odd 1 2 \(cannot be sent as it is: "):
        ranks(fail, 4, None, "odd")
    assert time.monotonic() - began < 5


def hang(ranks: Ranks) -> None:
    if ranks.rank == 1:
        time.sleep(60)
    dist.barrier()


def test_a_hang_shows_where_every_rank_stands(ranks: Run) -> None:
    before = {pid for _, _, pid in ranks(myself, 2)}
    with pytest.raises(TimeoutError) as error:
        ranks(hang, 2, timeout=3.0)
    of_0, of_1 = str(error.value).split("rank 1:")
    assert "hang on 2 ranks took longer than 3 s" in of_0
    assert "in barrier" in of_0
    assert "in hang" in of_1
    assert "in barrier" not in of_1
    assert before.isdisjoint(pid for _, _, pid in ranks(myself, 2))


def test_an_interrupted_call_leaves_no_answers_for_the_next(ranks: Run) -> None:
    def interrupt(*_: object) -> None:
        raise RecursionError("of the caller")

    before = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(RecursionError):
            ranks(hang, 2)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert [given.rank for given, _, _ in ranks(myself, 2)] == [0, 1]


def die(ranks: Ranks) -> None:
    if ranks.rank == 1:
        os.abort()
    dist.barrier()


def test_a_dead_rank(ranks: Run) -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 died in die \(exit code -6\)(.|\n)*in die"):
        ranks(die, 2)


def test_a_world_that_is_too_large() -> None:
    with Pool(2) as pool, pytest.raises(ValueError, match="world 3 is not between 1 and this pool's 2 ranks"):
        pool.run(myself, 3)


def test_calls_are_cheap(ranks: Run) -> None:
    """0.03 s for 2 ranks and 0.10 s for 8 on a quiet machine of 2 cores; starting Python and torch takes seconds."""
    for world, bound in ((2, 0.5), (8, 1.5)):
        ranks(myself, world)
        seconds = []
        for _ in range(5):
            began = time.monotonic()
            ranks(myself, world)
            seconds.append(time.monotonic() - began)
        assert min(seconds) < bound


PROGRAM = """
import os, sys
from phalanx.launch.pool import Pool
from test_pool import myself
if __name__ == "__main__":
    pool = Pool(2)
    print(*(pid for _, _, pid in pool.run(myself, 2)), pool._directory.name, flush=True)
    exec(sys.argv[1])
"""


OWN_PROGRAM = """
from dataclasses import dataclass
from phalanx.launch.pool import Pool

@dataclass
class Place:
    rank: int

def place(ranks, shift):
    return Place(ranks.rank + shift.rank)

if __name__ == "__main__":
    with Pool(2) as pool:
        print(pool.run(place, 2, Place(3)))
"""


@pytest.mark.cold  # in a warm process the program is not the main module
def test_functions_of_the_program_itself_run_on_ranks(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(OWN_PROGRAM)
    for how in (["-m", "program"], ["program.py"]):
        done = subprocess.run(
            [sys.executable, *how], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.stdout == "[Place(rank=3), Place(rank=4)]\n", done.stderr


@pytest.mark.parametrize(("end", "code"), [("pass", 0), ("os.kill(os.getpid(), 9)", -9)])
def test_nothing_outlives_the_caller(tmp_path: Path, end: str, code: int) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, program, end], capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (code, "")
    *pids, directory = done.stdout.split()
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}/exe").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert Path(directory).exists() == (code != 0)  # a killed caller cannot clean up
