"""The environment variables between the local launcher and its ranks."""

from __future__ import annotations

from collections.abc import Mapping

LAUNCHER_PID = "PHALANX_LAUNCHER_PID"
"""Process id that the rank's parent must have."""
LOG_DIR = "PHALANX_LOG_DIR"
"""Directory of the rank's logs and of its outcome.json."""
STORE = "PHALANX_STORE"
"""File through which the ranks of one attempt find each other."""
HEARTBEATS = "PHALANX_HEARTBEATS"
"""Folder of the heartbeat files of one attempt (launch/watchdog)."""
GENERATION = "PHALANX_GENERATION"
"""Generation of the run directory that the attempt has claimed (launch/generation.py)."""
RESTARTED = "PHALANX_RESTARTED"
"""JSON about the failure after which the attempt was started: {"attempt": 1, "reason": ..., "time": seconds since the
epoch at which it was noticed}."""

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Keeps all sockets of single-machine ranks on the loopback interface, overriding the user's multi-node settings."""


def thread_environment(threads: int, env: Mapping[str, str]) -> dict[str, str]:
    """Returns OpenMP's and MKL's thread variables for one rank; a user's own setting in `env` wins."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    return {name: env.get(name, env.get("OMP_NUM_THREADS", str(threads))) for name in names}
