"""Ranks that nobody told where to meet: boards, and their errors."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import DataError, JobError, PhalanxError, RunError
from phalanx.launch import meeting as meetings
from phalanx.launch.lifeline import hydra_port
from phalanx.launch.meeting import (
    Board,
    Meeting,
    Offer,
    Problem,
    Verdict,
    listening_socket,
    message_of,
    name_of,
    own_addresses,
    placed,
)
from phalanx.launch.ranks import STORE, Ranks, ToldError
from phalanx.launch.verdict import LostPeerError

# Ranks that nobody told where to meet, and their errors.


Pool = Callable[..., list[Any]]
HOST = platform.node()


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Only these variables of launchers, and no group."""
    dist.barrier()  # or another rank would still be connecting to this one
    dist.destroy_process_group()
    before = dict(os.environ)
    for name in (STORE, "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name, None)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def slurm(job: str, state: Path) -> dict[str, str]:
    return {"SLURM_JOB_ID": job, "SLURM_STEP_ID": "0", "XDG_STATE_HOME": str(state)}


def job_number(path: Path) -> str:
    """A job of which no other test has the ports."""
    return f"{os.getpid()}{path}"


def meet(ranks: Ranks, variables: dict[str, str], local_world: int | None, source: str = "slurm") -> Ranks:
    with environment(**variables):
        local_rank = None if local_world is None else 0
        meeting = Meeting(Ranks(ranks.rank, ranks.world, local_rank, local_world, None, source))
        joined = meeting.join(20)
        meeting.store.add("met", 1)
        while ranks.rank == 0 and meeting.store.add("met", 0) < joined.world:  # it holds the store
            time.sleep(0.01)
        return joined


def test_a_slurm_step_meets_by_a_file(ranks: Pool, tmp_path: Path) -> None:
    joined = ranks(meet, 3, slurm(job_number(tmp_path), tmp_path / "a"), 1)
    assert [each.rank for each in joined] == [0, 1, 2]
    assert not any(each.one_node for each in joined)


def test_a_file_that_is_left_over_is_not_believed(ranks: Pool, tmp_path: Path) -> None:
    variables = {"PALS_APID": job_number(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    name = name_of(Ranks(0, 2, None, None, None, "pals"), variables)
    assert name is not None
    Board.of(name, variables, one_node=False).write(Offer(("127.0.0.1",), 9, "of an earlier job"))
    joined = ranks(meet, 2, variables, None, "pals")
    assert [(each.local_rank, each.local_world, each.node_rank) for each in joined] == [(0, 2, 0), (1, 2, 0)]


def test_local_ranks_are_counted_by_host() -> None:
    verdict = Verdict("", 0, (0, 1, 0, 1, 1), "")
    found = [placed(Ranks(rank, 5, None, None, None, "flux"), verdict) for rank in range(5)]
    assert [each.local_rank for each in found] == [0, 0, 1, 1, 2]
    assert [each.local_world for each in found] == [2, 3, 2, 3, 3]
    assert placed(Ranks(3, 5, 7, 8, 9, "slurm"), Verdict("", 0, (), "")) == Ranks(3, 5, 7, 8, 9, "slurm")


def end(ranks: Ranks, variables: dict[str, str], errors: list[Exception | None], meets: bool) -> tuple[bool, str, int]:
    """Ends as a rank of a launcher with an error. Returns whether this rank prints, what, and its exit code."""
    meetings._MORE_PROBLEMS_S = 0.5
    error = errors[ranks.rank]
    with environment(**variables):
        meeting = Meeting(Ranks(ranks.rank, ranks.world, 0, 1, None, "slurm"))
        try:
            with meeting.agreed():
                if meets:
                    meeting.join(20)
                if error:
                    raise error
                meeting.join(20)
        except PhalanxError as raised:
            return not isinstance(raised, ToldError), str(raised), raised.exit_code
    return False, "", 0


def test_a_mistake_of_all_ranks_is_one_message(ranks: Pool, tmp_path: Path) -> None:
    ends = ranks(end, 3, slurm(job_number(tmp_path), tmp_path), [JobError("no field x")] * 3, False)
    assert ends[0] == (True, "no field x", 2)
    assert [(prints, code) for prints, _, code in ends[1:]] == [(False, 2)] * 2


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_mistake_of_one_rank_names_it(ranks: Pool, tmp_path: Path, culprit: int) -> None:
    errors = [JobError("no field x") if rank == culprit else None for rank in range(3)]
    ends = ranks(end, 3, slurm(job_number(tmp_path), tmp_path), errors, False)
    assert ends[0] == (True, f"rank {culprit} of 3 on host {HOST}: no field x", 2)
    assert [(prints, code) for prints, _, code in ends[1:]] == [(False, 2)] * 2


def test_half_an_address_is_one_message(ranks: Pool, tmp_path: Path) -> None:
    variables = {**slurm(job_number(tmp_path), tmp_path), "MASTER_ADDR": "localhost"}
    ends = ranks(end, 2, variables, [None, None], False)
    assert [(prints, code) for prints, _, code in ends] == [(True, 2), (False, 2)]
    assert "MASTER_ADDR=localhost is set, but MASTER_PORT is not: set both" in ends[0][1]


def test_an_error_in_training_is_printed_by_one_rank_and_all_have_its_exit_code(ranks: Pool, tmp_path: Path) -> None:
    errors = [LostPeerError("lost rank 1"), DataError("no shard"), LostPeerError("lost rank 1")]
    ends = ranks(end, 3, slurm(job_number(tmp_path), tmp_path / "a"), errors, True)
    assert [(prints, code) for prints, _, code in ends] == [(False, 4), (True, 4), (False, 4)]
    assert ends[1][1] == f"rank 1 of 3 on host {HOST}: no shard"
    ends = ranks(end, 2, slurm(job_number(tmp_path / "b"), tmp_path / "b"), [DataError("no shard")] * 2, True)
    assert [(prints, code) for prints, _, code in ends] == [(True, 4), (False, 4)]
    assert ends[0][1] == "no shard"


def late(ranks: Ranks, variables: dict[str, str]) -> tuple[bool, str, int]:
    if ranks.rank:
        time.sleep(1.5)
    return end(ranks, variables, [JobError("no field x"), None], False)


def test_a_rank_that_comes_after_the_verdict_hears_it(ranks: Pool, tmp_path: Path) -> None:
    ends = ranks(late, 2, slurm(job_number(tmp_path), tmp_path))
    assert [(prints, code) for prints, _, code in ends] == [(True, 2), (False, 2)]


def test_problems_are_told_once_each() -> None:
    def on(rank: int, message: str) -> Problem:
        return Problem(message, 2, True, rank, f"host{rank % 2}")

    assert message_of([on(1, "a"), on(0, "a")], 2) == "a"
    assert message_of([on(2, "a"), on(0, "a")], 3) == "ranks 0, 2 of 3 on host host0: a"
    assert message_of([on(0, "a"), on(1, "b")], 3) == "rank 0 of 3 on host host0: a\nrank 1 of 3 on host host1: b"
    assert message_of([on(0, "a"), on(1, "a")], 3) == "ranks 0, 1 of 3 on 2 hosts (host0, host1): a"


# What the ranks of one launch leave for each other.

OFFER = Offer(("10.0.0.1", "fe80::1"), 12345, "token")
SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}


def ranks(source: str) -> Ranks:
    return Ranks(1, 4, 1, 2, 0, source)


def test_an_offer_is_read_as_it_was_written(tmp_path: Path) -> None:
    board = Board.of("slurm 7", {"XDG_STATE_HOME": str(tmp_path)}, one_node=False)
    assert board.read() == []
    board.write(OFFER)
    assert board.read() == [OFFER]
    assert board.path.parent.stat().st_mode & 0o777 == 0o700
    board.remove()
    assert board.read() == []


def test_a_folder_of_somebody_else_is_not_believed(tmp_path: Path) -> None:
    board = Board.of("slurm 7", {"XDG_STATE_HOME": str(tmp_path)}, one_node=False)
    board.write(OFFER)
    board.path.parent.chmod(0o777)
    assert board.read() == []
    with pytest.raises(RunError, match="is writable by others"):
        board.write(OFFER)


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    board = Board.of("slurm 7", {"XDG_STATE_HOME": str(tmp_path)}, one_node=False)
    board.write(OFFER)
    (tmp_path / "theirs").write_text("mine")
    board.path.unlink()
    board.path.symlink_to(tmp_path / "theirs")
    board.write(OFFER)
    assert (tmp_path / "theirs").read_text() == "mine"


@given(st.text(max_size=300))
def test_any_word_is_an_offer_or_a_value_error(text: str) -> None:
    try:
        offer = Offer.decode(text)
    except ValueError:
        return
    assert offer.port


def test_a_launch_has_a_name_of_its_own() -> None:
    name = name_of(ranks("slurm"), SLURM)
    assert name is not None
    assert name != name_of(ranks("slurm"), {**SLURM, "SLURM_STEP_ID": "1"})
    assert name != name_of(ranks("slurm"), {**SLURM, "SLURM_RESTART_COUNT": "1"})
    assert name_of(ranks("slurm"), {"SLURM_JOB_ID": "7"}) is None
    assert name_of(ranks("torchrun"), SLURM) is None


def test_a_port_is_held_from_the_moment_it_is_chosen() -> None:
    with listening_socket(0, one_node=True) as first:
        assert first.getsockname()[0] == "127.0.0.1"
        with pytest.raises(OSError, match="in use"):
            listening_socket(first.getsockname()[1], one_node=True)


def test_own_addresses_begin_with_what_the_user_names() -> None:
    if len(own_addresses({})) > 1:
        assert own_addresses({})[0] not in ("127.0.0.1", "::1")
    assert own_addresses({"GLOO_SOCKET_IFNAME": "lo"})[0] in ("127.0.0.1", "::1")
    for address in own_addresses(os.environ):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as probe:
            probe.bind((address, 0))


# No variable of MPICH names a launch: the command line of the proxy above its ranks does.

ASKS = "from phalanx.launch.lifeline import hydra_port; print(hydra_port())"


@pytest.mark.parametrize(
    ("options", "found"),
    [(["--control-port", "n1:45049", "--rmk", "user"], "n1:45049"), (["--control-port"], ""), ([], "")],
)
def test_a_launch_of_mpich_is_named_by_its_proxys_command_line(options: list[str], found: str) -> None:
    inside = (
        f"import subprocess, sys; subprocess.run(['sh', '-c', {sys.executable!r} + ' -c ' + {ASKS!r}.join('\"\"')])"
    )
    done = subprocess.run([sys.executable, "-c", inside, *options], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == found
    assert (name_of(ranks("mpich"), {}) is None) == (not hydra_port())
    assert name_of(ranks("mpich"), {"I_MPI_HYDRA_UUID": "7"}) != name_of(ranks("mpich"), {"I_MPI_HYDRA_UUID": "8"})


def test_ranks_without_a_home_leave_word_in_their_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    board = Board.of("slurm 7", {"HOME": str(tmp_path / "not-mounted")}, one_node=False)
    assert board.path.parent == tmp_path / ".phalanx" / "ranks"
    board.write(Offer(("127.0.0.1",), 9, "token"))
    assert board.read()[0].port == 9
    assert Board.of("slurm 7", {"HOME": str(tmp_path)}, one_node=False).path.is_relative_to(tmp_path / ".local")
