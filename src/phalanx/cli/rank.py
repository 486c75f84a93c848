"""Verbs on several ranks; and one rank of a local launch: `python -m phalanx.cli.rank ARGV...` is `phalanx ARGV...` in
the launcher's frame."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from phalanx.config.job import RunOptions
from phalanx.launch.detected import detected
from phalanx.launch.lifeline import die_with_launcher
from phalanx.launch.ranks import LOG_DIR, SINGLE, Ranks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed.Store, to the type stubs

Options = TypeVar("Options")


def run_on_ranks(
    read: Callable[[Ranks | None], Options | None],
    start: Callable[[Options], int],
    work: Callable[[Options, Ranks, Store | None], int],
    timeout_s: Callable[[Options], float] = lambda _: RunOptions().timeout_s,
) -> int:
    """Runs a verb that may have several ranks, and returns its exit code.

    Processes that torchrun, srun or mpiexec started meet, for at most `timeout_s`, as soon as each has read its
    options: a mistake of several is one message.

    Args:
        read: gets this process's place, None without a launcher; returns the options, or None if there is nothing to
            do, or raises JobError, also if they need another number of processes than were started.
        start: runs the verb where no launcher has started this process.
        work: does the work of a rank, with the store of all if another launcher has started it.
    """
    die_with_launcher()
    ranks = detected(os.environ)
    if LOG_DIR in os.environ:  # `start` in another process has started this one
        ranks = ranks or SINGLE
        options = read(ranks)
        return 0 if options is None else work(options, ranks, None)
    if ranks is None:
        options = read(None)
        return 0 if options is None else start(options)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or every lost peer prints the stack of torch's C++
    from phalanx.launch.meeting import Meeting
    from phalanx.launch.verdict import lost_peer_named

    meeting = Meeting(ranks)
    with meeting.agreed():
        options = read(ranks)
        if options is None:
            return 0
        ranks = meeting.join(timeout_s(options))
        with lost_peer_named(ranks):
            return work(options, ranks, meeting.store)


if __name__ == "__main__":
    from phalanx.cli.main import run
    from phalanx.launch.worker import main

    main(run)
