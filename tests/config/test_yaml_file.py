"""Job files: every key is found with its line, and everything that is not plain data is refused."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config.fields import leaves
from phalanx.config.yaml_file import Setting, parse, read


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


def test_an_empty_file_sets_nothing():
    assert parse("# nothing\n", "j") == ([], [])


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
