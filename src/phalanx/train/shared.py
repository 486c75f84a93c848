"""Checks that all nodes of a run see the same run directory and the same data: a node may have a disk of its own."""

from __future__ import annotations

import os
import platform
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from phalanx.comm.agree import gather_json, on_rank_zero
from phalanx.data.index import INDEX
from phalanx.errors import RunError
from phalanx.launch.ranks import Ranks
from phalanx.train.run_directory import RunDirectory

VISIBLE_S = 10.0
"""Seconds after which a file that another node has written must be visible: NFS caches directories."""
_SHOWN = 4


def require_shared(directory: RunDirectory, shards: Path, ranks: Ranks) -> None:
    """Raises RunError on every rank, naming ranks and hosts, if a rank does not see the run directory or the token
    shards that rank 0 sees. Ranks of one node are not asked. A collective; the path `shards` is rank 0's."""
    if ranks.one_node:
        return
    token = directory.path / on_rank_zero(lambda: write_token(directory))
    paths = {"run.dir": token, "data.dir": shards / INDEX}
    deadline = time.monotonic() + VISIBLE_S
    hidden = {field: str(path.parent.absolute()) for field, path in paths.items() if not sees(path, deadline)}
    answers = gather_json({"host": platform.node(), "hidden": hidden})
    if ranks.rank == 0:
        token.unlink(missing_ok=True)
    problems = [problem for field in paths if (problem := _problem(field, answers))]
    if problems:
        raise RunError("\n".join(problems))


def write_token(directory: RunDirectory) -> str:
    """Creates an empty file in the directory, and returns its name. Raises RunError if that fails."""
    name = f".seen-{secrets.token_hex(8)}"
    with directory.writing():
        directory.path.mkdir(parents=True, exist_ok=True)
        os.close(os.open(directory.path / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
    return name


def sees(path: Path, deadline: float) -> bool:
    """Returns whether a file that another node has written is seen before `deadline`, by time.monotonic()."""
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        with suppress(OSError):
            os.listdir(path.parent.parent)  # makes an NFS client ask its server again
            os.listdir(path.parent)
        time.sleep(0.1)
    return True


def _problem(field: str, answers: list[Mapping[str, Mapping[str, str]]]) -> str:
    blind = [
        f"rank {rank} on {answer['host']} does not see {answer['hidden'][field]}"
        for rank, answer in enumerate(answers)
        if field in answer["hidden"]
    ]
    if not blind:
        return ""
    more = f", and {len(blind) - _SHOWN} more ranks" if len(blind) > _SHOWN else ""
    remedy = " (or prepare the data on every node)" if field == "data.dir" else ""
    return (
        f"{field} is not shared: {'; '.join(blind[:_SHOWN])}{more}, as rank 0 on {answers[0]['host']} does; set it to "
        f"a folder on a filesystem that every node mounts{remedy}"
    )
