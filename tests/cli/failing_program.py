"""Ranks of `phalanx train` that fail: rank 1 is killed in step 7 of the first attempt, and raises in step 9 of the
second one, both once the last checkpoint is written. Run as `python -m failing_program train ...`."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from phalanx.cli.main import run
from phalanx.launch.worker import main


def failing(argv: list[str]) -> int:
    from phalanx.train.step import Stepper

    attempt, rank, real = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"], Stepper.compute

    def compute(self, inputs):
        if (attempt, rank, inputs.step) == ("0", "1", 6):
            await_checkpoint(4)
            os.kill(os.getpid(), signal.SIGKILL)
        if (attempt, rank, inputs.step) == ("1", "1", 8):
            await_checkpoint(8)
            raise ZeroDivisionError("a bug")
        return real(self, inputs)

    Stepper.compute = compute
    return run(argv)


def await_checkpoint(step: int) -> None:
    """Waits until a checkpoint, which is written beside the steps, is whole."""
    end = time.monotonic() + 20
    while time.monotonic() < end and not Path(f"runs/broken/checkpoints/step-{step:06d}/manifest.json").exists():
        time.sleep(0.01)


if __name__ == "__main__":
    main(failing)
