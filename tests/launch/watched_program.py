"""What the ranks of the watchdog's tests run: `python -m watched_program FAULT DIRECTORY`. Rank 1 makes the fault."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from phalanx.comm import agree, calls
from phalanx.comm.axis import Axis
from phalanx.launch.process_group import process_group
from phalanx.launch.ranks import detect
from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.heartbeat import Phase
from phalanx.launch.worker import main

TIMEOUT_S = 120


def stopped(axis: Axis, directory: Path) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def holds_gil(axis: Axis, directory: Path) -> None:
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    for _ in range(2):  # the second call waits for ever; no signal wakes it
        libc.pthread_mutex_lock(mutex)


def storage(axis: Axis, directory: Path) -> None:
    os.mkfifo(directory / "shard")
    with heartbeat.within(Phase.DATA):
        (directory / "shard").read_bytes()


def absent(axis: Axis, directory: Path) -> None:
    time.sleep(TIMEOUT_S)


def torch_absent(axis: Axis, directory: Path) -> None:
    time.sleep(TIMEOUT_S)


def leaves(axis: Axis, directory: Path) -> None:
    os._exit(0)


def other_shape(axis: Axis, directory: Path) -> None:
    axis.all_reduce(torch.ones(4)).wait()


def other_operation(axis: Axis, directory: Path) -> None:
    axis.broadcast(torch.ones(2)).wait()


def other_type(axis: Axis, directory: Path) -> None:
    axis.all_reduce(torch.ones(2, dtype=torch.int32)).wait()


def other_reduction(axis: Axis, directory: Path) -> None:
    axis.all_reduce(torch.ones(2), dist.ReduceOp.MAX).wait()


def own_call(axis: Axis, directory: Path) -> None:
    dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX)  # as a plug-in does, past the axis


def other_source(axis: Axis, directory: Path) -> None:
    axis.broadcast(torch.ones(2), 1).wait()


FAULTS: dict[str, Callable[[Axis, Path], None]] = {
    fault.__name__: fault
    for fault in (
        *(stopped, holds_gil, storage, absent, torch_absent, leaves),
        *(other_shape, other_operation, other_type, other_reduction, own_call, other_source),
    )
}
INSTEAD = ("other_type", "other_reduction", "own_call", "other_source")
"""Faults that take the place of the step's collective, so that the ranks end as if all were well."""


def run(argv: list[str]) -> int:
    """Makes steps of one collective each; in the fourth, rank 1 makes the fault."""
    fault, directory = argv[0], Path(argv[1])
    ranks = detect(os.environ)
    assert ranks is not None
    with process_group(ranks, device=torch.device("cpu"), timeout_s=TIMEOUT_S):
        world = Axis("world", ranks.world, ranks.rank, dist.distributed_c10d._get_default_group())
        heartbeat.training(0, 0)
        calls.record()
        for step in range(6):
            heartbeat.enter(Phase.FORWARD_BACKWARD)
            if step == 3 and fault == "deadlock":
                crossed(world)
            if step == 3 and ranks.rank == 0 and fault == "torch_absent":
                dist.all_reduce(torch.ones(2))  # as FSDP2 does, past the axis
            if step == 3 and ranks.rank == 1 and fault != "deadlock":
                FAULTS[fault](world, directory)
                if fault in INSTEAD:
                    continue
            if step == 3 and fault == "other_source":
                world.broadcast(torch.ones(2), 0).wait()
                continue
            world.all_reduce(torch.ones(2)).wait()
            heartbeat.enter(Phase.RECORD)
            heartbeat.steps_done(step + 1)
        agree.require_same_calls()
        heartbeat.enter(Phase.END)
    return 0


def crossed(world: Axis) -> None:
    """Two groups, called in a different order by the two ranks."""
    groups = [Axis(name, world.size, world.rank, dist.new_group()) for name in ("dp", "tp")]
    for axis in groups if world.rank else groups[::-1]:
        axis.all_reduce(torch.ones(3)).wait()


if __name__ == "__main__":
    main(run)
