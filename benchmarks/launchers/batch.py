"""Submits a job, waits for its end, shows its output, and ends with its exit code. Run by its path: it imports nothing
of this project.

    python batch.py slurm|pbs phalanx launch job.yaml --submit slurm …
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")


def main(argv: list[str]) -> int:
    scheduler, *command = argv
    end = command.index("--") if "--" in command else len(command)
    done = subprocess.run([*command[:end], "--json", *command[end:]], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return done.returncode
    told = json.loads(done.stdout)
    job, directory = told["job"], Path(told["file"]).parent
    code = wait_slurm(job) if scheduler == "slurm" else wait_pbs(job)
    for output in sorted(directory.glob("slurm-*.out" if scheduler == "slurm" else "*.OU")):
        print(output.read_text(encoding="utf-8", errors="replace"), end="")
    return code


def wait_slurm(job: str) -> int:
    """Returns the exit code of a job of Slurm: 128 + n by signal n, 1 if it ended without one."""
    while True:
        shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True, check=False).stdout
        state, code = re.search(r"JobState=(\w+)", shown), re.search(r"ExitCode=(\d+):(\d+)", shown)
        if state and code and state[1] in ENDED:
            restarts = re.search(r"Restarts=(\d+)", shown)
            print(f"{state[1]}, restarts {restarts[1] if restarts else 0}")
            by_signal = 128 + int(code[2]) if int(code[2]) else int(code[1])
            return by_signal or int(state[1] != "COMPLETED")
        time.sleep(0.2)


def wait_pbs(job: str) -> int:
    """Returns the exit code of a job of the stand-in for qsub, which writes it beside itself."""
    qsub = shutil.which("qsub")
    assert qsub, "it has just submitted the job"
    file = Path(qsub).parent / f"{job}.code"
    while not (file.exists() and (text := file.read_text().strip())):
        time.sleep(0.2)
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
