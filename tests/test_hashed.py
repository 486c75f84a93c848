"""Objects that keep their hash: equal ones have the same, other processes compute their own."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.blocks.operator import MemoryProfile
from phalanx.config.cluster import Accelerator, Cluster, Sharing
from phalanx.config.clusters import cluster_of
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.config.presets import PRESETS
from phalanx.cost.frameworks import PHALANX
from phalanx.cost.spec import Framework, StepSpec
from phalanx.hashed import Hashed
from phalanx.partition.derived import Batch

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
        names = [field.name for field in fields(one)]  # pyright: ignore[reportArgumentType]
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
