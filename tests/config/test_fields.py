"""Fields: names and values that users type, their ranges, and the reader of typed values."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.check.job import out_of_range, problems_of
from phalanx.check.load import RULES
from phalanx.cli.main import description_of
from phalanx.config import foreign_names, overrides, values
from phalanx.config.clusters import CLUSTERS, DEVICES, MACHINES
from phalanx.config.constraints import Constraint, Example, FolderName, Interval, Printable
from phalanx.config.fields import constraints, leaves, replace, resolve, short_names, suggestion
from phalanx.config.foreign_names import ALIASES
from phalanx.config.job import Job
from phalanx.config.layout import Layout
from phalanx.config.layout_line import parse
from phalanx.config.presets import CATALOGUE, PRESETS
from phalanx.config.values import Known, TypedError, convert, data_file, read_as

# Names that users type: short ones, those of other frameworks, mistyped ones, and lines that verbs print.


LINES = [
    "dp_shard=4,tp=2,schedule=zb_v,micro_batch=1",
    "dp_shard=4,tp=2,pp=2,zero=2,accumulate=sharded,prefetch=2,sp=true,schedule=interleaved_1f1b,pp_chunks=2",
    "pp=4,schedule=terapipe,pp_slices=4,pp_cut=3+5+4+4,accumulation=8,recompute_cut=8*full+8*none",
    "cp=4,cp_ulysses=2,cp_inner=ring,recompute=selective,loss_chunk=1024",
    "schedule=zb_v",
    "auto,tp=2,sp=true",
]


def layout_of(*words: str) -> Layout:
    parsed = overrides.parse(words)
    assert parsed.problems == []
    job = Job()
    for setting in parsed.settings:
        job = replace(job, setting.path, values.convert(setting.text, leaves()[setting.path]))
    return job.layout


@pytest.mark.parametrize("line", LINES)
def test_a_line_that_verbs_print_can_be_pasted_back(line: str) -> None:
    layout = parse(line)
    assert set(layout.line().split(",")) == set(line.split(","))
    assert layout_of(line) == layout_of(f"layout={line}") == layout
    words = line.replace("auto,", "auto=true,").split(",")
    assert layout_of(*words) == layout
    assert layout_of(*(f"--{word}" for word in words)) == layout


@pytest.mark.parametrize("name", [*foreign_names.FIELDS, *foreign_names.ADVICE])
def test_names_of_other_frameworks_are_answered_and_not_taken(name: str) -> None:
    assert resolve(name) is None
    assert suggestion(name) == suggestion(f"section.{name}") == suggestion(name.replace("_", "-"))
    said = suggestion(name).removeprefix("; did you mean ").removesuffix("?")
    assert said == foreign_names.FIELDS.get(name, f"; {foreign_names.ADVICE.get(name)}")
    assert foreign_names.FIELDS.get(name, "train.steps") in leaves()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("stepz", "train.steps"),
        ("trian.stepz", "train.steps"),
        ("training.steps", "train.steps"),
        ("training.seq_len", "model.seq_len"),
        ("train.lr", "optimizer.lr"),
        ("model.kv_rank", "model.mla.kv_rank"),
        ("layout.dp_shrad", "layout.dp_shard"),
        ("tensor_paralel_degree", "layout.tp"),
        ("zero_optimization.stage", "layout.zero"),
        ("fp16.enabled", "train.precision"),
        ("lr_scheduler.warmup_steps", "optimizer.warmup_steps"),
        ("heads", "model.n_heads"),
    ],
)
def test_a_mistyped_name_is_answered_with_what_was_meant(name: str, meant: str) -> None:
    assert suggestion(name) == f"; did you mean {meant}?"


@pytest.mark.parametrize("name", ["foo", "train.foo", "optimizer.type", "optimizer.kind", "cluster.gpu", "wifi"])
def test_nothing_far_fetched_is_suggested(name: str) -> None:
    assert suggestion(name) == ""


# Names and values of other programs: they stand for fields and values that exist, and never shadow one.

VERBS = [*map(description_of, ("train", "verify", "plan", "predict", "simulate"))]
NAMES = [*ALIASES, *foreign_names.FLAGS, *foreign_names.SWITCHES]


@pytest.mark.parametrize("name", NAMES)
def test_an_alias_never_shadows_a_name_of_ours(name: str) -> None:
    for text in (None, "1", "true", "full", "cosine", "random", "x"):
        assert resolve(name, text) is None
    assert name not in leaves()
    assert name not in short_names()
    for verb in VERBS:
        [command] = verb.commands.values()
        assert name not in {*command.options, *command.switches}


@pytest.mark.parametrize("name", list(ALIASES))
def test_an_alias_stands_for_a_field_a_rule_or_nothing_to_set(name: str) -> None:
    alias = ALIASES[name]
    assert alias.path in leaves() or (not alias.path and (alias.rule or alias.nothing))
    # its other values are refused with a reason
    assert not alias.nothing or name.rpartition(".")[2] in foreign_names.ADVICE
    for value in alias.values.values():
        values.convert(value, leaves()[alias.path])
    assert alias.rule == (name in RULES)


def test_flags_switches_and_groups_exist() -> None:
    for path, value in foreign_names.FLAGS.values():
        values.convert(value, leaves()[path])
    assert set(foreign_names.SWITCHES.values()) <= {switch for verb in VERBS for switch in verb.commands[""].switches}
    for group in foreign_names.GROUPS.values():
        for path, value in group.items():
            if path != "model.preset":
                values.convert(value, leaves()[path])


def test_names_are_aliases_suggestions_or_refused_and_never_two_of_these() -> None:
    assert not set(ALIASES) & set(foreign_names.FIELDS)
    assert not set(foreign_names.ADVICE) & set(foreign_names.FIELDS)
    assert all(not ALIASES[name].path for name in set(ALIASES) & set(foreign_names.ADVICE))


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("dtype", "dtype"),
        ("train.dtype", "dtype"),
        ("model.batch-size", "batch_size"),
        ("data.dtype", "dtype"),
        ("gradient_accumulation_steps", "gradient_accumulation_steps"),
        ("optimizer.gradient_accumulation_steps", "optimizer.gradient_accumulation_steps"),
        ("layout.dtype", None),
        ("zero_optimization.dtype", None),
        ("steps", None),
    ],
)
def test_wordplay_s_sections_may_stand_before_an_alias(name: str, known: str | None) -> None:
    found = foreign_names.find(name)
    assert (found and found[0]) == known


@pytest.mark.parametrize("path", [path for path, kind in leaves().items() if typing.get_origin(kind) is typing.Literal])
def test_a_legal_value_is_taken_as_it_is_and_in_any_case(path: str) -> None:
    for choice in map(str, typing.get_args(leaves()[path])):
        assert foreign_names.value(path, choice, leaves()[path]) == choice
        assert foreign_names.value(path, choice.upper(), leaves()[path]) == choice
        assert not foreign_names.refusal(path, choice)


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("train.precision", "bfloat16", "bf16"),
        ("train.precision", "BF16", "bf16"),
        ("model.norm", "RMSNorm", "rmsnorm"),
        ("model.preset", "gpt2_medium", "gpt2-medium"),
        ("model.preset", "gpt3", "gpt3"),
        ("layout.zero", "FSDP", "3"),
        ("layout.zero", "4", "4"),
        ("data.corpus", "Shakespeare", "shakespeare_char"),
        ("run.name", "BF16", "BF16"),
        ("data.path", "Shakespeare", "Shakespeare"),
    ],
)
def test_what_a_value_names_without_doubt(path: str, text: str, value: str) -> None:
    assert foreign_names.value(path, text, leaves()[path]) == value


def test_presets_and_their_values_exist() -> None:
    for name in PRESETS:
        assert foreign_names.value("model.preset", name, str) == name
        assert not foreign_names.refusal("model.preset", name)
    for path, table in foreign_names.VALUES.items():
        for value in table.values():
            assert value in PRESETS or path != "model.preset"
            values.convert(value, leaves()[path])


def test_the_page_names_every_alias() -> None:
    page = Path(__file__).parents[2] / "docs" / "guides" / "habits.md"
    text = page.read_text(encoding="utf-8")
    assert not [name for name in NAMES if f"`{name}" not in text]


# Text to values: what is accepted, what is refused and in which words.

Schedule = Literal["cosine", "linear"]


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("12", int, 12),
        ("1e6", int, 1_000_000),
        ("1_000", int, 1000),
        ("3e-4", float, 3e-4),
        ("2", float, 2.0),
        ("yes", bool, True),
        ("Off", bool, False),
        ("no", str, "no"),
        ("cosine", Schedule, "cosine"),
        ("3", Literal[1, 2, 3], 3),
        ("0.9,0.95", tuple[float, float], (0.9, 0.95)),
        ("(0.9, 0.95)", tuple[float, float], (0.9, 0.95)),
        (["0.9", "0.95"], tuple[float, float], (0.9, 0.95)),
    ],
)
def test_accepted(text, kind, value):
    assert convert(text, kind) == value


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("1.5", int, "expected a whole number, found '1.5'"),
        ("x", float, "expected a number, found 'x'"),
        ("nan", float, "expected a number, found 'nan'"),
        ("inf", int, "expected a whole number, found 'inf'"),
        ("0_12", int, "expected a whole number, found '0_12': write 12 without the leading 0, or 10 as octal"),
        ("-08", float, "expected a number, found '-08': write -8 without the leading 0"),
        ("maybe", bool, "expected true or false, found 'maybe'"),
        ("cosin", Schedule, "expected one of cosine, linear, found 'cosin'; did you mean cosine?"),
        ("1", tuple[float, float], "expected 2 values, found 1"),
        ("[1,2", tuple[float, float], "expected a list such as [a,b], found '[1,2'"),
        ("1,2)", tuple[float, float], "expected a list such as [a,b], found '1,2)'"),
        (["1", "2"], int, "expected a whole number, not a list"),
    ],
)
def test_refused(text, kind, message):
    with pytest.raises(ValueError) as caught:
        convert(text, kind)
    assert str(caught.value) == message


@given(st.integers())
def test_every_whole_number_survives(value):
    assert convert(str(value), int) == value


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_number_survives(value):
    assert convert(repr(value), float) == value


# The reader of typed values: what a type takes, every problem at once, and the data files that it reads.


@dataclass(frozen=True)
class Part:
    name: str
    size: Annotated[int, Interval(1), Example("3")] = 1


@dataclass(frozen=True)
class Whole:
    from_: str
    parts: tuple[Part, ...] = ()
    pair: tuple[int, float] = (0, 0.0)
    kind: Literal["plain", "other"] = "plain"
    limit: int | None = None
    named: Mapping[str, int] = field(default_factory=dict)
    switch: bool = False


def test_a_whole_value_becomes_its_dataclass():
    value = {
        "from": "here",
        "parts": [{"name": "a", "size": 2}, {"name": "b"}],
        "pair": [1, 2],
        "kind": "other",
        "limit": None,
        "named": {"x": 3},
        "switch": True,
    }
    parts = (Part("a", 2), Part("b"))
    assert read_as(Whole, value) == Whole("here", parts, (1, 2), "other", None, {"x": 3}, switch=True)


def test_every_problem_is_named_with_its_place():
    value = {"parts": [{"size": 0}, 3], "pair": [1], "kind": "othr", "limit": "2", "named": {"x": True}, "swich": 1}
    with pytest.raises(TypedError) as caught:
        read_as(Whole, value, "file.json")
    assert caught.value.problems == [
        "file.json.parts.item 1.size: must be at least 1, is 0",
        "file.json.parts.item 1: name is missing",
        "file.json.parts.item 2: expected an object, found 3",
        "file.json.pair: expected 2 values, found a list of 1",
        "file.json.kind: expected one of plain, other, found 'othr'; did you mean other?",
        "file.json.limit: expected a whole number or null, found '2'",
        "file.json.named.x: expected a whole number, found true",
        "file.json: unknown key 'swich'; did you mean switch? (keys: from, parts, pair, kind, limit, named, switch)",
        "file.json: from is missing",
    ]


def test_unknown_keys_are_left_out_on_request():
    assert read_as(Part, {"name": "a", "other": 1}, more=True) == Part("a")


@pytest.mark.parametrize(
    ("kind", "value"), [(int, 1.0), (int, True), (bool, 1), (str, 1), (float, "1"), (list[int], {}), (Part, [])]
)
def test_values_of_another_type_are_refused(kind: Any, value: Any):
    with pytest.raises(TypedError):
        read_as(kind, value)


def test_an_entry_has_what_its_base_has(monkeypatch: pytest.MonkeyPatch):
    file = {
        "bases": {"a": {"x": {"one": 1, "two": 2}, "comment": "of a"}, "b": {"base": "a", "y": 3}},
        "entries": {"c": {"base": "b", "x": {"two": 4}, "comment": "of c"}},
    }
    monkeypatch.setattr("phalanx.config.values.data_file", lambda name: file)
    assert dict(Known("any.json", lambda name, entry: entry)) == {"c": {"x": {"one": 1, "two": 4}, "y": 3}}


@pytest.mark.parametrize("name", ["models.json", "devices.json"])
def test_every_base_of_a_data_file_is_used(name: str):
    file = data_file(name)
    used = {each.get("base") for each in (*file["bases"].values(), *file["entries"].values())}
    assert used - {None} == set(file["bases"])


def test_every_link_and_host_of_the_machines_is_used():
    file = data_file("machines.json")
    said = [each.get(part) for each in file["entries"].values() for part in ("intra", "inter", "host")]
    said = {each.get("like") if isinstance(each, dict) else each for each in said} - {None}
    assert said == {*file["links"], *file["hosts"]}


def test_every_entry_of_the_data_files_can_be_read():
    assert all(preset.source for preset in CATALOGUE.values())
    assert all(entry.source for entry in (*DEVICES.values(), *MACHINES.values()))


# Ranges of fields: stated for every number, and compared for all fields at once.

PAIRS = (tuple[float, float], tuple[int, int])
NUMBERS = {path: kind for path, kind in leaves().items() if kind in (int, float, *PAIRS)}


def test_every_number_has_a_range():
    assert set(constraints()) == {
        *NUMBERS,
        "layout.loss_chunk",
        "train.batch_ramp",
        "train.seq_ramp",
        "layout.recompute",
        "run.name",
        "run.dir",
        "run.metrics_host",
        "run.nnodes",
        "run.rdzv_endpoint",
        "checkpoint.remote",
        "checkpoint.stripes",
        "data.readers",
        "model.from",
    }


@pytest.mark.parametrize("path", NUMBERS)
def test_every_number_is_refused_far_below_its_range(path):
    value = (-7, -7) if NUMBERS[path] in PAIRS else -7
    found = problems_of(replace(Job(), path, value))
    assert [(where, "-7" in said) for where, said in found] == [(path, True)]


def test_all_fields_out_of_range_are_found_at_once():
    job = Job()
    for path in ("optimizer.lr", "model.d_model", "layout.tp", "data.workers"):
        job = replace(job, path, -1)
    assert problems_of(job) == [
        ("model.d_model", "must be at least 1, is -1"),
        ("layout.tp", "must be at least 1, is -1"),
        ("data.workers", "must not be negative, is -1"),
        ("optimizer.lr", "must be above 0, is -1"),
    ]


@pytest.mark.parametrize("name", CLUSTERS)
def test_known_machines_are_in_range(name):
    assert not list(out_of_range(CLUSTERS[name]))


@pytest.mark.parametrize(
    ("constraint", "legal", "illegal", "said"),
    [
        (Interval(1), 1, 0, "must be at least 1, is 0"),
        (Interval(0), 0, -1, "must not be negative, is -1"),
        (Interval(above=0), 0.1, 0.0, "must be above 0, is 0.0"),
        (Interval(below=1), 0.9, 1.0, "must be below 1, is 1.0"),
        (Interval(0, 1), 1, 1.5, "must lie between 0 and 1, is 1.5"),
        (Interval(0, below=1), 0.0, 1.0, "must lie in [0, 1), is 1.0"),
        (Interval(0, below=1), (0.0, 0.9), (0.9, 1.0), "must lie in [0, 1), are (0.9, 1.0)"),
        (Interval(0), 1.0, float("nan"), "must not be negative, is nan"),
    ],
)
def test_a_range_says_what_is_outside(constraint: Constraint, legal, illegal, said):
    assert constraint.problem(legal) == ""
    assert constraint.problem(illegal) == said


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("../../x", "x"),
        ("/tmp/runs/big/", "big"),
        ("..", "run"),
        (".hidden", "hidden"),
        ("a\x1b[2Jb\0", "a-[2Jb-"),
        ("ü" * 300, "ü" * 100),
        ("\udce4", "-"),
    ],
)
def test_a_run_s_name_is_one_folder(name, nearest):
    [(path, said)] = problems_of(replace(Job(), "run.name", name))
    assert path == "run.name"
    assert said.endswith(f"; nearest legal: {nearest}")
    assert said.isprintable()
    assert len(said) < 600


def test_names_of_runs_that_are_legal():
    for name in ("", "run", "läufe 2", "a..b", "-x", "x" * 200):
        assert FolderName(200).problem(name) == ""
    assert Printable().problem("runs") == ""
    assert "must be printable" in Printable().problem("a\nb")


def test_types_are_read_without_their_ranges():
    assert leaves()["model.n_layers"] is int
    assert leaves()["optimizer.betas"] == tuple[float, float]
    assert all(dataclasses.is_dataclass(each) for ranges in constraints().values() for each in ranges)
