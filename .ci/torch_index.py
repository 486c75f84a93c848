"""Prints pip's option for torch's CPU build, where this machine has no GPU and the index of that build answers.

    python .ci/torch_index.py PYTHON        PYTHON: the interpreter whose pip installs

The build is a few hundred MB, where that of the package index has several GB of CUDA. Nothing is printed, and pip does
what it always does, if the machine has a GPU, if an index is configured already, or if this one does not answer within
seconds (offline).
"""

import glob
import os
import shutil
import subprocess
import sys

INDEX = "https://download.pytorch.org/whl/cpu"
SECONDS = 4
"""Most seconds to wait for the index, with the resolution of its name."""
PROBE = f"""
import urllib.request
urllib.request.urlopen(urllib.request.Request("{INDEX}/torch/", method="HEAD"), timeout={SECONDS - 1})
"""


def has_gpu() -> bool:
    """Returns whether there is a device of NVIDIA or AMD, or a driver's program."""
    return bool(glob.glob("/dev/nvidia*") or glob.glob("/dev/kfd") or shutil.which("nvidia-smi"))


def has_own_index(python: str) -> bool:
    """Returns whether pip's files or variables name an index, or none."""
    if any(name in os.environ for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX", "PIP_FIND_LINKS")):
        return True
    listed = subprocess.run([python, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    return any(word in listed.stdout for word in ("index-url", "no-index", "find-links"))


def answers() -> bool:
    """Returns whether the index answers in time. The question is asked in a process of its own, since resolving a name
    takes as long as it likes."""
    try:
        done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


if __name__ == "__main__" and not has_gpu() and not has_own_index(sys.argv[1]) and answers():
    print(f"--extra-index-url {INDEX}")
