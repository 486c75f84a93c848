"""An error that another rank prints, so that a mistake of all ranks is one message."""

from __future__ import annotations

from phalanx.errors import RunError
from phalanx.launch.ranks import Ranks


class ToldError(RunError):
    """This rank ends because of an error that another rank prints; `exit_code` is that rank's."""

    def __init__(self, message: str, code: int = RunError.exit_code):
        super().__init__(message)
        self.exit_code = code


class GroupError(RunError):
    """An error of several ranks, or of another one, which this rank prints; `exit_code` is theirs."""

    def __init__(self, message: str, code: int = RunError.exit_code):
        super().__init__(message)
        self.exit_code = code


def seen_by_rank_0(ranks: Ranks, message: str) -> RunError:
    """Returns the error for something that rank 0 finds, too: only rank 0 prints it."""
    return RunError(message) if ranks.rank == 0 else ToldError(message)


def without_rank_0(ranks: Ranks, message: str) -> RunError:
    """Returns the error of a rank that cannot reach rank 0, and so cannot ask who prints: one rank of every node does,
    and rank 1 on the node of rank 0."""
    return RunError(message) if ranks.rank < 2 or not ranks.local_rank else ToldError(message)
