"""The run itself: its name and directory, its processes and what it prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RunOptions:
    """The run's name, place and processes."""

    name: str = ""
    """Name of the run; empty means the job file's name. Its directory is dir/name."""
    dir: str = "runs"
    """Parent folder of run directories."""
    threads: int = 0
    """CPU threads of each process; 0 divides the cores among the processes of a node."""
    timeout_s: float = 600.0
    """Timeout of a collective in seconds, after which the run fails."""
    log_level: Literal["debug", "info", "warning"] = "info"
    """Log level of rank 0 on the terminal; other ranks write to their own log files."""
    all_ranks: bool = False
    """Show the log lines of every rank, prefixed with the rank."""
    sample_tokens: int = 200
    """Tokens of text to generate when training ends; 0 generates none."""
    sample_prompt: str = "\n"
    """Beginning of that text."""
