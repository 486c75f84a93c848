"""Compiles DeepSpeed's shared-memory collectives and CPUAdam, so that no measured run of it waits for the compiler."""

from __future__ import annotations

import os

os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported

from deepspeed.accelerator import get_accelerator


def main() -> None:
    for builder in ("ShareMemCommBuilder", "CPUAdamBuilder"):
        get_accelerator().create_op_builder(builder).load(verbose=False)


if __name__ == "__main__":
    main()
