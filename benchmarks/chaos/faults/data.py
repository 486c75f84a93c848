"""Class 23: token shards that are damaged before or while they are read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from benchmarks.chaos.arena import Arena
from benchmarks.chaos.fault import Fault
from benchmarks.chaos.faults.checkpoints import flip
from benchmarks.chaos.faults.moments import at_step
from benchmarks.chaos.program import JOB
from phalanx.config.job import Train

_TOKEN_BYTES = 2
_GOLD = "stopped with exit code 4, the shard is named; nothing is reordered; the same command resumes once it is mended"


def _shards(arena: Arena) -> tuple[Path, Path]:
    """Returns a shard of the training split and one of the validation split."""
    data = arena.folder / "data"
    return next(data.rglob("train*.bin")), next(data.rglob("val*.bin"))


def _truncate(train: Path, val: Path) -> None:
    os.truncate(train, train.stat().st_size // 2)


def _swap(train: Path, val: Path) -> None:
    aside = train.with_suffix(".aside")
    train.rename(aside)
    val.rename(train)
    aside.rename(val)


def _flip_last(train: Path, val: Path) -> None:
    """Flips a bit of a token that is read at the last step, in a block that was read before."""
    from phalanx.data.loader import sample_ids

    length = JOB["model.seq_len"]
    samples = (train.stat().st_size // _TOKEN_BYTES - 1) // length
    last = JOB["train.steps"] * JOB["train.global_batch"] - 1
    (sample,) = sample_ids(last, 1, samples, Train().seed)
    content = bytearray(train.read_bytes())
    content[int(sample) * length * _TOKEN_BYTES] ^= 0x10
    train.write_bytes(content)


def _fifo(train: Path, val: Path) -> None:
    train.unlink()
    os.mkfifo(train)


def _damaged(damage: Callable[[Path, Path], None], step: int = 0) -> Callable[[Arena], None]:
    def prepare(arena: Arena) -> None:
        shutil.copytree(arena.folder / "data", arena.tmp.parent / "data-before")
        if step:
            arena.during = at_step(lambda live: damage(*_shards(arena)), step)
        else:
            damage(*_shards(arena))

    return prepare


def _mend(arena: Arena) -> None:
    shutil.rmtree(arena.folder / "data")
    shutil.copytree(arena.tmp.parent / "data-before", arena.folder / "data")


def _fault(name: str, what: str, damage: Callable[[Path, Path], None], step: int = 0) -> Fault:
    return Fault(
        23, name, what, _GOLD, start="half", prepare=_damaged(damage, step), repair=_mend,
        names=r"(train|val)[^ ]*\.bin", codes=frozenset({4}),
    )  # fmt: skip


FAULTS = (
    _fault("flipped-bit", "a bit flips in a token shard", lambda train, val: flip(train)),
    _fault("truncated", "a token shard is half as long", _truncate),
    _fault("missing", "a token shard is missing", lambda train, val: train.unlink()),
    _fault("swapped", "the shards of training and validation are swapped", _swap),
    _fault("fifo", "a FIFO lies where a token shard was", _fifo),
    _fault("while-reading", "a bit flips in a token shard that the run reads, in a sample of its last step",
           _flip_last, step=1),
)  # fmt: skip
