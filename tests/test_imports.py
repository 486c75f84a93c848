"""The structure that the design holds: imports go downwards only, and what plans never imports torch."""

import ast
from pathlib import Path

import pytest

import phalanx

ROOT = Path(phalanx.__file__).parent
FLOORS = [
    *("cli", "bench", "generate", "verify", "train", "parallel", "comm", "launch", "model", "data", "published"),
    *("plan", "simulate", "cost"),
    *("job", "schedule"),
]
"""Packages from the top down: a package may import those after it, and itself."""
WITHOUT_TORCH = ["job", "schedule", "cost", "simulate", "plan", "published", "data"]


def imported(path: Path) -> set[str]:
    """Every module that a file imports, at its top or inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_package_has_its_floor():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages == set(FLOORS)


@pytest.mark.parametrize("package", FLOORS)
def test_imports_go_downwards_only(package):
    ground = {"errors", "garbage", "hashed", "nearest", "pictures", "units"}
    below = {package, *FLOORS[FLOORS.index(package) + 1 :], *ground}
    for path in (ROOT / package).rglob("*.py"):
        used = {name.split(".")[1] for name in imported(path) if name.startswith("phalanx.")}
        assert used <= below, f"{path.name} imports {used - below}"


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_what_plans_never_imports_torch(package):
    for path in (ROOT / package).rglob("*.py"):
        assert not {"torch", "safetensors.torch"} & {name.split(".")[0] for name in imported(path)}, path


def test_files_are_short():
    long = {path.name: count for path in ROOT.rglob("*.py") if (count := len(path.read_text().splitlines())) > 400}
    assert not long
