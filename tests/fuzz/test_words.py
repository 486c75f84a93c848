"""Jobs of fields chosen by chance: whatever the words say, the job is read and predicted, or refused with a message.
`make fuzz COUNT=100000` goes on where the test ends."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from phalanx import api
from phalanx.check.schema import schema
from phalanx.cli.main import message_of
from phalanx.errors import PhalanxError

COUNT = int(os.environ.get("PHALANX_FUZZ", "400"))
SECTIONS = ("model", "layout", "train", "optimizer", "cluster", "data", "checkpoint", "guard", "run")
FILES = {"model.from", "layout.schedule", "cluster.calibration"}
"""Fields that name what lies elsewhere, and presets, which are chosen apart."""
MODELS = ("gpt2", "llama3-8b", "tiny", "tiny-moe", "tiny-deepseek", "deepseek-v3.2", "gemma4-e2b", "gemma4-26b-a4b")
MODELS += ("qwen3-next-80b-a3b", "nemotron3-nano-30b-a3b", "gpt-oss-20b", "llama4-scout-17b-16e", "granite3-2b")
MACHINES = ("dgx-h100:1", "dgx-h100:2", "dgx-a100:1", "mi300x:1", "tpu-v5p:1", "dgx-v100:1", "a100-pcie:1")
AXES = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")
NUMBERS = ("0", "1", "2", "3", "4", "8", "16", "64", "1024")
SHARES = ("0", "0.1", "0.5", "1", "2.5")


def fields(node: dict[str, Any], above: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each field of a JSON schema by its dotted path."""
    for name, found in node.get("properties", {}).items():
        inner = found.get("then", found)
        if "properties" in inner:
            yield from fields(inner, f"{above}{name}.")
        else:
            yield above + name, inner


FIELDS = [
    (path, each)
    for path, each in fields(schema())
    if path.partition(".")[0] in SECTIONS and path not in FILES and not path.endswith(".preset")
]


def a_value(field: dict[str, Any], chance: random.Random) -> str:
    """Returns a value that a field may have as far as its type says; a text has its default."""
    choice = chance.choice(field["anyOf"]) if "anyOf" in field else field
    if "enum" in choice:
        return str(chance.choice(choice["enum"]))
    if choice.get("type") == "boolean":
        return chance.choice(("true", "false"))
    default = field.get("default", "")
    if isinstance(default, float) or choice.get("maximum") == 1:
        return chance.choice((*SHARES, str(default)))
    return chance.choice((*NUMBERS, str(default))) if isinstance(default, int) else str(default)


def words(number: int) -> list[str]:
    """Returns the words of a job: a model, mostly a machine, up to three axes, and up to four fields by chance."""
    chance = random.Random(number)
    found = [f"model={chance.choice(MODELS)}", "model.vocab_size=512"]
    found += [f"cluster={chance.choice(MACHINES)}"] if chance.random() < 0.8 else ["cluster=dgx-h100"]
    sizes, left = dict.fromkeys(AXES, 1), 16 if found[-1].endswith(":2") else 8
    while left > 1:
        sizes[chance.choice(AXES[:5])] *= 2
        left //= 2
    sizes["ep"] = chance.choice((1, 1, 1, 2, 4))
    found += [f"layout.{axis}={size}" for axis, size in sizes.items() if size > 1]
    layout = [each for each in FIELDS if each[0].startswith("layout.") and each[0].partition(".")[2] not in AXES]
    several = (*chance.sample(layout, chance.choice((0, 0, 1, 1, 2))), *chance.sample(FIELDS, chance.choice((0, 1, 2))))
    return list(dict.fromkeys([*found, *(f"{path}={a_value(field, chance)}" for path, field in several)]))


@pytest.mark.parametrize("part", range(4))
def test_jobs_of_any_fields_are_predicted_or_refused(part):
    predicted = refused = 0
    for number in range(part, COUNT, 4):
        said = words(number)
        try:
            assert api.predict_step(api.load_job(*said)).step_time_s > 0
            predicted += 1
        except PhalanxError as error:
            refused += 1
            assert 0 < len(message_of(error)) < 20_000
        except BaseException as error:
            error.add_note(f"job {number}: {' '.join(said)}")
            raise
    assert predicted
    assert refused
