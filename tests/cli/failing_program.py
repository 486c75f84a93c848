"""Ranks of `phalanx train` that fail: rank 1 is killed in step 7 of the first attempt, and raises in step 9 of the
second one. Run as `python -m failing_program train ...`."""

from __future__ import annotations

import os
import signal

from phalanx.cli.main import run
from phalanx.launch.worker import main


def failing(argv: list[str]) -> int:
    from phalanx.train.step import Stepper

    attempt, rank, real = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"], Stepper.compute

    def compute(self, micro_batches, number, *rest):
        if (attempt, rank, number) == ("0", "1", 6):
            os.kill(os.getpid(), signal.SIGKILL)
        if (attempt, rank, number) == ("1", "1", 8):
            raise ZeroDivisionError("a bug")
        return real(self, micro_batches, number, *rest)

    Stepper.compute = compute
    return run(argv)


if __name__ == "__main__":
    main(failing)
