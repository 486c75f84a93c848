"""Tables, the packages that add to them, and what is left of a package that fails."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from extend.install import environment, install
from phalanx import registry
from phalanx.errors import DataError, ExtensionError
from phalanx.facts import Lazy, stated
from phalanx.registry import Registry, View, blamed, noting_package, package_code


@stated
@dataclass(frozen=True)
class Thing:
    size: int
    code: Lazy = len


TABLE = Registry("thing", {"own": Thing(1)}, lambda name, thing: ["size 13 is refused"] if thing.size == 13 else [])
"""The table that the packages of these tests add to."""
HEAD = "from test_registry import TABLE, Thing\n"
Loader = Callable[..., None]


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loader]:
    """Returns a function that installs a package whose `register` is the given text. All are gone afterwards."""
    loading = registry._Loading()
    monkeypatch.setattr(registry, "_loading", loading)

    def add(module: str, body: str, version: str = "1.0") -> None:
        text = f"{HEAD}\ndef register():\n    {body}\n"
        monkeypatch.syspath_prepend(str(install(tmp_path / module, module, version=version, text=text)))

    monkeypatch.setitem(sys.modules, "test_registry", sys.modules[__name__])
    yield add
    for name in list(TABLE._packages):
        TABLE.remove(name)
    for name in loading.modules:
        sys.modules.pop(name, None)


def test_names_that_are_there_load_nothing(packages: Loader):
    packages("reg_never", "raise SystemExit('loaded')")
    assert TABLE["own"] == Thing(1)
    assert "own" in TABLE
    assert not registry._loading.begun


def test_an_entry_of_a_package_is_found_and_knows_where_it_is_from(packages: Loader):
    packages("reg_one", "TABLE.add('one', Thing(2))", version="2.5")
    assert TABLE["one"].size == 2
    assert list(TABLE) == ["own", "one"]
    assert len(TABLE) == 2
    assert TABLE.package("one") == "phalanx-reg-one 2.5"
    assert TABLE.package("own") == "phalanx"
    TABLE.add("here", Thing(3))
    assert TABLE.package("here") == ""
    assert {str(package): tops for package, tops in registry.installed().items()} == {
        "phalanx-reg-one 2.5": ["reg_one"]
    }


def test_packages_are_loaded_in_the_order_of_their_names(packages: Loader):
    packages("reg_b", "TABLE.add('b', Thing(2))")
    packages("reg_a", "TABLE.add('a', Thing(2))")
    assert list(TABLE) == ["own", "a", "b"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("1 / 0", "its entry point reg_bad = reg_bad:register failed: ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "its entry point reg_bad = reg_bad:register failed: SystemExit: 3"),
        ("import nothing_there", "failed: ModuleNotFoundError: No module named 'nothing_there'"),
        ("TABLE.add('two', Thing())", "Thing states too little; missing: size"),
        ("TABLE.add('own', Thing(13))", "thing 'own': the name is taken by package phalanx"),
        ("TABLE.add('own', Thing(13))", "thing 'own': size 13 is refused"),
        ("TABLE.add('two', 5)", "thing 'two': the entry must be of type Thing, is of type int"),
        ("TABLE.add('A,b', Thing('x'))", "thing 'A,b': a name is lower-case letters"),
        ("TABLE.add('A,b', Thing('x'))", "thing 'A,b': size must be a whole number, is 'x'"),
    ],
)
def test_a_package_that_fails_leaves_nothing_behind_and_the_same_error(packages: Loader, body: str, message: str):
    packages("reg_able", "TABLE.add('able', Thing(2))")
    packages("reg_bad", f"TABLE.add('half', Thing(2)); {body}")
    for _ in range(2):
        with pytest.raises(ExtensionError) as caught:
            list(TABLE)
        assert any(message in problem for problem in caught.value.problems), caught.value.problems
        assert all(problem.startswith("package phalanx-reg-bad 1.0: ") for problem in caught.value.problems)
        with pytest.raises(ExtensionError):
            TABLE.get("half")
    assert set(TABLE._entries) == {"own"}
    assert TABLE["own"] == Thing(1)


def test_the_module_of_an_entry_point_may_be_missing_or_hold_no_function(packages: Loader, tmp_path: Path):
    packages("reg_word", "pass")
    (tmp_path / "reg_word" / "reg_word.py").write_text("register = 'text'\n")
    with pytest.raises(ExtensionError, match="its entry point reg_word = reg_word:register is no function"):
        list(TABLE)


def test_metadata_without_a_name_are_no_reason_to_fail(packages: Loader, tmp_path: Path):
    packages("reg_nameless", "TABLE.add('one', Thing(2))")
    next((tmp_path / "reg_nameless").glob("*.dist-info/METADATA")).unlink()
    assert TABLE["one"].size == 2
    assert TABLE.package("one") in ("?", "None None")


def test_two_packages_that_claim_one_name_are_refused(packages: Loader):
    packages("reg_first", "TABLE.add('same', Thing(1))")
    packages("reg_second", "TABLE.add('same', Thing(2))", version="3")
    with pytest.raises(ExtensionError) as caught:
        list(TABLE)
    assert caught.value.problems == [
        "package phalanx-reg-second 3: thing 'same': the name is taken by package phalanx-reg-first 1.0"
    ]


def test_an_interrupted_load_begins_again(packages: Loader, monkeypatch: pytest.MonkeyPatch):
    packages("reg_able", "TABLE.add('able', Thing(2))")
    packages("reg_slow", "import os\n    if 'AGAIN' not in os.environ: raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        list(TABLE)
    assert set(TABLE._entries) == {"own"}
    monkeypatch.setenv("AGAIN", "1")
    assert list(TABLE) == ["own", "able"]


def test_an_extension_may_look_names_up_while_it_is_loaded(packages: Loader):
    packages("reg_looks", "assert 'other' not in TABLE; TABLE.add('copy', TABLE['own'])")
    assert TABLE["copy"] == Thing(1)


def test_threads_wait_for_the_whole_table(packages: Loader):
    packages("reg_slowly", "import time; TABLE.add('early', Thing(1)); time.sleep(0.2); TABLE.add('late', Thing(2))")
    found: list[list[str]] = []
    threads = [threading.Thread(target=lambda: found.append(list(TABLE))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [["own", "early", "late"]] * 4


def test_code_is_imported_when_it_is_used_and_a_wrong_place_names_the_package(packages: Loader):
    packages("reg_code", "TABLE.add('json', Thing(1, 'json:dumps')); TABLE.add('bad', Thing(1, 'json:nothing'))")
    assert TABLE.code("own", "code") is len
    assert TABLE.code("json", "code")([1]) == "[1]"
    with pytest.raises(
        ExtensionError,
        match=r"thing 'bad' of package phalanx-reg-code 1\.0: its code, json:nothing, cannot be loaded: AttributeError",
    ):
        TABLE.code("bad", "code")


def test_a_check_whose_entry_fails_keeps_what_it_has_found(packages: Loader):
    def check(name: str, thing: Thing) -> Iterator[str]:
        yield "first"
        with package_code("its size failed"):
            yield str(1 / thing.size)

    found = Registry("thing", {"own": Thing(1)}, check).problems("new", Thing(0))
    assert found == ["first", "its size failed: ZeroDivisionError: division by zero"]


def test_code_of_a_package_fails_with_one_message():
    with pytest.raises(ValueError, match="^it failed: SystemExit: 3"), package_code("it failed", raising=ValueError):
        sys.exit(3)
    with pytest.raises(ExtensionError, match="^it failed: no such corpus$"), package_code("it failed"):
        raise DataError("no such corpus")
    with pytest.raises(KeyError), package_code("it failed", passing=(KeyError,)):
        raise KeyError("mine")


def test_errors_in_the_code_of_a_package_name_it(packages: Loader):
    packages("reg_fails", "import reg_fails; TABLE.add('fails', Thing(1, reg_fails.work))")
    (Path(sys.path[0]) / "reg_fails.py").open("a").write(
        "def work(error, call=None):\n    if call: call()\n    raise error\n"
    )
    work = TABLE.code("fails", "code")

    def error_of(*words: object) -> Exception:
        with pytest.raises(Exception) as caught, noting_package():
            work(*words)
        return caught.value

    bug = error_of(KeyError("x"))
    assert blamed(bug) == "package phalanx-reg-fails 1.0: "
    assert bug.__notes__ == ["phalanx: raised in code of package phalanx-reg-fails 1.0, which extends Phalanx"]
    assert blamed(error_of(DataError("no such file"))) == "package phalanx-reg-fails 1.0: "

    def fail_below() -> None:
        raise DataError("from Phalanx itself")

    assert blamed(error_of(None, fail_below)) == ""
    assert blamed(ValueError()) == ""


def test_a_view_follows_its_table():
    view = View(TABLE, lambda name, thing: f"{name}: {thing.size}")
    assert dict(view) == {"own": "own: 1"}
    assert view["own"] is view["own"]
    TABLE.add("new", Thing(2))
    assert view["new"] == "new: 2"
    TABLE.remove("new")
    TABLE.add("new", Thing(3))
    assert view["new"] == "new: 3"
    TABLE.remove("new")
    assert "new" not in view
    assert len(view) == 1


def test_metadata_in_the_current_directory_are_not_loaded(tmp_path: Path):
    """As modules that lie there (tests/cli/test_current_directory.py)."""
    install(tmp_path, "reg_planted", text="def register():\n    raise SystemExit('planted')\n")
    command = [sys.executable, "-m", "phalanx", "extensions"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "no installed package" in done.stdout


def test_without_packages_nothing_is_imported_to_look_for_them(tmp_path: Path):
    program = "import sys; from phalanx.extend import TABLES; list(TABLES['schedule']); print(*sys.modules)"
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    assert not {"importlib.metadata", "torch", "numpy", "phalanx.schedule.probe"} & set(done.stdout.split())
