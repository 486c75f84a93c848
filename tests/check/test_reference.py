"""Every field is described once: the examples are legal, the page is current, the schema takes the job files."""

from pathlib import Path

import pytest
import yaml

import phalanx
from phalanx.check.load import as_dict, as_yaml, from_dict, resolve
from phalanx.check.schema import COMMAND, known_names, page, schema
from phalanx.config import reference, values
from phalanx.config.fields import leaves
from phalanx.config.job import Job

ROOT = Path(phalanx.__file__).parents[2]


def test_every_field_has_a_meaning_and_an_example_within_its_range():
    assert [*reference.fields()] == [*leaves()]
    for path, field in reference.fields().items():
        assert field.about, path
        value = values.convert(field.example.strip('"') if field.kind is str else field.example, field.kind)
        assert not [problem for each in field.ranges if (problem := each.problem(value))], path


def test_the_page_of_every_field_is_current():
    written = ROOT / "docs" / "reference" / "job.md"
    if not written.exists():
        pytest.skip("the package is installed without its documents")
    assert written.read_text(encoding="utf-8") == page(), f"write it again: {COMMAND}"


def test_known_names_belong_to_fields():
    assert set(known_names()) <= set(leaves())


def problems(text: str) -> list[str]:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(schema())
    return [error.message for error in validator.iter_errors(yaml.safe_load(text))]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_the_schema_takes_every_example(path):
    assert problems(path.read_text(encoding="utf-8")) == []


def test_the_schema_is_one_and_takes_what_a_run_writes():
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(schema())
    assert problems(as_yaml(resolve([]))) == []
    assert from_dict(as_dict(Job()), "") is not None


@pytest.mark.parametrize(
    "text",
    [
        "model: llama3-8b\ncluster: dgx-h100:2\nlayout: auto\noptimizer: lion",
        "layout: dp_shard=4,tp=2",
        "layout: {dp_shard: -1}\nlora: {rank: 8}",
        "optimizer: {lr: 1e-3, betas: [0.9, 0.98]}\ntrain: {steps: 1_000, compile: yes}",
        "run: {nnodes: 2, name: 2026}",
    ],
)
def test_the_schema_takes_other_spellings(text):
    assert problems(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "trian: {steps: 3}",
        "train: {stepz: 3}",
        "train: {steps: many}",
        "train: {steps: 0}",
        "layout: {zero: 4}",
        "layout: {dp_shard: 0}",
        "run: {nnodes: x}",
        "data: {val_fraction: 1.0}",
    ],
)
def test_the_schema_refuses_what_no_job_may_have(text):
    assert len(problems(text)) == 1
