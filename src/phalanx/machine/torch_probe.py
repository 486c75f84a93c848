"""`python -m phalanx.machine.torch_probe THREADS RANKS`: prints one line of JSON with what torch says about itself and
the GPUs. A program of its own, so that an import that hangs or crashes does not take `phalanx doctor` with it."""

from __future__ import annotations

import json
import sys
from typing import Any

from phalanx.echo import echo


def main(threads: int, local_ranks: int) -> dict[str, Any]:
    """Returns torch's facts; "facts" are those that all ranks of a run must share (train/agreement.py)."""
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:  # a broken installation raises anything: OSError for a library, AttributeError, ...
        return {"problem": f"torch cannot be imported: {type(error).__name__}: {str(error).splitlines()[0]}"}
    from phalanx.launch.ranks import threads_for
    from phalanx.train.agreement import program_facts
    from phalanx.train.device import memory_limit, reported

    torch.set_num_threads(threads_for(threads, local_ranks))
    from phalanx.launch.accelerators import accelerators

    kind, count = accelerators("auto")
    here = [torch.device(kind, number) for number in range(count)]
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "xpu": torch.version.xpu,
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
        "xccl": dist.is_available() and dist.is_xccl_available(),
        "available": bool(count),
        "kind": kind,
        "devices": [reported(device)[0] for device in here],
        "memory": [memory_limit(device, 1) for device in here],
        "facts": program_facts(here[0] if here else torch.device("cpu")),
    }


if __name__ == "__main__":
    echo(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]))))
