"""The structure that the design prescribes: imports go downwards only, and what plans never imports torch."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import phalanx
from shared_run import LONG

ROOT = Path(phalanx.__file__).parent
FLOORS = [
    *("cli", "serve", "machine", "evaluate", "dryrun", "generate", "verify", "train", "exchange"),
    *("checkpoint", "parallel", "graph", "comm", "launch", "model", "report", "trackers", "data"),
    *("pictures", "validation", "plan", "simulate", "cost", "foreign", "check", "axes", "techniques", "partition"),
    *("optimizers", "blocks", "schedule", "config"),
]
"""Rooms from the top down: a room may import those after it, and itself."""
WITHOUT_TORCH = [*FLOORS[FLOORS.index("report") :]]
"""Rooms that never import torch: these verbs answer in well under a second."""
GROUND = {"bounded", "echo", "errors", "facts", "gc", "hashed", "nearest", "notebook", "registry", "safe_path", "units"}
"""Modules that every room may import."""
DOOR = "extend"
"""The module through which packages add entries: it imports rooms, and only `cli` imports it."""
INNER_FLOORS = {
    "plan": ["planner", "page", "notes", "alternatives", "refine", "branch", "bounds", "tables", "space", "plan"],
}
"""Rooms whose files have an order of their own."""
MOST_LINES = {
    "axes": 812,
    "blocks": 3533,
    "check": 2257,
    "checkpoint": 4192,
    "cli": 7791,
    "comm": 2139,
    "config": 6781,
    "cost": 7865,
    "data": 7189,
    "dryrun": 2719,
    "evaluate": 690,
    "exchange": 2685,
    "foreign": 4728,
    "generate": 1719,
    "graph": 2140,
    "launch": 8325,
    "machine": 5362,
    "model": 3982,
    "optimizers": 550,
    "parallel": 8245,
    "partition": 1817,
    "pictures": 3658,
    "plan": 4593,
    "report": 1682,
    "schedule": 2100,
    "serve": 839,
    "simulate": 1248,
    "techniques": 1601,
    "trackers": 848,
    "train": 9902,
    "validation": 1555,
    "": 1868,
    "verify": 4098,
}
"""Lines that a room may have, "" being the modules beside the rooms: whoever makes one shorter lowers its figure, and
whoever needs more finds first what stands twice."""


@cache
def parsed(path: Path) -> tuple[frozenset[str], tuple[str, ...]]:
    """Returns every module that a file imports, at its top or inside functions, and the names of its classes."""
    names, classes = set[str](), list[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ClassDef):
            classes.append(node.name)
    return frozenset(names), tuple(classes)


def imported(path: Path) -> frozenset[str]:
    return parsed(path)[0]


def modules() -> dict[str, Path]:
    """Returns every module of the project by its dotted name."""
    return {
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in ROOT.rglob("*.py")
    }


def test_every_room_has_its_floor():
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == set(FLOORS)


@pytest.mark.parametrize("room", FLOORS)
def test_imports_go_downwards_only(room):
    below = {room, *FLOORS[FLOORS.index(room) + 1 :], *GROUND, *([DOOR] if room == "cli" else [])}
    for path in (ROOT / room).rglob("*.py"):
        used = {name.split(".")[1] for name in imported(path) if name.startswith("phalanx.")}
        assert used <= below, f"{path.relative_to(ROOT)} imports {used - below}"


@pytest.mark.parametrize("room", INNER_FLOORS)
def test_imports_inside_a_room_go_downwards_only(room):
    floors = INNER_FLOORS[room]
    for name, path in modules().items():
        parts = name.split(".")
        if len(parts) < 3 or parts[1] != room or parts[2] not in floors:
            continue
        above = floors[: floors.index(parts[2])]
        used = {other.split(".")[2] for other in imported(path) if other.startswith(f"phalanx.{room}.")}
        assert not used & set(above), f"{name} imports {used & set(above)}"


def test_the_functions_for_programs_import_no_verb_and_nothing_until_they_are_called():
    tree = ast.parse((ROOT / "api.py").read_text(encoding="utf-8"))
    at_once = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert {name for name in at_once if name and name.startswith("phalanx")} == {"phalanx.errors"}
    assert not [name for name in imported(ROOT / "api.py") if name.startswith("phalanx.cli")]


def test_no_modules_import_each_other_in_a_circle():
    """An import inside a function counts, too."""
    known = modules()
    uses = {name: imported(path) & set(known) - {name} for name, path in known.items()}
    while leaves := {name for name, others in uses.items() if not others & set(uses)}:
        uses = {name: others for name, others in uses.items() if name not in leaves}
    assert not uses, f"these import each other: {sorted(uses)}"


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_what_plans_never_imports_torch(room):
    for path in (ROOT / room).rglob("*.py"):
        assert not {"torch", "safetensors.torch"} & {name.split(".")[0] for name in imported(path)}, path


def test_what_starts_ranks_needs_no_torch():
    program = "import sys, phalanx.launch.local; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


TRAINS = """
import sys
from phalanx.cli.main import main
from phalanx.launch import local
words = "model.n_layers=1 model.d_model=8 model.n_heads=1 model.seq_len=8 data.corpus=random".split()
words += "data.random_tokens=2000 train.global_batch=2 train.steps=1 train.eval_samples=0 run.sample_tokens=0".split()
words += ["cluster.peak_tflops=1"]
preloaded = []
local.launch_local = lambda *_, restarts, **__: preloaded.extend(restarts.preload) or 0
assert main(["train", *words, "layout.dp_replicate=2", "run.name=two", "--oversubscribe"]) == 0
assert "torch" not in sys.modules, "the launcher imports torch"
assert main(["train", *words]) == 0
late = {"torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "sympy"}
assert not late & {*sys.modules, *preloaded}, late & {*sys.modules, *preloaded}
"""


def test_a_run_imports_what_it_uses(tmp_path):
    command = [sys.executable, "-c", TRAINS]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_door_for_packages_imports_only_rooms_without_torch():
    used = {name.split(".")[1] for name in imported(ROOT / f"{DOOR}.py") if name.startswith("phalanx.")}
    assert used <= {*WITHOUT_TORCH, *GROUND}


def test_no_class_name_stands_for_two_things():
    places: dict[str, list[str]] = {}
    for name, path in modules().items():
        for each in parsed(path)[1]:
            places.setdefault(each, []).append(name)
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_files_are_short():
    long = {path.name: count for path in ROOT.rglob("*.py") if (count := len(path.read_text().splitlines())) > 800}
    assert not long


@pytest.mark.parametrize("room", MOST_LINES)
def test_a_room_keeps_within_its_lines(room):
    paths = (ROOT / room).rglob("*.py") if room else ROOT.glob("*.py")
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths) <= MOST_LINES[room]


def test_files_of_tests_that_begin_first_are_there():
    assert not [name for name in LONG if not (Path(__file__).parent / name).exists()]


def test_every_room_has_a_most_of_lines():
    assert set(MOST_LINES) - {""} == set(FLOORS)
