"""What the programs of published results could do, and that their own layouts are among it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from benchmarks.abilities import ABILITIES, abilities
from benchmarks.published import LLAMA3, MEGATRON, Published

from phalanx.config.layout import Layout


@pytest.mark.parametrize("row", [*MEGATRON, *LLAMA3], ids=lambda row: row.name)
def test_a_published_layout_is_one_that_its_program_can_run(row: Published) -> None:
    assert any(within(row.layout, fixed) for fixed in abilities(row.program))


def within(layout: Layout, fixed: Mapping[str, Any]) -> bool:
    told = {**fixed}
    if layout.pp == 1:
        told.pop("schedule", None)
    if layout.shard_ranks == 1:
        told.pop("zero", None)
    return all(getattr(layout, name) == value for name, value in told.items())


@pytest.mark.parametrize("program", ABILITIES)
def test_every_set_names_fields_of_a_layout(program: str) -> None:
    for fixed in abilities(program):
        assert set(fixed) <= set(vars(Layout()))


def test_versions_of_a_program_can_do_what_it_can() -> None:
    assert abilities("nemo-2025") == abilities("nemo")
    assert abilities("torchtitan-async") == abilities("torchtitan")
    assert abilities("deepspeed-zero3") == ()
