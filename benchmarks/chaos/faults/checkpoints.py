"""Class 18: checkpoints that are damaged before a run resumes from them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.chaos.arena import Arena
from benchmarks.chaos.fault import Fault
from benchmarks.chaos.program import Phalanx
from benchmarks.chaos.story import Story

_GOLD = "file and digest are named, the checkpoint before it is used, loudly; same weights"


def _parts(checkpoint: Path) -> list[Path]:
    """Returns the files with tensors, the largest first."""
    files = [*checkpoint.rglob("*.safetensors"), *checkpoint.rglob("*.distcp")]
    return sorted(files, key=lambda path: path.stat().st_size, reverse=True)


def flip(file: Path, place: float = 0.7) -> None:
    """Flips a bit of the byte at `place`, a fraction of the file."""
    content = bytearray(file.read_bytes())
    content[int(len(content) * place)] ^= 0x10
    file.write_bytes(content)


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _manifest(checkpoint: Path) -> Path:
    return checkpoint / "manifest.json"


def _newest(damage: Callable[[Path], None]) -> Callable[[Arena], None]:
    return lambda arena: damage(arena.newest())


def _every(arena: Arena) -> None:
    for checkpoint in arena.checkpoints.glob("step-*"):
        flip(_parts(checkpoint)[0])


def _start_over(arena: Arena) -> None:
    shutil.rmtree(arena.run)


def _renewed(arena: Arena, story: Story) -> Sequence[str]:
    """The newest checkpoint is whole again at the end."""
    if arena.program.name != Phalanx.name:
        return []
    from phalanx.checkpoint.inventory import check
    from phalanx.errors import PhalanxError

    try:
        check(arena.newest())
    except PhalanxError as error:
        return [f"the newest checkpoint is still damaged after the run: {error}"]
    return []


def _fault(name: str, what: str, damage: Callable[[Path], None], **fields: object) -> Fault:
    return Fault(
        18, name, what, _GOLD, start="half", prepare=_newest(damage), damages=True,
        names=r"step-\d+", codes=frozenset({4}), check=_renewed, **fields,  # type: ignore[arg-type]
    )  # fmt: skip


FAULTS = (
    _fault("flipped-bit", "a bit flips in the newest checkpoint", lambda path: flip(_parts(path)[0]), quick=True,
           peer=True),
    _fault("truncated", "the newest checkpoint's largest file is half as long",
           lambda path: _truncate(_parts(path)[0]), peer=True),
    _fault("empty-file", "the newest checkpoint's largest file has no bytes",
           lambda path: _parts(path)[0].write_bytes(b"") and None),
    _fault("missing-file", "the newest checkpoint's largest file is missing", lambda path: _parts(path)[0].unlink()),
    _fault("manifest-cut", "the newest checkpoint's manifest is half as long", lambda path: _truncate(_manifest(path))),
    _fault("manifest-changed", "a bit flips in the newest checkpoint's manifest",
           lambda path: flip(_manifest(path), 0.5)),
    _fault("no-manifest", "the newest checkpoint has no manifest", lambda path: _manifest(path).unlink()),
    Fault(
        18, "all", "a bit flips in every checkpoint", "refused with exit code 4; nothing is deleted",
        start="half", prepare=_every, repair=_start_over, damages=True, stops=True, names=r"step-\d+",
        codes=frozenset({4}),
    ),
    Fault(
        18, "finished", "a bit flips in the last checkpoint of a finished run",
        "the run does not say that it is finished: it goes on from the one before; same weights",
        start="done", prepare=_newest(lambda path: flip(_parts(path)[0])), damages=True,
        names=r"step-\d+", codes=frozenset({4}), check=_renewed,
    ),
)  # fmt: skip
