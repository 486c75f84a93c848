"""The reader of typed values: what a type takes, every problem at once, and the data files that it reads."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from phalanx.config.clusters import DEVICES, MACHINES
from phalanx.config.constraints import Example, Interval
from phalanx.config.presets import CATALOGUE
from phalanx.config.typed import Known, TypedError, data_file, read_as


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
    monkeypatch.setattr("phalanx.config.typed.data_file", lambda name: file)
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
