"""Checkpoints in the memory of a run's nodes, as its ranks write and read them; launchers hold them (launch/peers.py).

Each rank writes its part to its own node; the next node's launcher copies it. The newest step of which every part is on
some node is whole. Ranks that resume share the manifest, which rank 0 makes of all reports, and fetch the parts that
their own boxes lie in.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.bounded import parse_json, read_bytes
from phalanx.checkpoint.inventory import check_digests, name_of
from phalanx.checkpoint.manifest import MANIFEST, Box, Manifest
from phalanx.checkpoint.save import Reports, Save, manifest_of_reports
from phalanx.checkpoint.shard_file import Reader
from phalanx.data.files import write_atomic
from phalanx.errors import DamagedCheckpointError, RunError
from phalanx.launch.nodes import known
from phalanx.launch.peers import COPIED, PART, REPORT, SHARD, fetch, fetch_report, parts_in
from phalanx.launch.ranks import MEMORY
from phalanx.units import gib

_COPIES = "copies"


def kept_name(step: int, ranks: int, token: str) -> str:
    """Returns the name of a step of which so many ranks write parts, by a token of 16 hexadecimal digits."""
    return f"{name_of(step)}-{ranks}-{token}"


@dataclass(frozen=True)
class KeptStep:
    """A step of which every part is in the memory of some node."""

    name: str
    step: int
    places: Mapping[int, int]
    """The node that has the part, by the rank that wrote it."""


class NodeMemory:
    """This rank's view of its node's memory."""

    def __init__(self, folder: Path, nodes: tuple[str, ...], place: int, key: str, silence_s: float):
        self.folder, self.nodes, self.place, self.key, self.silence_s = folder, nodes, place, key, silence_s

    @classmethod
    def of(cls, directory: Path, silence_s: float) -> NodeMemory | None:
        """Returns what the launcher of a rank has told it; None if nothing is kept."""
        if MEMORY not in os.environ:
            return None
        told = json.loads(os.environ[MEMORY])
        return cls(Path(told["folder"]), tuple(told["nodes"]), told["place"], known(directory), silence_s)

    @property
    def own(self) -> Path:
        return self.folder / "own"

    @property
    def line(self) -> str:
        """Where the state is, in words."""
        return f"the memory of {len(self.nodes)} nodes" if len(self.nodes) > 1 else "this node's memory"

    def begin(self, step: int, ranks: int, token: str, need: int) -> Save:
        """Returns the save of this node's parts, each of `need` bytes or so. Raises RunError if memory is too small."""
        if need > (free := shutil.disk_usage(self.own).free):
            raise RunError(
                f"a rank's part of the state is about {gib(need)}, and /dev/shm has {gib(free)} free; it should hold "
                "four times the parts of a node's ranks: make room (in a container: docker run --shm-size), or set "
                "checkpoint.memory_every=0"
            )
        directory = self.own / kept_name(step, ranks, token)
        directory.mkdir(exist_ok=True)
        return Save(self.own, step, directory, ranks)

    def is_copied(self, save: Save, rank: int) -> bool:
        """Returns whether the next node has a copy of a rank's part; true if there is no other node."""
        return len(self.nodes) < 2 or save.reports.path(rank).with_suffix(COPIED).exists()

    def keep_only(self, names: set[str]) -> None:
        """Removes the parts of all steps but these from this node."""
        for place in (self.own, self.folder / _COPIES):
            for path in place.iterdir():
                if path.name not in names:
                    shutil.rmtree(path, ignore_errors=True)

    def parts(self) -> list[str]:
        """Returns the names of the parts on this node."""
        return [*parts_in(self.own), *parts_in(self.folder / _COPIES)]

    def manifest(self, kept: KeptStep) -> Manifest:
        """Returns the manifest of a step, from the reports of all ranks. Raises DamagedCheckpointError."""
        reports = []
        for rank, place in sorted(kept.places.items()):
            part = f"{kept.name}/{Reports(Path(), 0).path(rank).stem}"
            there = [path for path in self._paths(part, REPORT) if path.exists()]
            try:
                if there:
                    content = read_bytes(there[0])
                else:
                    content = fetch_report(self.nodes[place], self.key, part, self.silence_s)
                reports.append(parse_json(content))
            except (OSError, ValueError) as error:
                raise DamagedCheckpointError(f"{part} in the memory of node {place}: {error}") from None
        return manifest_of_reports(self.own / kept.name, kept.step, reports, reports[0]["meta"])

    def put(self, name: str, text: str) -> None:
        """Writes the manifest of a step that ranks of this node resume from."""
        directory = self.own / name
        directory.mkdir(exist_ok=True)
        write_atomic(directory / MANIFEST, text.encode())

    def obtain(self, part: str, place: int) -> None:
        """Puts a part among those of this node: the copy of the neighbour's, or what `place` has. Raises OSError and
        ValueError."""
        own = self.own / part
        with open(own.parent / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one of this node's ranks fetches it
            if own.with_suffix(REPORT).exists():
                return
            copy = self.folder / _COPIES / part
            if copy.with_suffix(REPORT).exists():
                for suffix in (SHARD, REPORT):
                    with suppress(FileExistsError):
                        os.link(copy.with_suffix(suffix), own.with_suffix(suffix))
            else:
                fetch(self.nodes[place], self.key, part, self.own, self.silence_s)

    def _paths(self, part: str, suffix: str) -> list[Path]:
        return [(self.folder / name / part).with_suffix(suffix) for name in ("own", _COPIES)]


def whole_steps(parts_by_rank: list[tuple[int, list[str]]]) -> list[KeptStep]:
    """Returns the steps of which every part is somewhere, the newest first, from each rank's node and its parts."""
    places: dict[str, dict[int, int]] = {}
    for node, parts in parts_by_rank:
        for part in parts:
            places.setdefault(part.partition("/")[0], {}).setdefault(_numbers(part)[2], node)
    found = []
    for name, held in places.items():
        step, ranks, _ = _numbers(f"{name}/rank-00000")
        if held.keys() == set(range(ranks)):
            found.append(KeptStep(name, step, held))
    return sorted(found, key=lambda kept: (-kept.step, kept.name))


def _numbers(part: str) -> tuple[int, int, int]:
    match = PART.fullmatch(part)
    assert match, part
    step, ranks, rank = map(int, match.groups())
    return step, ranks, rank


class PeerReader(Reader):
    """The tensors of a step in the memory of nodes. A part is fetched when it is first read, and its digest checked."""

    def __init__(self, manifest: Manifest, memory: NodeMemory, kept: KeptStep, *, verify: bool):
        super().__init__(manifest)
        self.memory, self.kept, self.verify = memory, kept, verify

    def verify_share(self, rank: int, ranks: int) -> None:
        """Does nothing: what is read is checked then."""

    def _piece(self, name: str, file: str, there: Box, common: Box) -> Any:
        if file not in self.open:
            part = f"{self.kept.name}/{Path(file).stem}"
            try:
                self.memory.obtain(part, self.kept.places[_numbers(part)[2]])
            except (OSError, ValueError) as error:
                raise DamagedCheckpointError(f"{part} could not be fetched: {error}") from None
            if self.verify:
                check_digests(self.manifest, [file])
        return super()._piece(name, file, there, common)
