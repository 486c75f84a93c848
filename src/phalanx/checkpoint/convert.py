"""Converts the state of a run: to and from consolidated safetensors, checkpoints of torch's DCP, and runs.

Tensors go one at a time from the source to the target, so that memory is bounded by two of them. The target is written
under a temporary name beside its own and renamed once it is on the disk; nothing that exists is overwritten.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from phalanx.blocks.parameters import parameter_shapes
from phalanx.bounded import read_bytes
from phalanx.check.load import LoadedJob
from phalanx.check.show import as_yaml
from phalanx.checkpoint import consolidated, files
from phalanx.checkpoint.boxes import Box
from phalanx.checkpoint.consolidated import PlannedFile, numbered, plan
from phalanx.checkpoint.inventory import digest_problems
from phalanx.checkpoint.manifest import MANIFEST, Manifest, StoredTensor, kind_of
from phalanx.checkpoint.meta import job_of, problems
from phalanx.checkpoint.parts import is_finite
from phalanx.checkpoint.reader import TORCH_DTYPES, Reader
from phalanx.checkpoint.save import LATEST
from phalanx.checkpoint.validity import directory_of
from phalanx.config.fields import leaves
from phalanx.config.optimizer import Optimizer
from phalanx.data.files import write_atomic
from phalanx.data.progress import Progress, meter, silent
from phalanx.data.tokenizer import FILE as TOKENIZER
from phalanx.errors import CheckpointError, DamagedCheckpointError, JobError, RunError
from phalanx.optimizers.entry import Shape
from phalanx.optimizers.facts import kinds as kinds_of_state
from phalanx.optimizers.facts import state_tensors
from phalanx.parallel.precision import DTYPES, needs_master_weights
from phalanx.units import gib

FORMS = ("safetensors", "dcp", "phalanx")
TYPES = {"fp64": "F64", "fp32": "F32", "bf16": "BF16", "fp16": "F16"}
"""Types to which parameters can be converted, by their names in jobs."""
MOST_FILE_BYTES = 5 * 2**30
_MARGIN_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Converted:
    """What a conversion wrote."""

    target: Path
    form: str
    step: int
    tensors: int
    bytes: int
    """Bytes of the tensors."""
    files: dict[str, int]
    """The bytes of every file."""
    notes: tuple[str, ...]
    """What the user should know about it."""


@dataclass
class _Work:
    """What is written where."""

    source: Reader
    target: Path
    directory: Path
    """The temporary directory."""
    tensors: dict[str, StoredTensor]
    """The tensors to be written, in the types to be written."""
    read: Callable[[str], Tensor]
    most_bytes: float
    progress: Callable[[int], None] = lambda _: None
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def facts(self) -> dict[str, Any] | None:
        """The step and the metadata of the source, if it has them."""
        manifest = self.source.manifest
        return {"step": manifest.step, "meta": manifest.meta} if manifest.meta else None


def convert(
    source: Reader,
    target: Path,
    form: str,
    *,
    weights_only: bool = False,
    dtype: str = "",
    most_file_bytes: float = MOST_FILE_BYTES,
    progress: Progress = silent,
) -> Converted:
    """Converts the tensors of `source` to a new `target`.

    Args:
        source: what `open_source` returns.
        target: a file that ends in .safetensors, or a folder; in the form "phalanx" a run's directory.
        form: one of FORMS.
        weights_only: leave moments and master weights out.
        dtype: the type of the parameters, one of TYPES; their own if it is empty.
        most_file_bytes: a larger state is divided into several files, if the target is a folder.
        progress: gets the bytes done.

    Raises JobError if the arguments do not go together or the target exists; CheckpointError if the source is damaged
    or lacks what the form needs; RunError if the target cannot be written.
    """
    _check_arguments(target, form, weights_only, dtype)
    _verify(source.manifest, progress)
    work = _work(source, target, weights_only, dtype, most_file_bytes)
    write = {"safetensors": _to_safetensors, "dcp": _to_dcp, "phalanx": _to_run}[form]
    if form == "phalanx":
        _prepare_run(work)
    total = sum(tensor.nbytes for tensor in work.tensors.values())
    _require_space(target, total)
    work.progress = meter(progress, "writing", total)
    try:
        work.directory.mkdir()
        product = write(work)
        paths = [path for path in sorted(work.directory.rglob("*")) if path.is_file()]
        written = {str(path.relative_to(work.directory)): path.stat().st_size for path in paths}
        files.sync(work.directory)
        if os.path.lexists(target):
            raise FileExistsError(17, "it has come into being meanwhile", str(target))
        product.rename(target)
        files.sync(target.parent)
    except OSError as error:
        raise RunError(f"{target} could not be written: {error}") from error
    finally:
        shutil.rmtree(work.directory, ignore_errors=True)
    return Converted(target, form, source.manifest.step, len(work.tensors), total, written, tuple(work.notes))


def _check_arguments(target: Path, form: str, weights_only: bool, dtype: str) -> None:
    wrong = []
    if os.path.lexists(target):
        wrong.append(f"{target} exists, and nothing is overwritten: name another target, or remove it")
    elif not os.path.isdir(target.parent):
        wrong.append(f"{target}: folder {target.parent} does not exist; create it, or name another")
    if dtype and not weights_only:
        wrong.append("--dtype needs --weights-only: moments and master weights belong to the weights as they are")
    if form != "safetensors" and target.name.endswith(consolidated.SUFFIX):
        wrong.append(f"{target}: --to {form} writes a folder, whose name does not end in {consolidated.SUFFIX}")
    if wrong:
        raise JobError(wrong)


def _verify(manifest: Manifest, progress: Progress) -> None:
    """Checks every digest, so that damage does not get new digests. Raises DamagedCheckpointError with all."""
    names = [name for name, facts in manifest.files.items() if facts.digest]
    total = sum(manifest.files[name].bytes for name in names)
    if wrong := digest_problems(manifest, names, meter(progress, "verifying", total)):
        raise DamagedCheckpointError("\n".join(wrong))


def _work(source: Reader, target: Path, weights_only: bool, dtype: str, most_bytes: float) -> _Work:
    tensors = {
        name: dataclasses.replace(tensor, boxes=())
        for name, tensor in source.manifest.tensors.items()
        if not (weights_only and kind_of(name))
    }
    if dtype:
        for name, tensor in tensors.items():
            if tensor.dtype in TYPES.values():
                tensors[name] = dataclasses.replace(tensor, dtype=TYPES[dtype])

    def read(name: str) -> Tensor:
        found, wanted = source.read(name), TORCH_DTYPES[tensors[name].dtype]
        if found.dtype == wanted:
            return found
        converted = found.to(wanted)
        if not is_finite(converted):
            raise CheckpointError(f"{source.manifest.path}: {name} exceeds the range of {dtype}, or is not finite")
        return converted

    directory = target.with_name(f".{target.name}.tmp-{secrets.token_hex(4)}")
    return _Work(source, target, directory, tensors, read, most_bytes)


def _require_space(target: Path, need: int) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < need * 1.01 + _MARGIN_BYTES:
        raise RunError(
            f"{target} could not be written: it needs {gib(need)}, and {target.parent} has {gib(free)} free; nothing "
            "was written: free some space, or name another folder"
        )


def _write_files(work: _Work, planned: list[PlannedFile], directory: Path, facts: dict[str, Any] | None) -> Manifest:
    """Writes consolidated files. Returns a manifest of them without step and metadata."""
    written = consolidated.write(directory, planned, work.read, facts, work.progress)
    tensors = {
        name: dataclasses.replace(tensor, boxes=((file.name, Box.of(tensor.shape)),))
        for file in planned
        for name, tensor in file.tensors.items()
    }
    return Manifest(directory, 0, False, {}, written, tensors)


def _to_safetensors(work: _Work) -> Path:
    if work.target.name.endswith(consolidated.SUFFIX):
        planned = [PlannedFile(work.target.name, work.tensors)]
        _write_files(work, planned, work.directory, work.facts)
        return work.directory / work.target.name
    facts = work.facts
    for stem, wanted in (("model", False), ("optimizer", True)):
        tensors = {name: tensor for name, tensor in work.tensors.items() if bool(kind_of(name)) == wanted}
        planned = plan(tensors, work.most_bytes, numbered(stem))
        _write_files(work, planned, work.directory, facts)
        if len(planned) > 1:
            text = json.dumps(consolidated.index(planned), indent=1)
            write_atomic(work.directory / f"{stem}{consolidated.INDEX}", text.encode())
        facts = None  # they stand in the first file
    _copy_tokenizer(work)
    return work.directory


def _to_dcp(work: _Work) -> Path:
    from phalanx.checkpoint import dcp  # imported here, because it takes long

    dcp.write(work.directory, work.tensors, work.read, work.facts, work.progress)
    _copy_tokenizer(work)
    return work.directory


def _prepare_run(work: _Work) -> None:
    """Checks that a run can resume from the tensors, and completes them. Raises CheckpointError."""
    manifest = work.source.manifest
    if "job" not in manifest.meta:
        raise CheckpointError(
            f"{manifest.path} has no job and no step, which a run's checkpoint needs: only what phalanx checkpoint "
            "convert has written can be converted back"
        )
    if wrong := problems(manifest.meta):
        raise CheckpointError(f"{manifest.path}: its metadata are not valid: {'; '.join(wrong)}")
    job = job_of(manifest)
    shapes = parameter_shapes(job.model, manifest.meta.get("vocab_size"))
    work.source.require(shapes)
    kinds = {kind for name in work.tensors if (kind := kind_of(name))}
    if lost := [name for name in _needed(job.optimizer, sorted(kinds), shapes) if name not in work.tensors]:
        raise CheckpointError(f"{manifest.path} lacks {len(lost)} tensors of the optimizer, such as {lost[0]}")
    if kinds or not manifest.meta.get("updates"):
        return
    work.notes.append("no optimizer state: a run that resumes from it begins with new moments")
    work.source.manifest = dataclasses.replace(manifest, meta=manifest.meta | {"updates": 0, "replicas": 1})
    if needs_master_weights(DTYPES[job.train.precision]):
        weights, read = dict(work.tensors), work.read
        work.tensors |= {f"master/{name}": dataclasses.replace(each, dtype="F32") for name, each in weights.items()}
        work.read = lambda name: read(name) if name in weights else read(name.removeprefix("master/")).float()


def _needed(optimizer: Optimizer, kinds: Iterable[str], shapes: Mapping[str, Shape]) -> Iterator[str]:
    """Yields the tensors that a state has which has some of these kinds: the optimizer's own of the parameters for
    which it keeps them, others of all."""
    own = set(kinds_of_state(optimizer, shapes))
    for name, shape in shapes.items():
        kept = {tensor.kind for tensor in state_tensors(optimizer, name, shape)}
        for kind in kinds:
            plain = kind.rpartition("/")[2]  # of one replica
            if plain in kept or plain not in own:
                yield f"{kind}/{name}"


def _to_run(work: _Work) -> Path:
    manifest, read = work.source.manifest, work.read

    def finite(name: str) -> Tensor:
        tensor = read(name)
        if not is_finite(tensor):
            raise CheckpointError(f"{manifest.path}: {name} holds NaN or infinity, and no checkpoint may")
        return tensor

    work.read = finite
    checkpoint = directory_of(work.directory / "checkpoints", manifest.step)
    checkpoint.mkdir(parents=True)
    planned = plan(work.tensors, work.most_bytes, lambda number, _: f"rank-{number - 1:05d}.safetensors")
    written = _write_files(work, planned, checkpoint, None)
    written = dataclasses.replace(written, step=manifest.step, finite=True, meta=manifest.meta)
    write_atomic(checkpoint / MANIFEST, written.text().encode())
    files.sync(checkpoint.parent)
    job = job_of(manifest)
    run = dataclasses.replace(job.run, dir=str(work.target.parent), name=work.target.name)
    origins = dict.fromkeys(leaves(), f"step {manifest.step}")
    text = as_yaml(LoadedJob(dataclasses.replace(job, run=run), origins))
    write_atomic(work.directory / "config.yaml", text.encode())
    write_atomic(work.directory / LATEST, f"checkpoints/{checkpoint.name}\n".encode())
    if not _copy_tokenizer(work):
        work.notes.append(f"no {TOKENIZER} in {manifest.path}: phalanx generate needs one in the run's directory")
    return work.directory


def _copy_tokenizer(work: _Work) -> bool:
    """Copies the tokenizer that lies in the source's folder, or in its run's. Returns whether there is one."""
    path = work.source.manifest.path
    file = (path.parent.parent if os.path.isfile(path / MANIFEST) else path) / TOKENIZER
    if not os.path.isfile(file):
        return False
    try:
        write_atomic(work.directory / TOKENIZER, read_bytes(file))
    except OSError as error:
        raise RunError(f"the tokenizer {file} could not be copied: {error}") from None
    return True
