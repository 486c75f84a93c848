"""Small modules that all rooms use: bounded reads, hashes, registries, nearest names, and echoed text."""

from __future__ import annotations

import ast
import copy
import io
import json
import logging
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import phalanx
from extend.install import environment, install
from phalanx import registry
from phalanx.blocks.operator import MemoryProfile
from phalanx.bounded import field, open_regular, parse_json, read_bytes, read_json, read_text
from phalanx.check.schema import known_names
from phalanx.cli import inference as generate
from phalanx.cli.main import VERBS, main, message_of
from phalanx.config.cluster import Accelerator, Cluster, Sharing
from phalanx.config.clusters import cluster_of
from phalanx.config.fields import suggestion
from phalanx.config.foreign_names import refusal, value
from phalanx.config.job import Data
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.config.presets import PRESETS, named, unknown
from phalanx.cost.frameworks import PHALANX
from phalanx.cost.spec import Framework, StepSpec
from phalanx.data.template import find_template
from phalanx.echo import LEAST_COLUMNS, VisibleStream, echo, shortened, terminal_columns, visible, wrapped
from phalanx.errors import DataError, ExtensionError, JobError, RunError
from phalanx.facts import Lazy, stated
from phalanx.generate.sampling import read_prompts
from phalanx.generate.text import OrderedOutput
from phalanx.hashed import Hashed
from phalanx.nearest import Misfit, nearest, no_run
from phalanx.partition.derived import Batch
from phalanx.registry import Registry, View, blamed, noting_package, package_code
from phalanx.train.terminal import Terminal, logging_to

# Reading files of others: only regular ones, of a bounded size, and only JSON that code can handle.


def test_a_regular_file_is_read_also_through_a_link(tmp_path):
    (tmp_path / "file").write_text('{"a": [1, 2.5, "é"]}')
    (tmp_path / "link").symlink_to("file")
    assert read_json(tmp_path / "link") == {"a": [1, 2.5, "é"]}
    assert read_text(tmp_path / "file").startswith("{")
    assert read_bytes(tmp_path / "file", 21)


def test_the_mark_with_which_editors_of_windows_begin_a_file_is_no_text(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"\xef\xbb\xbfdef \r\na\x0cb\xe2\x80\xa8c\rd\n\n")
    assert read_text(path).startswith("def")
    assert read_prompts(path) == ["def ", "a\x0cb\u2028c", "d"]
    (tmp_path / "a.jinja").write_bytes(b"\xef\xbb\xbf{{ 1 }}")
    assert find_template(Data(template=str(tmp_path / "a.jinja"))).source == "{{ 1 }}"


@pytest.mark.parametrize("read", [read_text, read_json, open_regular])
def test_a_pointer_of_git_lfs_is_not_the_file(tmp_path, read):
    (tmp_path / "a").write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n")
    with pytest.raises(OSError, match=r"^it is a pointer of Git LFS, not the file: git lfs pull$"):
        read(tmp_path / "a")


def test_a_file_of_prompts_sets_nothing_else(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "id": 1}\n{"prompt": "b", "temperature": 0, "max_tokens": 3}\n')
    with pytest.raises(DataError, match=r"p\.jsonl:2: temperature, max_tokens: options set these, for all prompts"):
        read_prompts(tmp_path / "p.jsonl")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "system": "be brief"}\n')
    with pytest.raises(DataError, match="system: a prompt is a text alone"):
        read_prompts(tmp_path / "p.jsonl")


def test_prompts_in_json_under_another_ending_are_no_prompts_as_they_stand(tmp_path):
    (tmp_path / "p.NDJSON").write_text('{"prompt": "a"}\n"b"\n')
    assert read_prompts(tmp_path / "p.NDJSON") == ["a", "b"]
    for name, text in (("p.txt", '{"prompt": "a"}\n{"prompt": "b"}\n'), ("p.json", '[\n"a"]'), ("p.json", '{"a": 1}')):
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match="is JSON: write one prompt per line into a .jsonl file"):
            read_prompts(tmp_path / name)
    (tmp_path / "p.txt").write_text("{\n  x\n")
    assert read_prompts(tmp_path / "p.txt") == ["{", "  x"]


def test_a_checkpoint_where_a_run_is_wanted_is_answered_with_its_run(tmp_path):
    (tmp_path / "config.yaml").touch()
    said = no_run(tmp_path / "checkpoints" / "step-000020", "no config.yaml")
    assert said.endswith(f"it is a checkpoint: give {tmp_path}, and --step 20")


def test_what_is_no_regular_file_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path may not be long
    os.mkfifo("pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        for name, kind in (
            ("pipe", "a named pipe"),
            ("zero", "a character device"),
            ("socket", "a socket"),
            (".", "a directory"),
        ):
            with pytest.raises(OSError) as raised:
                read_bytes(tmp_path / name)
            assert raised.value.strerror == f"it is {kind}, not a regular file"


@pytest.mark.parametrize("name", ["none", "a" * 300, "a\0b", "\ud800"])
def test_names_that_no_file_has(tmp_path, name):
    with pytest.raises(OSError) as raised:
        read_bytes(tmp_path / name)
    assert raised.value.strerror


def test_a_file_that_is_too_large_is_not_read_to_its_end(tmp_path):
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**36)
    with pytest.raises(OSError) as raised:
        read_text(tmp_path / "sparse", 2**20)
    assert raised.value.strerror == "it is larger than 1.0MiB, the most that is read"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[" * 100_000, "nested deeper than 64 levels"),
        ("[" * 200 + "]" * 200, "nested deeper than 64 levels"),
        ('{"a":' * 65 + "0" + "}" * 65, "nested deeper than 64 levels"),
        ("9" * 5000, "a whole number of 5,000 digits"),
        (f"-{2**63}", "a whole number of 19 digits"),
        ('["\\ud800"]', "holds half a surrogate pair"),
        ('{"\\uDC00": 1}', "holds half a surrogate pair"),
        (b"\xff\xfe", "codec can't decode"),
    ],
)
def test_json_that_code_cannot_handle_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_json(text)


def test_json_that_is_accepted():
    assert parse_json(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}
    assert parse_json(str(2**63 - 1)) == 2**63 - 1
    assert parse_json("[" * 64 + "]" * 64)
    assert parse_json('"\\ud83d\\ude00 \\\\ud800"') == "\U0001f600 \\ud800"
    assert parse_json('{"id": ' + "9" * 5000 + ', "text": "\\ud800"}', lenient=True)["text"] == "\ud800"


def test_fields_have_the_type_that_is_asked_for():
    entry = {"a": 1, "b": "x", "c": True, "d": 0.5}
    assert (field(entry, "a", int), field(entry, "b", str), field(entry, "a", float)) == (1, "x", 1.0)
    assert (field(entry, "c", bool), field(entry, "d", float)) == (True, 0.5)
    for name, kind, message in (
        ("c", int, "'c' is true or false, expected a whole number"),
        ("c", float, "'c' is true or false, expected a number"),
        ("b", int, "'b' is text, expected a whole number"),
        ("none", str, "'none' is null, expected text"),
    ):
        with pytest.raises(ValueError, match=message):
            field(entry, name, kind)
    with pytest.raises(ValueError, match="expected an object with 'a', found a list"):
        field([1], "a", int)


# Objects that keep their hash: equal ones have the same, other processes compute their own.

CASE = StepSpec(
    PRESETS["llama3-8b"], cluster_of("dgx-h100:2"), Layout(dp_shard=16), Batch(16, 1, 1, 16), framework=PHALANX
)
KINDS = (ModelConfig, Layout, Cluster, Accelerator, Sharing, Framework, MemoryProfile, StepSpec)


def parts(one: StepSpec) -> list[Hashed]:
    return [one, one.model, one.cluster, one.cluster.accelerator, one.cluster.sharing, one.layout, one.framework]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_keeps_its_own_hash(kind: type[Hashed]) -> None:
    """And does not inherit the place of it from a decorator that stands elsewhere."""
    assert issubclass(kind, Hashed)
    assert kind.__hash__.__name__ == "cached"


def test_a_hash_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one = replace(CASE)
    first = hash(one)
    monkeypatch.setattr(Layout, "__hash__", lambda _: pytest.fail("computed again"))
    assert hash(one) == first


def test_nothing_is_seen_of_it() -> None:
    for one in parts(CASE):
        hash(one)
        names = [field.name for field in fields(one)]
        assert list(vars(one)) == names
        assert "_hash" not in repr(one)
        with pytest.raises(FrozenInstanceError):
            setattr(one, names[0], None)


@given(st.builds(Layout, tp=st.integers(1, 3), pp=st.integers(1, 3)), st.integers(1, 3), st.integers(1, 3))
def test_equal_objects_have_the_same_hash_and_changed_ones_are_others(one: Layout, tp: int, pp: int) -> None:
    hash(one)
    other = replace(one, tp=tp, pp=pp)
    assert (one == other) == ((one.tp, one.pp) == (tp, pp))
    if one == other:
        assert hash(one) == hash(other)
    assert hash(other) == hash(Layout(tp=tp, pp=pp))
    assert {one: 1}.get(other) == (1 if one == other else None)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_is_equal_and_has_the_same_hash(copied) -> None:
    for one in parts(CASE):
        hash(one)
        assert copied(one) == one
        assert hash(copied(one)) == hash(one)


def test_another_process_computes_its_own() -> None:
    """Strings hash differently there: what was kept here would find nothing."""
    hash(CASE)
    program = (
        "import pickle, sys; from dataclasses import replace; one = pickle.load(sys.stdin.buffer)\n"
        "known = {one: 'found'}; print(known[replace(one)], hash(one) == hash(replace(one)), hash(one.layout.line()))"
    )
    told = set()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            input=pickle.dumps(CASE),
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=60,
        )
        found, equal, number = done.stdout.decode().split()
        assert (found, equal) == ("found", "True")
        told.add(number)
    assert len(told) == 2


# Tables, the packages that add to them, and what is left of a package that fails.


@stated
@dataclass(frozen=True)
class Thing:
    size: int
    code: Lazy = len


TABLE = Registry("thing", {"own": Thing(1)}, lambda name, thing: ["size 13 is refused"] if thing.size == 13 else [])
"""The table that the packages of these tests add to."""
HEAD = "from test_utilities import TABLE, Thing\n"
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


# A hint about a mistyped name names what was meant, or nothing: never an unrelated thing.


@pytest.mark.parametrize(
    ("field", "typed", "meant"),
    [
        ("model.preset", "lamma3-8b", "llama3-8b"),
        ("model.preset", "gpt2-larg", "gpt2-large"),
        ("model.preset", "qwen3-30b", "qwen3-30b-a3b"),
        ("model.preset", "mixtral", "mixtral-8x7b"),
        ("cluster.preset", "h100", "dgx-h100"),
        ("cluster.preset", "fronteir", "frontier"),
        ("layout.schedule", "interleaved", "interleaved_1f1b"),
        ("data.corpus", "shakespear", "shakespeare_char"),
        ("data.tokenizer", "bytes", "byte"),
        ("optimizer.name", "adam", "adamw"),
        ("cluster.accelerator.name", "mi300", "mi300x"),
        ("run.trackers", "tensorbaord", "tensorboard"),
    ],
)
def test_what_was_meant_is_named(field: str, typed: str, meant: str) -> None:
    assert nearest(typed, known_names()[field]) == meant


@pytest.mark.parametrize(
    ("field", "typed"),
    [
        *(("model.preset", name) for name in ["llama3-7b", "mamba2-2.7b", "gpt4", "gpt-j", "glm4-9b", "tinyllama"]),
        *(("cluster.preset", name) for name in ["h800x", "h20", "laptop", "p5"]),
        *(("data.corpus", name) for name in ["wikitext", "ultrachat"]),
        *(("data.template", name) for name in ["llama2", "qwen"]),
        *(("run.trackers", name) for name in ["swanlab", "comet"]),
        ("cluster.accelerator.name", "h20"),
        ("optimizer.name", "lamb"),
    ],
)
def test_an_unrelated_thing_is_not(field: str, typed: str) -> None:
    assert nearest(typed, known_names()[field]) is None


@pytest.mark.parametrize("verb", ["prepare", "validate", "sample", "estimate", "chat", "merge", "version", "upload"])
def test_a_verb_is_no_other_verb(verb: str) -> None:
    assert nearest(verb, VERBS) is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("label_smoothing", "which one: train.label_smoothing or train.dpo.label_smoothing?"),
        ("label_smoothing_factor", "that is train.label_smoothing"),
        ("neftune_noise_alpha", "that is train.neftune_alpha"),
        ("flash_attn", "there is nothing to set"),
        ("lr_scheduler", "did you mean optimizer.schedule?"),
        ("tensor_parallel", "did you mean layout.tp?"),
        ("tie_weights", "did you mean model.tied?"),
        ("run.wandb", "did you mean run.trackers?"),
        ("temperature", "an option of `phalanx generate`"),
        ("mtp_num_layers", "model.mtp says how many of the n_layers"),
    ],
)
def test_fields_of_other_programs_are_known(name: str, said: str) -> None:
    assert said in suggestion(name)


@pytest.mark.parametrize(
    "name", ["padding", "pad_token", "drop_tokens", "save_total", "mlp_ratio", "qk_clip", "sp_size"]
)
def test_no_field_is_far_fetched(name: str) -> None:
    assert suggestion(name) == ""


def test_models_and_corpora_of_other_programs_are_known() -> None:
    assert [value("model.preset", f"gpt2-{size}", str) for size in ("124m", "355M", "774m", "1.5b")] == [
        "gpt2",
        "gpt2-medium",
        "gpt2-large",
        "gpt2-xl",
    ]
    assert named("mamba") == "mamba"
    for name in ("mamba", "mamba2-2.7b"):
        assert "layers that are not implemented" in unknown(name)
    for name in ("qwen3-vl-8b", "llava-7b"):
        assert "with an encoder of images" in unknown(name)
    assert "there are llama3-8b, llama3-70b, llama3-405b" in unknown("llama3-7b")
    assert "nothing is downloaded" in refusal("data.corpus", "openwebtext")
    assert "data.corpus=chat" in refusal("data.corpus", "ShareGPT")
    assert "data.path of the file" in refusal("data.corpus", "jsonl")


def test_a_misfit_travels_between_processes_as_its_text() -> None:
    error = JobError([Misfit("n_heads 4 / tp 3 is not an integer", 3, {"layout.tp": [1, 2, 4]})])
    assert (
        str(pickle.loads(pickle.dumps(error)))
        == str(error)
        == "n_heads 4 / tp 3 is not an integer; nearest tp: 1, 2, 4"
    )


# What is printed: control characters that others chose do not reach a terminal.

ROOT = Path(phalanx.__file__).parent
HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\x08\u202egpj\u2066"


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def obeyed(text: str) -> set[str]:
    """The characters that a terminal would obey."""
    return {character for character in text if character in set(HOSTILE) - set("]0;owned[2J31mgpj")}


def test_control_characters_become_visible():
    assert visible("\x1b[31mred\x9b0m\r\0") == "\\x1b[31mred\\x9b0m\\x0d\\x00"
    assert visible("a\u202eb\u2028\u200f\ud800") == "a\\u202eb\\u2028\\u200f\\ud800"
    assert visible("tabs\tand\nlines, é € 😀 你好 עברית") == "tabs\tand\nlines, é € 😀 你好 עברית"


@given(st.text())
def test_what_is_printed_can_always_be_written(text):
    assert not any(ord(character) < 0x20 and character not in "\t\n" for character in visible(text))
    visible(text).encode()
    assert visible(visible(text)) == visible(text)


@given(st.text(st.characters()))
def test_json_is_printed_as_it_is(text):
    document = json.dumps({text: [text]}, indent=1)
    assert visible(document) == document


@given(st.text(" abc12:,\n"), st.integers(4, 60))
def test_lines_fit_and_every_word_stays_whole(text, width):
    shown = wrapped(text, width)
    assert shown.split() == text.split()
    assert all(len(line) <= width or len(line.split()) == 1 for line in shown.split("\n"))
    if all(len(line) <= width for line in text.split("\n")):
        assert shown == text


def test_lines_break_between_fields_and_words():
    figures = "step time: 1.484 s (1.35 to 1.825)  tps: 5,522  mfu: 32.3%  bubble: 0.0%"
    assert wrapped(figures, 60) == "step time: 1.484 s (1.35 to 1.825)  tps: 5,522  mfu: 32.3%\n  bubble: 0.0%"
    fact = "  shape       12 layers, 768 wide, heads of 64, MLP of 3,072"
    assert wrapped(fact, 50) == "  shape       12 layers, 768 wide, heads of 64,\n              MLP of 3,072"
    problem = "phalanx: 2 problems:\n  command line: layout: the cluster has nodes 1 × devices 8 = 8"
    assert wrapped(problem, 50).endswith("\n  command line: layout: the cluster has nodes 1 ×\n    devices 8 = 8")


def test_only_a_terminal_has_a_width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "44")
    terminal, pipe, copied = FakeTerminal(), io.StringIO(), FakeTerminal()
    text = "one two three four five six seven eight nine ten"
    echo(text, file=terminal, wrap=True)
    echo(text, file=pipe, wrap=True)
    echo(text, file=copied)
    assert terminal.getvalue() == "one two three four five six seven eight nine\n  ten\n"
    assert pipe.getvalue() == copied.getvalue() == text + "\n"


@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("3", LEAST_COLUMNS), ("0", 0), ("-5", 0), ("wide", 0)])
def test_a_terminal_is_never_too_narrow_for_words(monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    assert terminal_columns(FakeTerminal()) == width


def test_long_texts_are_shortened():
    assert shortened("a" * 10, 10) == "a" * 10
    assert shortened("a" * 50 + "b" * 50, 10) == "aaaaa … (90 characters left out) … bbbbb"


def test_printing(capsys):
    echo(HOSTILE)
    echo(HOSTILE, file=sys.stderr, end="")
    captured = capsys.readouterr()
    assert captured.out.startswith("\\x1b]0;owned\\x07")
    assert not obeyed(captured.out + captured.err)
    stream = io.StringIO()
    VisibleStream(stream).write(HOSTILE)
    assert not obeyed(stream.getvalue())


def test_nothing_prints_in_another_way():
    """Texts go through `echo`, which knows nothing of a terminal's language."""
    for path in ROOT.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if path.name == "echo.py" or not re.search(r"\bprint\b", source):
            continue
        for node in ast.walk(ast.parse(source)):
            prints = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            assert not prints, f"{path.relative_to(ROOT)}:{node.lineno} calls print; use phalanx.echo"


@pytest.mark.parametrize(
    "argv",
    [
        [HOSTILE],
        ["train", f"{HOSTILE}.yaml"],
        ["train", f"{HOSTILE}=1", f"--{HOSTILE}"],
        ["train", f"model={HOSTILE}", "layout.schedule=" + HOSTILE, f"data.path={HOSTILE}"],
        ["generate", f"runs/{HOSTILE}"],
        ["generate", "runs", HOSTILE, f"--{HOSTILE}"],
        ["schedule", "show", HOSTILE],
        ["schedule", "check", f"{HOSTILE}.csv"],
        ["predict", "--table", HOSTILE],
    ],
    ids=lambda argv: argv[0] if argv[0] != HOSTILE else "verb",
)
def test_errors(argv, capsys):
    assert main(argv) in (2, 4)
    captured = capsys.readouterr()
    assert "\\x1b" in captured.err
    assert not obeyed(captured.out + captured.err)


def test_very_long_messages_are_shortened():
    assert len(message_of(RunError("a" * 10**6))) < 20_000
    assert len(message_of(JobError(["a" * 10**6, "b"]))) < 5_000
    many = message_of(JobError([f"problem {number}" for number in range(10**5)])).splitlines()
    assert len(many) == 42
    assert many[-1] == "  and 99,960 more problems"


def test_log_lines(monkeypatch, tmp_path):
    terminal = FakeTerminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with logging_to(Terminal(), "info", 0, tmp_path / "log"):
        logging.getLogger("phalanx.test").info("run: %s", f"{HOSTILE}!")
    for text in (terminal.getvalue(), (tmp_path / "log").read_text()):
        assert "run: \\x1b]0;owned" in text
        assert not obeyed(text)


@pytest.mark.parametrize("live", [True, False])
def test_generated_text(live, monkeypatch):
    """A terminal shows escapes; a pipe gets the text as it is."""
    written = f"one\n\ttwo{HOSTILE}"

    out = FakeTerminal() if live else io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    output = OrderedOutput(generate._terminal_or_file(), [f"{HOSTILE}>"])
    for piece in written:
        output.give(0, piece)
    output.end(0)
    assert "one\n\ttwo" in out.getvalue()
    assert out.getvalue() == (visible(f"{HOSTILE}>{written}\n") if live else f"{HOSTILE}>{written}\n")
