"""Options of verbs that take no job: reading them, also on the ranks of another launcher."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import tyro

from phalanx.cli.commands import flag_of
from phalanx.config.run import RunOptions
from phalanx.launch.environment import LOG_DIR
from phalanx.launch.lifeline import die_with_launcher
from phalanx.launch.meet.detected import detected
from phalanx.launch.ranks import Ranks
from phalanx.nearest import did_you_mean

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed.Store, to the type stubs

Options = TypeVar("Options")


def read_options(kind: type[Options], verb: str, argv: Sequence[str], prints: bool = True) -> tuple[Options, list[str]]:
    """Returns the options of a verb, as its dataclass, and a message per word that is none of them. What tyro prints
    about wrong values, before it ends the program, only one rank `prints`."""
    options, unknown = tyro.cli(
        kind,
        prog=f"phalanx {verb}",
        args=argv,
        config=(tyro.conf.FlagCreatePairsOff,),
        console_outputs=prints,
        return_unknown_args=True,  # tyro would print their control characters
    )
    names = list(_flags(kind, options))
    return options, [
        f"unknown option {word}{did_you_mean(word.partition('=')[0], names) if word.startswith('--') else ''}"
        for word in unknown
    ]


def run_on_ranks(
    read: Callable[[Ranks | None], Options],
    start: Callable[[Options], int],
    work: Callable[[Options, Ranks, Store | None], int],
) -> int:
    """Runs a verb that may have several ranks, and returns its exit code.

    Args:
        read: gets this process's place, None without a launcher; returns the options, or raises JobError, also if they
            need another number of processes than were started.
        start: runs the verb where no launcher has started this process.
        work: does the work of a rank, with the store of all if another launcher has started it.
    """
    die_with_launcher()
    ranks = detected(os.environ)
    if ranks is None:
        return start(read(None))
    if LOG_DIR in os.environ:  # `start` in another process has started this one
        return work(read(ranks), ranks, None)
    return _as_foreign_rank(ranks, partial(read, ranks), work)


def _as_foreign_rank(
    ranks: Ranks, read: Callable[[], Options], work: Callable[[Options, Ranks, Store | None], int]
) -> int:
    """Works as one of the processes that torchrun, srun or mpiexec started. A mistake of several is one message."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or every lost peer prints the stack of torch's C++
    from phalanx.launch.lost_peer import lost_peer_named
    from phalanx.launch.meet.meeting import Meeting

    meeting = Meeting(ranks)
    with meeting.agreed():
        options = read()
        ranks = meeting.join(RunOptions().timeout_s)
        with lost_peer_named(ranks):
            return work(options, ranks, meeting.store)


def _flags(kind: type[Any], options: object) -> Iterator[str]:
    for field in dataclasses.fields(kind):
        value = getattr(options, field.name)
        yield from _flags(type(value), value) if dataclasses.is_dataclass(value) else [flag_of(field.name)]
