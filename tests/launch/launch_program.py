"""A launcher of its own process: `python launch_program.py PROCESSES LOG_DIR ARGV…`."""

from __future__ import annotations

import sys
from pathlib import Path

from phalanx.launch.local import launch_local

if __name__ == "__main__":
    processes, log_dir, *argv = sys.argv[1:]
    sys.exit(
        launch_local(
            argv,
            processes=int(processes),
            log_dir=Path(log_dir),
            threads=1,
            all_ranks=False,
            module="rank_program",
        )
    )
