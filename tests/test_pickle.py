"""Nothing that arrives from a peer or a file is unpickled: unpickling executes what the sender wrote."""

import ast
from pathlib import Path

import phalanx

ROOT = Path(phalanx.__file__).parent
UNPICKLING_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
UNPICKLING_CALLS = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "all_gather_object_enforce_type"),
}
"""torch's collectives of objects."""
UNPICKLING_LOADS = {"torch.load", "torch.save", "np.load", "numpy.load"}
ALLOWED = {
    "checkpoint/dcp.py": "an unpickler that calls nothing and knows only DCP's names, and torch.load(weights_only=True)"
    " of the tensors, with --trust only",
    "train/profile/window.py": "writes the CUDA allocator's history for another program, and reads no pickle",
    "launch/pool.py": "functions and results go through pipes between a process and its own forks",
}
"""Files that may unpickle, and why that is safe."""


def unpickles(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] in UNPICKLING_MODULES}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} if (node.module or "").split(".")[0] in UNPICKLING_MODULES else set()
            found |= {alias.name for alias in node.names if alias.name in UNPICKLING_CALLS}
        elif isinstance(node, ast.Attribute):
            found |= {node.attr} & UNPICKLING_CALLS
            found |= {ast.unparse(node)} & UNPICKLING_LOADS if node.attr in ("load", "save") else set()
    return found


def test_no_file_of_the_program_unpickles():
    found = {str(path.relative_to(ROOT)): names for path in ROOT.rglob("*.py") if (names := unpickles(path))}
    assert set(found) == set(ALLOWED), found
