"""What the ranks of the launcher tests run: `python -m rank_program SCENARIO DIRECTORY …`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from phalanx.errors import DataError, StoppedError
from phalanx.launch.worker import main

RANK = int(os.environ["RANK"])


def ready(directory: Path, **facts: object) -> None:
    """Leaves rank_<r>.json, whole or not at all."""
    temporary = directory / f".{RANK}"
    temporary.write_text(json.dumps({"pid": os.getpid(), **facts}))
    temporary.rename(directory / f"rank_{RANK}.json")


def until_stopped(directory: Path) -> int:
    """Counts signals and stops half a second after the first, as a rank that writes a checkpoint does."""
    got: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: got.append(number))
    ready(directory, terminal=sys.stderr.isatty())
    while not got:
        time.sleep(0.01)
    time.sleep(0.5)
    ready(directory, signals=got)
    raise StoppedError("Stopped at step 7.")


def deaf(directory: Path) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    ready(directory)
    time.sleep(60)
    return 0


def say(directory: Path) -> int:
    print(f"out of {RANK}")
    print(f"err of {RANK}", file=sys.stderr)
    ready(directory, argv=sys.argv[1:], environment=dict(os.environ))
    return 0


def chatty(directory: Path) -> int:
    """Says more than a pipe holds."""
    for number in range(20_000):
        print(f"{number} of {RANK}")
    return 0


def late(directory: Path) -> int:
    """Rank 1 stops as planned; rank 0 needs a second more and must be left alone."""
    if RANK == 0:
        time.sleep(1)
        ready(directory)
    raise StoppedError("Stopped at step 7.")


def bug(directory: Path) -> int:
    if RANK == 1:
        raise ZeroDivisionError("a bug")
    time.sleep(60)
    return 0


def mistake(directory: Path) -> int:
    raise DataError("no shard x")


def killed(directory: Path) -> int:
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    return 0


def flaky(directory: Path) -> int:
    """In the first attempt rank 1 kills itself as soon as `go` is there; the second ends well."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        ready(directory)
        while RANK == 0 or not (directory / "go").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    ready(directory, modules=sorted(sys.modules), argv=sys.argv[1:], environment=dict(os.environ), parent=os.getppid())
    print(f"out of {RANK}")
    return 0


def until_go(directory: Path) -> int:
    """Says what it was started with, and ends well as soon as `go` is there."""
    names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "PHALANX_GENERATION", "PHALANX_STORE")
    ready(directory, words=sys.argv[3:], **{name: os.environ.get(name) for name in names})
    while not (directory / "go").exists():
        time.sleep(0.01)
    return 0


def abrupt(directory: Path) -> int:
    if RANK == 1:
        print("the last thing it said", file=sys.stderr)
        os._exit(3)
    time.sleep(60)
    return 0


def collective(directory: Path) -> int:
    """Meets the others, and stays until the file `go` is there; then rank 1 fails inside a collective."""
    import torch
    import torch.distributed as dist

    from phalanx.launch.process_group import process_group
    from phalanx.launch.ranks import detect

    ranks = detect(os.environ)
    assert ranks is not None
    with process_group(ranks, device=torch.device("cpu"), timeout_s=60):
        total = torch.ones(())
        dist.all_reduce(total)
        ready(directory, total=total.item())
        while not (directory / "go").exists():
            time.sleep(0.01)
        if RANK == 1:
            raise ZeroDivisionError("a bug")
        dist.all_reduce(total)
    return 0


def run(argv: list[str]) -> int:
    return globals()[argv[0]](Path(argv[1]))


if __name__ == "__main__":
    main(run)
