"""The place of this process among the ranks of another launcher, or one message for all of them that says why not."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.errors import JobError
from phalanx.launch.ranks import LaunchersDisagreeError, NoSuchRankError, Ranks, ToldError, detect, lowest_evidence


def detected(env: Mapping[str, str]) -> Ranks | None:
    """Returns the place of this process, as `detect`. Where the variables are wrong, and so no rank is known, every
    rank finds that: JobError is raised on those for which a variable says rank 0, ToldError on the others.

    Launchers may disagree about some ranks only. So ranks that find it meet as one of the launchers says, and end the
    others with one message."""
    try:
        return detect(env)
    except LaunchersDisagreeError as error:
        if error.claimed is None or error.claimed.world == 1:
            raise
        from phalanx.launch.meeting import Meeting  # only here: it imports torch

        with Meeting(error.claimed).agreed():
            raise
    except NoSuchRankError:
        raise
    except JobError as error:
        of_torchrun = env.get("LOCAL_RANK", "0") if "TORCHELASTIC_RUN_ID" in env else "0"
        if lowest_evidence(env) or of_torchrun != "0":
            raise ToldError(str(error), error.exit_code) from error
        raise
