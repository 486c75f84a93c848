"""A rank of any program: `python -m phalanx.launch.program PROGRAM WORDS…` becomes the program, with the variables that
torchrun gives its ranks, and dies with the launcher."""

from __future__ import annotations

import os
import sys

from phalanx.echo import echo
from phalanx.launch.lifeline import die_with_parent, take_interrupts
from phalanx.launch.ranks import GENERATION, HEARTBEATS, LAUNCHER_PID, LOG_DIR, RESTARTED, STORE

PORT = "PHALANX_PROGRAM_PORT"
"""The port where the ranks of one node meet."""


def main(argv: list[str]) -> int:
    env = dict(os.environ)
    die_with_parent(int(env[LAUNCHER_PID]))
    take_interrupts()
    if env["MASTER_PORT"] == "0":
        env["MASTER_PORT"] = env[PORT]
    for name in (LAUNCHER_PID, STORE, HEARTBEATS, GENERATION, RESTARTED, LOG_DIR, PORT):
        env.pop(name, None)  # a Phalanx verb among the programs takes itself for torchrun's
    try:
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        echo(f"{argv[0]} cannot be started: {error.strerror}", file=sys.stderr)
    return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
