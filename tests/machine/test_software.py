"""Python, packages, torch, and files in the way."""

import importlib.metadata
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machine.machines import machine, only, program, statuses, with_torch
from phalanx.errors import ExtensionError
from phalanx.machine import system
from phalanx.machine.checks import CheckedMachine
from phalanx.registry import Package

NEEDS = ["torch<2.14,>=2.11", "numpy>=1.26", "PyYAML>=6.0.1", "rich>=13.9"]


def test_python_and_its_encoding():
    assert sys.executable in only(system.python(machine(), "UTF-8"), "OK").text
    assert "C.UTF-8" in only(system.python(machine(), "ISO-8859-1"), "WARN").remedy
    assert "assertions" in only(system.python(machine(env={"PYTHONOPTIMIZE": "1"}), "utf-8"), "WARN").text


def test_packages_that_are_there():
    assert "numpy" in only(system.packages(machine()), "OK").text


def test_packages_that_extend_phalanx(monkeypatch):
    monkeypatch.setattr(system, "installed", dict)
    assert only(system.extensions(machine()), "OK").text == "no package extends Phalanx"
    monkeypatch.setattr(system, "installed", lambda: {Package("lab", "2.0"): ["lab"]})
    assert only(system.extensions(machine()), "OK").text == "lab 2.0"

    def fail() -> None:
        raise ExtensionError("package lab 2.0: cluster 'lab': source must not be empty")

    monkeypatch.setattr(system, "load_installed", fail)
    assert "source must not be empty" in only(system.extensions(machine()), "ERROR").text


@pytest.mark.parametrize(("name", "found"), [("rich", "12.0"), ("PyYAML", None)])
def test_packages_that_are_missing_or_old(name, found):
    def version(asked):
        if asked == name and found is None:
            raise importlib.metadata.PackageNotFoundError(asked)
        return found if asked == name else "99.0"

    line = only(system.packages(machine(), NEEDS, version), "ERROR")
    assert line.text.startswith(name)
    assert line.remedy.startswith(f"pip install '{name}>=")


@pytest.mark.parametrize(
    ("installed", "bound"),
    [("2.13.0+cpu", ""), ("2.11", ""), ("2.11.0", ""), ("2.10.1", ">=2.11"), ("2.14", "<2.14"), ("3", "<2.14")],
)
def test_versions_in_a_range(installed, bound):
    assert system.out_of_range(installed, "torch<2.14,>=2.11; python_version > '3'") == bound


@given(st.lists(st.integers(0, 30), min_size=1, max_size=3), st.lists(st.integers(0, 30), min_size=1, max_size=3))
def test_versions_are_ordered_as_numbers(mine, least):
    padded = [each + [0] * (3 - len(each)) for each in (mine, least)]
    installed, bound = (".".join(map(str, each)) for each in (mine, least))
    assert (system.out_of_range(installed, f"x>={bound}") == "") == (padded[0] >= padded[1])


def test_torch():
    assert only(system.torch(with_torch(machine())), "OK").text == "torch 2.13.0 (CPU build), gloo"


@pytest.mark.parametrize(
    ("facts", "status", "text"),
    [
        ({"version": "2.1.0"}, "ERROR", "torch 2.1.0"),
        ({"version": "9.0.0"}, "WARN", "tested with"),
        ({"gloo": False}, "ERROR", "every run needs gloo"),
        ({"devices": ["A100"], "cuda": "12.4"}, "WARN", "through gloo, which is slow"),
        ({"problem": "importing torch takes more than 40 s"}, "ERROR", "takes more than 40 s"),
    ],
)
def test_torch_that_does_not_serve(facts, status, text):
    assert text in only(system.torch(with_torch(machine(), **facts)), status).text


def test_a_login_node_without_torch(monkeypatch):
    known = importlib.metadata.version

    def version(name):
        if name == "torch":
            raise importlib.metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert "torch is not installed" in only(system.torch(machine()), "WARN").text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("import time; time.sleep(60)", "takes more than 0.8 s"),
        ("import os; os.abort()", "ended with signal 6: no message"),
        ("raise SystemExit('libtorch.so is broken')", "ended with exit code 1: libtorch.so is broken"),
        ("print('[1]')", "something else"),
    ],
)
def test_an_import_that_hangs_or_crashes(tmp_path, text, problem):
    program(tmp_path / "bin", "python", text)
    found = CheckedMachine(python=str(tmp_path / "bin" / "python"), seconds=0.2)
    assert problem in only(system.torch(found), "ERROR").text


def test_files_that_hide_libraries(tmp_path):
    here, stated = tmp_path / "here", tmp_path / "stated"
    for folder in (here, stated):
        folder.mkdir()
        (folder / "helper.py").touch()
    found = machine(env={"PYTHONPATH": f"{stated}:{tmp_path / 'gone'}"})
    assert only(system.import_path(found, here), "OK")
    (here / "torch.py").touch()
    (stated / "queue.py").touch()
    (stated / "yaml.py").touch()
    lines = list(system.import_path(found, here))
    assert statuses(lines) == "WARN WARN"
    assert "the current directory has torch.py" in lines[0].text
    assert f"{stated} (PYTHONPATH) has queue.py, yaml.py" in lines[1].text


def test_folders_of_another_python(tmp_path):
    found = machine(env={"PYTHONPATH": "/opt/lib/python2.7/site-packages"})
    assert "python2.7" in only(system.import_path(found, tmp_path), "WARN").text
    own = f"/opt/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    assert only(system.import_path(machine(env={"PYTHONPATH": own}), tmp_path), "OK")
