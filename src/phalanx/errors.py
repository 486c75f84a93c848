"""Errors that are shown to users, each with the exit code of the command.

A user's mistake is one of these, shown as one message without a traceback; anything else is a bug and keeps its
traceback. The codes are listed in docs/reference/cli.md.
"""

from __future__ import annotations

from collections.abc import Sequence

MOST_PROBLEMS = 40
"""Most problems that an error lists; of more it gives the number."""


class PhalanxError(Exception):
    """Base of all errors that are shown as a message; `exit_code` is the exit code of the process."""

    exit_code = 1


class RunError(PhalanxError):
    """The run failed (a rank died, an operation was refused by the machine)."""


class MismatchError(RunError):
    """Ranks have made different collectives; the watchdog, which finds most of them, ends a run with the same code."""

    exit_code = 124


class SupersededError(RunError):
    """A later attempt of the run has taken over, and this one must not write."""


class JobError(PhalanxError):
    """The job or the command line is wrong; `problems` lists every problem that was found, up to MOST_PROBLEMS."""

    exit_code = 2

    def __init__(self, problems: Sequence[str] | str):
        found = [problems] if isinstance(problems, str) else list(problems)
        rest = len(found) - MOST_PROBLEMS
        # One more is kept: it is the number of the rest, from an error whose problems are passed on.
        self.problems = found if rest <= 1 else [*found[:MOST_PROBLEMS], f"and {rest:,} more problems"]
        super().__init__("\n".join(self.problems))


class ExtensionError(JobError):
    """An installed package adds an entry that is incomplete or wrong, or whose name is taken."""


class DoesNotFitError(PhalanxError):
    """The request needs more memory than the devices have."""

    exit_code = 3


class DataError(PhalanxError):
    """A corpus, token shard or tokenizer is missing, corrupt or of another kind."""

    exit_code = 4


class CheckpointError(PhalanxError):
    """A checkpoint is missing, corrupt, or does not belong to this job."""

    exit_code = 4


class NotFoundError(CheckpointError, DataError):
    """A path, run, step or file that the user names does not exist: bad usage, while nothing is corrupt."""

    exit_code = 2


class OutputError(RunError):
    """Standard output or standard error cannot be written."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is incomplete or corrupt, or holds NaN: an older one may serve."""


class CorruptionError(PhalanxError):
    """Replicas of weights, moments or gradients differ, or a step has another result whenever it is computed."""

    exit_code = 4


class OffloadError(PhalanxError):
    """Files of offloaded state cannot be made, read or written. Checkpoints are untouched."""

    exit_code = 4


class NotFiniteError(PhalanxError):
    """Loss or gradients became NaN or infinite; the optimizer did not write them."""

    exit_code = 5


class SpikeError(PhalanxError):
    """Loss or gradient norm jumped; the optimizer did not write the step."""

    exit_code = 5


class StoppedError(PhalanxError):
    """Stopped on request with a checkpoint on disk: the same command resumes (EX_TEMPFAIL)."""

    exit_code = 75
