"""A node of its own process: `python node_program.py host|guest PORT DIRECTORY SCENARIO`, with one rank per node."""

from __future__ import annotations

import sys
from pathlib import Path

from phalanx.launch.local import launch_local
from phalanx.launch.nodes import Nodes, Terms
from phalanx.launch.verdict import Restarts


class Guest(Nodes):
    """Both nodes of a test have the host's address."""

    is_host = False


if __name__ == "__main__":
    role, port, directory, scenario = sys.argv[1:]
    kind = Nodes if role == "host" else Guest
    nodes = kind(
        ("127.0.0.1", int(port)), Terms(1, 2, 1, 60.0), 5.0, lambda n: (f"cluster.nodes={n}",), Path(directory)
    )
    sys.exit(
        launch_local(
            [scenario, directory],
            processes=1,
            log_dir=Path(directory, "logs"),
            threads=1,
            all_ranks=False,
            module="rank_program",
            restarts=Restarts(3),
            nodes=nodes,
        )
    )
