"""Gives the ranks that torchrun, srun or mpiexec started their heartbeats, and each node a watchdog process."""

from __future__ import annotations

import json
import os
import platform
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from phalanx.errors import RunError
from phalanx.launch.ranks import Ranks
from phalanx.launch.watchdog import heartbeat
from phalanx.launch.watchdog.diagnosis import Limits
from phalanx.launch.watchdog.folder import new_folder
from phalanx.launch.watchdog.node import HOSTS


def join(ranks: Ranks, hosts: Sequence[str], token: str, limits: Limits, reports: Path, metrics: Path | None) -> None:
    """Starts this rank's heartbeat; the first rank that comes on a node also starts the node's watchdog.

    All ranks call it, in their process group.

    Args:
        ranks: this rank's place.
        hosts: the host of every rank.
        token: of this attempt, the same on all ranks: the store may still know those of older attempts.
        limits: when a silent rank hangs.
        reports: the folder for the watchdog's reports.
        metrics: metrics.jsonl, to which rank 0's node appends slow ranks; None for no file.

    Raises:
        RunError: the folder of the node's heartbeats is not private to this user.
    """
    store = dist.distributed_c10d._get_default_store()
    key = f"phalanx/watchdog/{token}/{platform.node()}/{_boot_id()}"
    leads = store.add(f"{key}/ranks", 1) == 1
    if leads:
        directory = new_folder()
        store.set(f"{key}/folder", str(directory))
    else:
        directory = Path(store.get(f"{key}/folder").decode())
        _require_private(directory)
    heartbeat.start(directory, ranks.rank, ranks.world)
    if leads:
        (directory / HOSTS).write_text(json.dumps(list(hosts)), encoding="utf-8")
        first_node = hosts[0] == platform.node()
        command = [sys.executable, "-P", "-m", "phalanx.launch.watchdog.node", str(directory), str(reports)]
        command += [str(limits.hang_s), str(limits.start_s), str(metrics) if metrics and first_node else ""]
        command += ["follows"] if limits.follows else []
        # Its own session: what ends this rank's process group does not end it. It ends after the node's ranks.
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


def _require_private(directory: Path) -> None:
    """Raises RunError unless only this user can write to a folder that came over the network."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise RunError(f"{directory}, where the ranks of this node should write their heartbeats, is not private")
