"""Job files, layouts in one line, and runs of layers: what is written reads back, and every mistake is found."""

import dataclasses
import typing
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.fields import leaves
from phalanx.config.layout import Layout
from phalanx.config.layout_line import parse as parse_line
from phalanx.config.yaml_file import Setting, parse, read
from phalanx.errors import JobError
from phalanx.partition.derived import MODES, RecomputeRun, modes, recompute_of, uniform_recompute
from phalanx.partition.derived import parse as parse_runs

# Job files: every key is found with its line, and everything that is not plain data is refused.


def test_settings_carry_their_line():
    settings, problems = parse("train:\n  steps: 3\n\noptimizer:\n  betas: [0.9, 0.99]\n", "job.yaml")
    assert problems == []
    assert settings == [
        Setting("train.steps", "3", "job.yaml:2"),
        Setting("optimizer.betas", ["0.9", "0.99"], "job.yaml:5"),
    ]


def test_a_section_as_one_word_is_its_preset():
    settings, problems = parse("model: gpt2\ndata: random\n", "j")
    assert (problems, [(s.path, s.text) for s in settings]) == (
        [],
        [("model.preset", "gpt2"), ("data.corpus", "random")],
    )


def test_a_layout_in_one_word_is_auto_or_a_line():
    settings, problems = parse("layout: auto\n", "j")
    assert (settings, problems) == ([Setting("layout.auto", "true", "j:1")], [])
    settings, problems = parse("layout: tp=2,sp=true\n", "j")
    assert problems == []
    assert {setting.path: setting.text for setting in settings}["layout.tp"] == "2"
    assert {setting.path for setting in settings} == {path for path in leaves() if path.startswith("layout.")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layout: 3\n", "j:1: layout: expected auto, or a line such as dp_shard=4,tp=2, or fields of the section"),
        ("layout: automatic\n", "found 'automatic'; did you mean auto?"),
        ("layout: [1, 2]\n", "j:1: layout '1,2': expected key=value with commas between, found '1'"),
        ("layout: tp=x\n", "j:1: layout 'tp=x': tp: expected a whole number, found 'x'"),
        ("layout:\n", "j:1: layout has no value"),
        ("train:\n  stepz: 3\n", "j:2: unknown key train.stepz; did you mean train.steps?"),
        ("train:\n  lr: 3\n", "j:2: unknown key train.lr; did you mean optimizer.lr?"),
        ("batch_size: 3\n", "j:1: unknown key batch_size; did you mean layout.micro_batch?"),
        ("trian:\n  steps: 3\n", "j:1: unknown section trian; did you mean train"),
        ("steps: 3\n", "j:1: unknown key steps; did you mean train.steps?"),
        ("train:\n  steps: 3\n  steps: 4\n", "j:3: train.steps is set again (first on line 2)"),
        ("train: {steps: 3}\ntrain: {steps: 4}\n", "j:2: train is set again (first on line 1)"),
        ("train:\n  steps:\n    a: 1\n", "j:2: train.steps is one value, not a section"),
        ("cluster:\n  intra: 450\n", "j:2: cluster.intra is a section, not one value; its fields: gbs, latency_us"),
        ("train:\n  steps:\n", "j:2: train.steps has no value"),
        ("- a\n", "j:1: a job file is a mapping of sections"),
        ("train: [\n", "j:2: not valid YAML"),
        ("train:\n\tsteps: 3\n", "j:2: not valid YAML: a tab, where it takes only spaces"),
        ("run:\n  name: !!python/object/apply:os.system [ls]\n", "j:2: run.name: the tag tag:yaml.org,2002:python"),
        ("model: !!python/object:phalanx.config.model.Model {}\n", "the tag tag:yaml.org,2002:python"),
        ("optimizer:\n  betas: [[1], 2]\n", "j:2: optimizer.betas: the tag tag:yaml.org,2002:seq is not allowed"),
        ("a: &a\n  <<: *a\n", "j:1"),
        ("? [1, 2]\n: 3\n", "j:1: a key must be a plain name"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text, message):
    _, problems = parse(text, "j")
    assert any(message in problem for problem in problems), problems


def test_all_problems_of_a_file_are_found():
    _, problems = parse("train:\n  stepz: 3\nfoo: 1\nlayout:\n  tp: 1\n  tp: 2\n", "j")
    assert len(problems) == 3


def test_an_unreadable_file_is_a_problem(tmp_path):
    assert "there is no such file" in read(tmp_path / "none.yaml")[1][0]
    (tmp_path / "bytes.yaml").write_bytes(b"a: \xff\xfe")
    assert "not UTF-8" in read(tmp_path / "bytes.yaml")[1][0]


def test_a_missing_example_is_answered_with_the_verb_that_writes_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "`phalanx examples all` writes the example jobs" in read(Path("examples/main.yaml"))[1][0]


@pytest.mark.parametrize("text", ["# nothing\n", "", "{}"])
def test_an_empty_file_is_no_job(text):
    assert parse(text, "j") == ([], ["j: is empty: it sets no field of a job (`phalanx init` begins one)"])


def test_an_unknown_list_of_mappings_is_an_unknown_key():
    """As Hydra's defaults are."""
    assert parse("defaults:\n  - model: llama\n", "j") == ([], ["j:1: unknown key defaults"])


keys = st.sampled_from([*leaves(), "train.stepz", "model", "x", "a.b.c", ""])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(keys, values, max_size=6))
def test_any_yaml_document_is_either_settings_or_problems(tree):
    nested: dict = {}
    for key, value in tree.items():
        section, _, name = key.partition(".")
        if name:
            place = nested.setdefault(section, {})
            if isinstance(place, dict):
                place[name] = value
        else:
            nested[section] = value
    settings, problems = parse(yaml.safe_dump(nested), "j")
    assert all(setting.path in leaves() for setting in settings)
    assert all(problem.startswith("j:") for problem in problems)


@given(st.text(max_size=60))
def test_no_text_makes_the_parser_raise(text):
    settings, problems = parse(text, "j")
    assert isinstance(settings, list)
    assert isinstance(problems, list)


# A layout in one line: what `line` prints reads back, and every mistake is found.

KINDS = {
    int: st.integers(0, 10**6),
    float: st.floats(0, 1),
    bool: st.booleans(),
    str: st.sampled_from(["1f1b", "gpipe", "zb-h1"]),
}


def values_of(kind):
    if typing.get_origin(kind) is typing.Union:
        return st.one_of(*map(values_of, typing.get_args(kind)))
    return st.sampled_from(typing.get_args(kind)) if typing.get_origin(kind) is typing.Literal else KINDS[kind]


LAYOUTS = st.builds(
    Layout, **{name: values_of(kind) for name, kind in leaves(Layout).items() if name != "bucket_mb"}
)  # a line leaves bucket_mb out


@given(LAYOUTS)
def test_a_line_reads_back(layout):
    assert parse_line(layout.line()) == layout
    assert parse_line(parse_line(layout.line()).line()) == layout


def test_every_field_can_be_given():
    given_all = ",".join(f"{name}={value}" for name, value in vars(Layout()).items() if name != "axes")
    assert parse_line(given_all) == Layout()


@pytest.mark.parametrize(
    ("line", "layout"),
    [
        ("tp=2,sp=true", Layout(tp=2, sp=True)),
        (" dp-shard = 4 , layout.zero=2", Layout(dp_shard=4, zero=2)),
        ("bucket_mb=0.5", Layout(bucket_mb=0.5)),
        ("auto", Layout(auto=True)),
        ("tp=2,auto", Layout(auto=True, tp=2)),
    ],
)
def test_spellings(line, layout):
    assert parse_line(line) == layout


def test_an_open_layout_says_what_is_fixed():
    assert Layout(auto=True).line() == "auto"
    assert Layout(auto=True, tp=2, sp=True).line() == "auto,tp=2,sp=true"


def test_all_mistakes_at_once():
    with pytest.raises(JobError) as caught:
        parse_line("tpp=2,zero=4,sp=maybe,n_layers=3,tensor_parallel_degree=2,tp,pp=2,pp=2,cp=x,cp=2,")
    messages = [
        problem.removeprefix(f"layout {caught.value.problems[0].split(chr(39))[1]!r}: ")
        for problem in caught.value.problems
    ]
    assert messages == [
        "unknown key tpp; did you mean tp?",
        "zero: expected one of 1, 2, 3, found '4'",
        "sp: expected true or false, found 'maybe'",
        "model.n_layers is not a field of the layout",
        "unknown key tensor_parallel_degree; did you mean layout.tp?",
        "expected key=value with commas between, found 'tp'",
        "pp is given twice",
        "cp: expected a whole number, found 'x'",
        "cp is given twice",
        "expected key=value with commas between, found ''",
    ]


def test_a_word_like_none_is_told_those_that_exist():
    with pytest.raises(JobError, match=r"layout 'foo=3': unknown key foo \(known: auto, dp_replicate, .*tp, pp"):
        parse_line("foo=3")


@given(st.text(max_size=30))
def test_no_text_makes_it_crash(text):
    try:
        assert dataclasses.is_dataclass(parse_line(text))
    except JobError as error:
        assert error.problems


# Runs of layers that recompute uniform_recompute: as they are written, and what each layer gets of them.

RUNS = st.lists(st.builds(RecomputeRun, st.integers(1, 40), st.sampled_from(MODES)), min_size=1, max_size=6)


@given(RUNS)
def test_what_is_written_is_what_each_layer_does(runs):
    text = "+".join(map(str, runs))
    assert parse_runs(text) == tuple(runs)
    every = [run.mode for run in runs for _ in range(run.layers)]
    layout = Layout(recompute_cut=text)
    assert [recompute_of(layout, layer, len(every)) for layer in range(len(every))] == every
    assert parse_line(layout.line()) == layout
    assert parse_line(f"tp=2,{layout.line()},sp=true") == Layout(tp=2, sp=True, recompute_cut=text)


def test_without_a_cut_every_layer_does_what_the_layout_says():
    assert modes("selective", 3) == ("selective",) * 3
    assert recompute_of(Layout(recompute="full"), 7, 8) == "full"
    assert uniform_recompute(Layout(recompute_cut="1*full+1*none"), "full") == Layout(recompute="full")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8", r"'8' is not a list of runs of layers; write counts and modes joined by plus signs, such as 8\*full"),
        ("full+none", r"'full\+none' is not a list of runs"),
        ("2*full+", r"'2\*full\+' is not a list of runs"),
        ("2*ful+2*none", r"2\*ful: 'ful' is not a recomputation mode; did you mean full\? \(known: none, products"),
        ("2*full+0*none", r"0\*none has no layers: remove it"),
    ],
)
def test_what_is_no_list_of_runs(text, message):
    with pytest.raises(JobError, match=message):
        parse_runs(text)


@given(RUNS, st.integers(1, 200))
def test_the_nearest_legal_cut_is_legal(runs, layers):
    text = "+".join(map(str, runs))
    if sum(run.layers for run in runs) == layers:
        return
    with pytest.raises(JobError, match="nearest legal") as caught:
        modes(text, layers)
    assert len(modes(str(caught.value).rpartition(" ")[2], layers)) == layers
