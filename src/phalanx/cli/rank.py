"""One rank of a local launch: `python -m phalanx.cli.rank ARGV...` is `phalanx ARGV...` in the launcher's frame."""

from __future__ import annotations

from phalanx.cli.main import run
from phalanx.launch.worker import main

if __name__ == "__main__":
    main(run)
