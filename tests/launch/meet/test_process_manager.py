"""Rank 0's word through the process manager of MPICH (PMI-1), played here by a thread per rank."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from phalanx.launch.meet import pmi


class Manager:
    """The process manager of `world` ranks."""

    def __init__(self, world: int):
        self.values: dict[str, str] = {}
        self.finalized = 0
        self.barrier = threading.Barrier(world)
        pairs = [socket.socketpair() for _ in range(world)]
        self.theirs = [theirs for _, theirs in pairs]
        for mine, _ in pairs:
            threading.Thread(target=self.serve, args=(mine,), daemon=True).start()

    def serve(self, connection: socket.socket) -> None:
        end = suppress(threading.BrokenBarrierError, OSError)  # the test is over: nobody waits for an answer
        with end, connection, connection.makefile("rw", encoding="ascii", newline="\n") as stream:
            for line in stream:
                pairs = dict(word.split("=", 1) for word in line.split())
                stream.write(f"cmd={self.answer(pairs)}\n")
                stream.flush()

    def answer(self, pairs: dict[str, str]) -> str:
        match pairs["cmd"]:
            case "init":
                return "response_to_init pmi_version=1 pmi_subversion=1 rc=0"
            case "get_my_kvsname":
                return "my_kvsname kvsname=kvs_1"
            case "put":
                self.values[pairs["key"]] = pairs["value"]
                return "put_result rc=0 msg=success"
            case "barrier_in":
                self.barrier.wait()
                return "barrier_out"
            case "get" if pairs["key"] in self.values:
                return f"get_result rc=0 msg=success value={self.values[pairs['key']]}"
            case "get":
                return "get_result rc=-1 msg=key_not_found value=unknown"
            case _:
                self.finalized += 1
                return "finalize_ack"

    def environment(self, rank: int) -> dict[str, str]:
        return {"PMI_FD": str(self.theirs[rank].fileno()), "PMI_RANK": str(rank)}


def exchanged(manager: Manager, text: str | None, seconds: float = 60.0) -> list[str]:
    """What each rank gets when rank 0 says `text`."""
    with ThreadPoolExecutor() as threads:
        calls = [
            threads.submit(pmi.exchange, manager.environment(rank), None if rank else text, seconds)
            for rank in range(len(manager.theirs))
        ]
        return [call.result() for call in calls]


def test_all_ranks_get_what_rank_0_says_and_leave_in_order() -> None:
    manager = Manager(3)
    assert exchanged(manager, "abc_-=") == ["abc_-="] * 3
    assert manager.finalized == 3, "a rank that does not say so counts as crashed"


def test_a_rank_0_that_says_nothing() -> None:
    with pytest.raises(OSError, match="answered get with 'cmd=get_result rc=-1"):
        exchanged(Manager(2), None)


def test_a_rank_that_does_not_come() -> None:
    manager = Manager(2)
    with pytest.raises(TimeoutError):
        pmi.exchange(manager.environment(0), "word", 0.2)
    manager.barrier.abort()


def garbage(connection: socket.socket) -> None:
    connection.sendall(b"cmd=no\n")


@pytest.mark.parametrize("act", [socket.socket.close, garbage])
def test_a_manager_that_has_gone_or_speaks_something_else(act: Callable[[socket.socket], None]) -> None:
    mine, theirs = socket.socketpair()
    act(mine)
    with theirs, pytest.raises(OSError, match=r"closed|Broken pipe|answered init|reset"):
        pmi.exchange({"PMI_FD": str(theirs.fileno())}, "word", 1)


def test_whether_a_manager_is_there() -> None:
    mine, theirs = socket.socketpair()
    with mine, theirs, open("/dev/null") as file:
        there = {"PMI_FD": str(theirs.fileno())}
        assert pmi.is_there(there)
        assert not pmi.is_there({"PMI_FD": str(file.fileno())})
        assert not pmi.is_there({**there, "PMI_JOBID": "6.0", "SLURM_STEP_ID": "0"}), "srun --mpi=pmi2 speaks PMI-2"
    assert not pmi.is_there({"PMI_FD": "9" * 30})
    assert not pmi.is_there({})
