"""Checkpoints of a run on an object store: which of them are committed, whole, and kept. Imports no torch.

    step-000100-TOKEN/rank-00000.safetensors ...    the files of a checkpoint, as they are on a disk
    step-000100-TOKEN/manifest.json
    step-000100.json                                the commit record: the folder, and whether it is whole

The commit record is written last, and only if there is none of this step (`ObjectStore.put_if_absent`). So exactly one
of several writers commits a step, and a folder that no record names is invisible, whatever it holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.bounded import field, parse_json
from phalanx.checkpoint.manifest import MANIFEST, Manifest
from phalanx.checkpoint.retention import Retention, WholeCheckpoint, val_loss_of
from phalanx.checkpoint.store import ObjectStore
from phalanx.checkpoint.validity import name_of
from phalanx.errors import CheckpointError, DamagedCheckpointError

FORMAT = "phalanx-remote-checkpoint"
VERSION = 1
_MOST_BYTES = 64 * 2**10
_RECORD = re.compile(r"step-([0-9]{6,12})\.json")
_FOLDER = re.compile(r"step-([0-9]{6,12})-[0-9a-f]{16}")


@dataclass(frozen=True)
class CommitRecord:
    """What makes a checkpoint on a store valid."""

    step: int
    folder: str
    objects: int
    """Objects in the folder."""
    bytes: int
    """Bytes of them together."""
    val_loss: float | None
    """The validation loss that was measured at this very step."""

    @classmethod
    def of(cls, manifest: Manifest, folder: str, manifest_bytes: int) -> CommitRecord:
        size = sum(file.bytes for file in manifest.files.values())
        loss = val_loss_of(manifest)
        return cls(manifest.step, folder, len(manifest.files) + 1, size + manifest_bytes, loss)

    @property
    def name(self) -> str:
        """The record's own object."""
        return f"{name_of(self.step)}.json"

    def text(self) -> bytes:
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}).encode()


class RemoteCheckpoints:
    """The checkpoints of one run on a store. Methods raise RunError if the store fails."""

    def __init__(self, store: ObjectStore):
        self.store = store

    @classmethod
    def of(cls, url: str, run: str) -> RemoteCheckpoints:
        """Returns the checkpoints of a run, below URL/RUN. Raises JobError if no installed library knows the URL."""
        return cls(ObjectStore(url, run))

    def steps(self) -> list[int]:
        """Returns the steps that have a commit record, the newest first."""
        return [step for step, _ in _records(self.store.sizes())]

    def newest(self, before: int | None, above: int, report: Callable[[str], None]) -> CommitRecord | None:
        """Returns the newest checkpoint above step `above` (if given, below `before`) of which all objects are there
        with their sizes, or None if there is none at all. Damaged ones are reported.

        Raises CheckpointError if there are some, and every one of them is damaged."""
        sizes, wrong = self.store.sizes(), ""
        for step, _ in _records(sizes):
            if step <= above or (before is not None and step >= before):
                continue
            try:
                return self.check(step, sizes)
            except CheckpointError as error:
                wrong = str(error)
                report(f"{error}; trying the one before it")
        if wrong:
            raise CheckpointError(f"no newer checkpoint in {self.store.url} is whole; the oldest: {wrong}")
        return None

    def find(self, step: int) -> CommitRecord | None:
        """Returns the checkpoint of a step, None if it was not committed. Raises DamagedCheckpointError."""
        sizes = self.store.sizes()
        return self.check(step, sizes) if f"{name_of(step)}.json" in sizes else None

    def check(self, step: int, sizes: Mapping[str, int]) -> CommitRecord:
        """Returns a committed checkpoint whose objects are all among `sizes`. Raises DamagedCheckpointError if they are
        not; CheckpointError if another version of the program wrote it."""
        where = f"checkpoint {self.store.url}/{name_of(step)}.json"
        try:
            record = _parse(self.store.read(f"{name_of(step)}.json", _MOST_BYTES), step)
        except (FileNotFoundError, ValueError) as error:
            raise DamagedCheckpointError(f"{where} is damaged: {error}") from None
        found = [size for name, size in sizes.items() if name.startswith(f"{record.folder}/")]
        if (len(found), sum(found)) != (record.objects, record.bytes):
            raise DamagedCheckpointError(
                f"{where} has {record.objects} objects with {record.bytes} bytes; in {record.folder}/ are {len(found)} "
                f"with {sum(found)}"
            )
        return record

    def commit(self, record: CommitRecord) -> bool:
        """Makes a checkpoint valid whose objects are all there. Returns False if the step has another one, and deletes
        the objects. A damaged one of this step gives way: should two writers find it, one of their checkpoints stays
        visible, which is whole. Raises DamagedCheckpointError if an object is not there."""
        sizes = self.store.sizes()
        found = [size for name, size in sizes.items() if name.startswith(f"{record.folder}/")]
        if (len(found), sum(found)) != (record.objects, record.bytes):
            raise DamagedCheckpointError(f"{self.store.url}/{record.folder}/ does not hold what was written to it")
        if record.name in sizes:
            try:
                self.check(record.step, sizes)
            except DamagedCheckpointError:
                self.store.remove([record.name])
        if self.store.put_if_absent(record.name, record.text()):
            return True
        self.remove_folder(record.folder)
        return False

    def remove_folder(self, folder: str) -> None:
        """Deletes the objects of a checkpoint that has no commit record."""
        self.store.remove([name for name in self.store.sizes() if name.startswith(f"{folder}/")])

    def remove_expired(self, policy: Retention, progress: Callable[[], None] = lambda: None) -> None:
        """Deletes the checkpoints that `policy` does not keep, their records first; calls `progress` after each one.
        Folders without a record are treated as damaged checkpoints: one of an upload that goes on is newer than what
        is kept."""
        sizes = self.store.sizes()
        whole: list[WholeCheckpoint[list[str]]] = []
        damaged: list[tuple[int, list[str]]] = []
        folders: dict[str, list[str]] = {}
        for name in sizes:
            folder, slash, _ = name.partition("/")
            if slash and _FOLDER.fullmatch(folder):
                folders.setdefault(folder, []).append(name)
        for step, name in _records(sizes):
            try:
                record = self.check(step, sizes)
            except DamagedCheckpointError:
                damaged.append((step, [name]))  # its objects follow as a folder without a record
            else:
                whole.append(WholeCheckpoint([name, *folders.pop(record.folder)], step, record.val_loss))
        damaged += [(_step(_FOLDER, folder), names) for folder, names in folders.items()]
        for names in policy.expired(whole, damaged):
            for name in names:
                self.store.remove([name])
                progress()


def manifest_of(record: CommitRecord) -> str:
    """Returns the object with a checkpoint's manifest."""
    return f"{record.folder}/{MANIFEST}"


def folder_of(step: int, token: str) -> str:
    """Returns the folder of one attempt to upload a checkpoint, by a token of 16 hexadecimal digits."""
    return f"{name_of(step)}-{token}"


def _records(sizes: Mapping[str, int]) -> Iterator[tuple[int, str]]:
    """Yields step and name of the commit records, the newest first."""
    named = ((int(match[1]), name) for name in sizes if (match := _RECORD.fullmatch(name)))
    yield from sorted(((step, name) for step, name in named if name == f"{name_of(step)}.json"), reverse=True)


def _step(pattern: re.Pattern[str], name: str) -> int:
    match = pattern.fullmatch(name)
    assert match
    return int(match[1])


def _parse(content: bytes, step: int) -> CommitRecord:
    """Returns the record of a step. Raises ValueError; CheckpointError for one of another version of the program."""
    raw: Any = parse_json(content)
    if field(raw, "format", str) != FORMAT:
        raise ValueError("it is no commit record")
    if (version := field(raw, "version", int)) != VERSION:
        raise CheckpointError(f"the commit record of step {step} has version {version}; this program reads {VERSION}")
    folder = field(raw, "folder", str)
    match = _FOLDER.fullmatch(folder)
    if not match or int(match[1]) != step or field(raw, "step", int) != step:
        raise ValueError(f"it does not name a folder of step {step}")
    loss = None if raw.get("val_loss") is None else field(raw, "val_loss", float)
    return CommitRecord(step, folder, field(raw, "objects", int), field(raw, "bytes", int), loss)
