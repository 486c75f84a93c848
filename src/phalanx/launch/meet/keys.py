"""Names of what the ranks of a launch put into their store."""

from __future__ import annotations

import os


def key(*names: object) -> str:
    """Returns a key of the store."""
    # Attempts share only an agent's store. Elsewhere the count is no help: it differs between agents.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "") if agent_listens() else ""
    return "/".join(["phalanx", attempt, *map(str, names)])


def agent_listens() -> bool:
    """Returns whether torchrun's agent holds the store at MASTER_ADDR, which then outlives an attempt of its ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
