"""Checks of Python, the packages, torch, and of files that would be imported in their place."""

from __future__ import annotations

import importlib.metadata
import locale
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import phalanx
from phalanx.doctor.findings import CheckResult, DoctorCheck, error, ok, warn
from phalanx.doctor.machine import CheckedMachine
from phalanx.errors import ExtensionError
from phalanx.registry import installed, load_installed
from phalanx.units import counted

_HANGS = "the file system of the Python installation is slow or hangs: install on a local disk, or try again"
_MOST_NAMES = 10_000
Version = Callable[[str], str]


def checks(machine: CheckedMachine) -> list[DoctorCheck]:
    """Returns the checks of this group."""
    return [
        DoctorCheck("software", "python", lambda: python(machine, locale.getencoding())),
        DoctorCheck("software", "packages", lambda: packages(_requirements(), importlib.metadata.version), _HANGS),
        DoctorCheck("software", "extensions", extensions, _HANGS, 5.0),
        DoctorCheck("software", "torch", lambda: torch(machine), _HANGS, 5.0),
        DoctorCheck("software", "import path", lambda: import_path(machine, Path.cwd()), _HANGS),
    ]


def python(machine: CheckedMachine, encoding: str) -> Iterator[CheckResult]:
    """Yields the versions of Python and Phalanx, and the encoding of text."""
    text = f"Python {platform.python_version()} ({machine.python}), phalanx {phalanx.__version__}"
    if encoding.lower().replace("-", "") != "utf8":
        yield warn(f"{text}; text is encoded in {encoding}", "export LC_ALL=C.UTF-8, or PYTHONUTF8=1")
    elif sys.flags.optimize or machine.env.get("PYTHONOPTIMIZE"):
        yield warn(f"{text}; PYTHONOPTIMIZE removes assertions", "unset PYTHONOPTIMIZE")
    else:
        yield ok(text)


def _requirements() -> Sequence[str]:
    """Returns the requirements of Phalanx that no extra asks for."""
    return [each for each in importlib.metadata.requires("phalanx") or () if "extra ==" not in each]


def packages(requirements: Sequence[str], version: Version) -> Iterator[CheckResult]:
    """Yields which required packages are missing, too old or untried. torch has its own check."""
    found, problems = [], False
    for requirement in requirements:
        name = re.split(r"[<>=!~\[; ]", requirement, maxsplit=1)[0]
        if name == "torch":
            continue
        try:
            installed = version(name)
        except importlib.metadata.PackageNotFoundError:
            problems = True
            yield error(f"{name} is not installed", f"pip install '{requirement}'")
            continue
        found.append(f"{name} {installed}")
        if out_of_range(installed, requirement):
            problems = True
            yield error(f"{name} {installed} does not meet {requirement}", f"pip install '{requirement}'")
    if not problems:
        yield ok(", ".join(found))


def out_of_range(installed: str, requirement: str) -> str:
    """Returns the bound of a requirement such as "torch>=2.11,<2.14" that a version does not meet; empty if it meets
    all. Suffixes such as +cpu or rc1 are not compared."""
    mine = _numbers(installed)
    for sign, text in re.findall(r"(>=|<)\s*([0-9][0-9.]*)", requirement.partition(";")[0]):
        bound = _numbers(text)
        length = max(len(mine), len(bound))
        padded, limit = ((*each, *(0,) * (length - len(each))) for each in (mine, bound))
        if not (padded >= limit if sign == ">=" else padded < limit):
            return f"{sign}{text}"
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    begin = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return tuple(map(int, begin[0].split("."))) if begin else ()


def torch(machine: CheckedMachine) -> Iterator[CheckResult]:
    """Yields whether torch can be imported, its version is in range, and it can communicate."""
    required = next((each for each in _requirements() if re.match(r"torch\b", each)), "torch")
    try:
        importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        text = "torch is not installed: plan, predict and simulate work here (a login node), train and verify do not"
        yield warn(text, f"pip install '{required}' where you train")
        return
    facts = machine.torch.facts()
    if problem := facts.get("problem"):
        yield error(problem, f"pip install --force-reinstall '{required}', or load the modules it was built with")
        return
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else f"ROCm {facts['hip']}" if facts["hip"] else "CPU build"
    backends = [name for name in ("gloo", "nccl") if facts[name]]
    text = f"torch {facts['version']} ({build}), {' and '.join(backends) or 'no backend'}"
    if bound := out_of_range(facts["version"], required):
        finding = error if bound.startswith(">=") else warn
        yield finding(f"{text}; Phalanx is tested with {required}", f"pip install '{required}'")
    elif not facts["gloo"]:
        yield error(f"{text}; every run needs gloo", "install torch from pytorch.org, or build it with USE_GLOO=1")
    elif facts["devices"] and not facts["nccl"]:
        yield warn(f"{text}; GPUs communicate through gloo, which is slow", "install a torch that is built with NCCL")
    else:
        yield ok(text)


def extensions() -> Iterator[CheckResult]:
    """Yields the packages that extend Phalanx, and whether all of them can be loaded."""
    try:
        load_installed()
    except ExtensionError as problem:
        yield error("; ".join(problem.problems), "upgrade or uninstall the package")
        return
    yield ok(", ".join(map(str, installed())) or "no package extends Phalanx")


def import_path(machine: CheckedMachine, here: Path) -> Iterator[CheckResult]:
    """Yields files that Python would import in place of a library: in `here` (under torchrun, which imports from the
    current directory) and in the folders of PYTHONPATH; and folders of another Python."""
    libraries = {*sys.stdlib_module_names, "phalanx", "torch"}
    names = {re.split(r"[<>=]", each)[0].lower() for each in _requirements()}
    libraries |= {"yaml" if name == "pyyaml" else name for name in names}
    stated = [Path(each) for each in machine.env.get("PYTHONPATH", "").split(os.pathsep) if each]
    problems = False
    for folder in dict.fromkeys([here, *stated]):
        if shadows := _shadows(folder, libraries):
            problems = True
            where = "the current directory" if folder == here else f"{folder} (PYTHONPATH)"
            yield warn(f"{where} has {', '.join(shadows[:5])}: imported in place of the library", "rename it")
    if foreign := [str(each) for each in stated if _other_python(str(each))]:
        problems = True
        yield warn(
            f"PYTHONPATH has folders of another Python than {'.'.join(map(str, sys.version_info[:2]))}: {foreign[0]}",
            "unset PYTHONPATH, or load the modules of this Python",
        )
    if not problems:
        yield ok(f"{counted(len(stated), 'folder')} in PYTHONPATH" if stated else "nothing shadows a library")


def _shadows(folder: Path, libraries: set[str]) -> list[str]:
    found = []
    with suppress(OSError), os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            stem, _, suffix = entry.name.rpartition(".")
            if number >= _MOST_NAMES:
                break
            if suffix == "py" and stem in libraries:
                found.append(entry.name)
    return sorted(found)


def _other_python(folder: str) -> bool:
    version = re.search(r"python([0-9]+)\.([0-9]+)(?:/|$)", folder)
    return version is not None and (int(version[1]), int(version[2])) != tuple(sys.version_info[:2])
