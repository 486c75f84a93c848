"""Names and values of other programs: they stand for fields and values that exist, and never shadow one."""

from __future__ import annotations

import importlib
import typing
from pathlib import Path

import pytest

from phalanx.check.load import RULES
from phalanx.config import foreign_names, values
from phalanx.config.fields import leaves, resolve, short_names
from phalanx.config.foreign_names import ALIASES
from phalanx.config.presets import PRESETS

VERBS = [
    importlib.import_module(f"phalanx.cli.{name}").VERB for name in ("train", "verify", "plan", "predict", "simulate")
]
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
