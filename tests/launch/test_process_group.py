"""Joining and leaving torch's process group, and errors about a lost connection."""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.errors import DataError, RunError, StoppedError
from phalanx.launch import meeting
from phalanx.launch.process_group import init, process_group
from phalanx.launch.ranks import SINGLE, STORE, Ranks
from phalanx.launch.verdict import lost_peer_named

# Joining and leaving torch's process group.


CPU = torch.device("cpu")
FIRST_OF_TWO = Ranks(rank=0, world=2, local_rank=0, local_world=2, node_rank=0, source="torchrun")


@pytest.fixture(autouse=True)
def _nobody_launched_us(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (STORE, "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # so that it is put back, also when the code sets it
        monkeypatch.delenv(name)


def test_a_lone_process_has_a_group_too() -> None:
    with process_group(SINGLE, device=CPU, timeout_s=10):
        assert dist.get_world_size() == 1
        value = torch.full((2,), 3.0)
        dist.all_reduce(value)
        assert value.tolist() == [3.0, 3.0]
    assert not dist.is_initialized()


@pytest.mark.parametrize("error", [DataError("x"), StoppedError("x"), ValueError("x")])
def test_a_lone_process_leaves_the_group_after_an_error(error: Exception) -> None:
    with pytest.raises(type(error)), process_group(SINGLE, device=CPU, timeout_s=10):
        raise error
    assert not dist.is_initialized()


def leave_the_pools_group() -> None:
    dist.barrier()  # or another rank would still be connecting to this one
    dist.destroy_process_group()


def in_a_group_after(ranks: Ranks, store: str, error: Exception) -> bool:
    leave_the_pools_group()
    os.environ[STORE] = store
    with pytest.raises(type(error)), process_group(ranks, device=CPU, timeout_s=10):
        fail_together(error)
    return dist.is_initialized()


def fail_together(error: Exception) -> None:
    dist.barrier()  # a rank that left at once would leave others behind that are still connecting
    raise error


def test_several_ranks_leave_together_or_not_at_all(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    assert ranks(in_a_group_after, 2, str(tmp_path / "a"), ValueError("a bug")) == [True, True]
    assert ranks(in_a_group_after, 2, str(tmp_path / "b"), StoppedError("as planned")) == [False, False]


def test_a_peer_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(STORE, str(tmp_path / "store"))
    with pytest.raises(RunError, match=r"Rank 0 of 2 could not join .*at most 1 s\)(.|\n)*Not there: rank 1\."):
        init(FIRST_OF_TWO, device=CPU, timeout_s=1)


def test_ranks_that_were_not_told_where_to_meet() -> None:
    with pytest.raises(RunError, match=r"torchrun started 2 ranks(.|\n)*set MASTER_ADDR"):
        init(FIRST_OF_TWO, device=CPU, timeout_s=1)


def test_an_address_at_which_the_store_of_another_run_answers() -> None:
    ports = []
    stores = []
    for _ in range(2):
        listener = socket.create_server(("127.0.0.1", 0))
        ports.append(listener.getsockname()[1])
        stores.append(meeting.served(listener, 1, 5.0))
    meeting.require_own_address(stores[0], 1, "127.0.0.1", ports[0])
    with pytest.raises(RunError, match=r"does not lead to rank 0, .*\(another program answers there\)"):
        meeting.require_own_address(stores[0], 1, "127.0.0.1", ports[1])


def test_an_address_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(RunError, match=rf"no-such-host.invalid does not lead to rank 0, .* {platform.node()}"):
        init(FIRST_OF_TWO, device=CPU, timeout_s=1)


def where_sockets_may_be(ranks: Ranks) -> str:
    return os.environ["GLOO_SOCKET_IFNAME"]


def test_one_machine_stays_on_loopback(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(where_sockets_may_be, 2) == ["lo", "lo"]


def answer_the_roll(ranks: Ranks, port: int, rank: list[int], world: list[int], timeout_s: float) -> str:
    """Joins over a TCP store, as under srun: this process as `rank` of a `world`. Returns the sum of the ranks that
    joined, or the error."""
    leave_the_pools_group()
    for name in (STORE, "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name, None)
    restarts = str(ranks.rank)  # torch's agents count their own: one that joined later has another number
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RESTART_COUNT=restarts)
    me = Ranks(rank[ranks.rank], world[ranks.rank], ranks.rank, ranks.world, 0, "slurm")
    try:
        init(me, device=CPU, timeout_s=timeout_s)
    except RunError as error:
        return str(error)
    total = torch.tensor([float(me.rank)])
    dist.all_reduce(total)
    return str(total.item())


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_ranks_meet_in_a_store_of_rank_0(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(answer_the_roll, 3, free_port(), [2, 0, 1], [3, 3, 3], 30) == ["3.0"] * 3


def test_two_processes_with_one_rank_are_named_on_all(ranks: Callable[..., list[Any]]) -> None:
    """The second process with rank 0 finds the port in use."""
    host = platform.node()
    for twice in ([0, 0], [0, 1, 1]):
        found = ranks(answer_the_roll, len(twice), free_port(), twice, [len(twice)] * len(twice), 30)
        assert len(set(found)) == 1
        who = rf"process \d+ on host {host}"
        assert re.match(rf"Two processes have rank {twice[-1]} of \d: {who}, and {who}\. Give every process", found[0])


def test_a_rank_of_another_world_is_named_on_all(ranks: Callable[..., list[Any]]) -> None:
    found = ranks(answer_the_roll, 3, free_port(), [0, 1, 2], [3, 3, 4], 30)
    assert set(found) == {
        f"rank 2 on host {platform.node()} has world size 4, but rank 0 3: start all ranks with the same settings"
    }


def test_missing_ranks_are_named_on_all(ranks: Callable[..., list[Any]]) -> None:
    found = ranks(answer_the_roll, 2, free_port(), [0, 2], [4, 4], 1)
    assert len(set(found)) == 1
    assert found[0].startswith("After 1 s, ranks 1, 3 of 4 did not come.\nCheck that all 4 ranks were started")


def test_a_port_that_something_else_uses(ranks: Callable[..., list[Any]]) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        found = ranks(answer_the_roll, 2, port := listener.getsockname()[1], [0, 1], [2, 2], 1)
    assert "address already in use" in found[0]
    assert f"After 1 s, what listens at 127.0.0.1:{port} has not answered rank 1 of 2: another program" in found[1]


def test_a_missing_rank_0_is_named_without_torchs_stack_traces(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port := free_port()))
    with pytest.raises(RunError, match=rf"After 1 s, rank 0 of 2 did not come: 127.0.0.1:{port}: Connection refused"):
        init(Ranks(1, 2, 1, 2, 0, "slurm"), device=CPU, timeout_s=1)
    assert capfd.readouterr().err == ""


# Errors about a lost connection become one message; other errors stay what they are.

RANKS = Ranks(1, 4, 0, 1, 1, "mpich")


@pytest.mark.parametrize(
    ("text", "peer", "shown"),
    [
        ("[/src/gloo/pair.cc:547] Connection closed by peer [10.0.0.2]:4242", "a rank on 10.0.0.2", "(Connection"),
        (
            "trace\n[/src/pair.cc:1] Read error [fe80::2]:42: Connection reset by peer. This is typically caused by x",
            "a rank on fe80::2",
            "Connection reset by peer)",
        ),
        ("[/src/unbound_buffer.cc:78] Timed out waiting 15000ms for recv operation", "rank(s)", "(Timed out"),
    ],
)
def test_the_backend_s_error_becomes_a_message(text: str, peer: str, shown: str) -> None:
    with pytest.raises(RunError, match=r"^rank 1 of 4 on \S+ lost ") as caught, lost_peer_named(RANKS):
        raise RuntimeError(text)
    assert f"lost {peer}: another rank ended, hangs, or its connection broke while this one waited" in str(caught.value)
    assert shown in str(caught.value)


def test_another_error_is_a_bug() -> None:
    with pytest.raises(RuntimeError, match="shape mismatch"), lost_peer_named(RANKS):
        raise RuntimeError("shape mismatch")
