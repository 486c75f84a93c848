"""The environment variables between the local launcher and its ranks."""

from __future__ import annotations

from collections.abc import Mapping

LAUNCHER_PID = "PHALANX_LAUNCHER_PID"
"""The process that has to be the rank's parent."""
LOG_DIR = "PHALANX_LOG_DIR"
"""Directory of the rank's logs and of its outcome.json."""
STORE = "PHALANX_STORE"
"""File through which the ranks of one attempt find each other."""

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Keeps every socket of ranks on one machine on that machine, whatever the user's settings for many machines say."""


def thread_environment(threads: int, env: Mapping[str, str]) -> dict[str, str]:
    """OpenMP's and MKL's threads for one rank; a user's own setting in `env` stays."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    return {name: env.get(name, env.get("OMP_NUM_THREADS", str(threads))) for name in names}
