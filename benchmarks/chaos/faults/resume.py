"""Classes 20 and 21: a run that resumes in another layout, with another job, or with ranks that disagree."""

from __future__ import annotations

import shutil
from typing import Any

from benchmarks.chaos.arena import Arena
from benchmarks.chaos.fault import Fault

_SAME = "resharded; the weights equal those of one layout up to the order of sums"
_REFUSED = "refused with a table of differences, nothing is written; the original command resumes"
_EXACT = {"train.precision": "fp64"}
_RESHARD_BOUND = 1e-6  # fp64: sums in another order, over 23 steps


def _reshard(name: str, what: str, start: dict[str, int], then: dict[str, int]) -> Fault:
    return Fault(
        20, name, what, _SAME, start="half", job={**_EXACT, **_layout(start)}, extra=_layout(then),
        bound=_RESHARD_BOUND,
    )  # fmt: skip


def _layout(axes: dict[str, int]) -> dict[str, int]:
    return {f"layout.{name}": size for name, size in {"dp_replicate": 1, **axes}.items()}


def _changed(name: str, what: str, extra: dict[str, Any], names: str) -> Fault:
    return Fault(
        21, name, what, _REFUSED, start="half", extra=extra, repair=Arena.forget, names=names,
        codes=frozenset({2, 4}),
    )  # fmt: skip


def _other_data(arena: Arena) -> None:
    """Puts others of the same name and size in the place of the token shards."""
    shutil.copytree(arena.folder / "data", arena.folder / "data-before")
    for file in (arena.folder / "data").rglob("*.bin"):
        content = file.read_bytes()
        file.write_bytes(content[1024:] + content[:1024])


def _data_again(arena: Arena) -> None:
    shutil.rmtree(arena.folder / "data")
    (arena.folder / "data-before").rename(arena.folder / "data")


def _one_rank(name: str, what: str, words: str, names: str) -> Fault:
    return Fault(
        21, name, what, "all ranks agree before the first step, or stop and name who differs",
        launch="ranks", words={1: (words,)}, repair=Arena.forget, names=names,
        codes=frozenset({2, 1}),
    )  # fmt: skip


FAULTS = (
    _reshard("dp-to-tp", "two replicas, then tensor parallel", {"dp_replicate": 2}, {"tp": 2}),
    _reshard("tp-to-pp", "tensor parallel, then two stages", {"tp": 2}, {"pp": 2}),
    _reshard("2-to-1", "two ranks that share the state, then one", {"dp_shard": 2}, {}),
    _reshard("2-to-4", "two replicas, then two of two shards", {"dp_replicate": 2}, {"dp_replicate": 2, "dp_shard": 2}),
    _changed("model", "d_model is twice as large on resume", {"model.d_model": 128}, r"model\.d_model"),
    _changed("seed", "another seed on resume", {"train.seed": 7}, r"train\.seed"),
    _changed("tokenizer", "another vocabulary on resume", {"data.random_vocab": 65}, r"data\.random_vocab|vocab"),
    Fault(
        21, "data", "the token shards hold other tokens on resume", "refused: the shard is named",
        start="half", prepare=_other_data, repair=_data_again, names=r"(?i)train.*\.bin|data", codes=frozenset({4}),
    ),
    _one_rank("lr-on-one-rank", "rank 1 alone has another learning rate", "optimizer.lr=0.002", r"optimizer\.lr"),
    _one_rank("seed-on-one-rank", "rank 1 alone has another seed", "train.seed=7", r"train\.seed"),
    _one_rank("data-on-one-rank", "rank 1 alone reads other data", "data.random_tokens=50000", r"data\b"),
)  # fmt: skip
