"""Converts the state of a run: to and from consolidated safetensors, checkpoints of torch's DCP, and runs.

Tensors go one at a time from the source to the target, so that memory is bounded by two of them. The target is written
under a temporary name beside its own and renamed once it is on the disk; nothing that exists is overwritten.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.blocks.parameters import parameter_shapes, trained_shapes
from phalanx.blocks.residual import A, B, is_adapter
from phalanx.bounded import read_bytes
from phalanx.checkpoint import consolidated
from phalanx.checkpoint.consolidated import PlannedFile, numbered, plan
from phalanx.checkpoint.inventory import digest_problems
from phalanx.checkpoint.manifest import MANIFEST, Box, Manifest, StoredTensor, job_of, kind_of, problems
from phalanx.checkpoint.new_target import MOST_FILE_BYTES, WrittenFiles, target_problems, write_run, written_beside
from phalanx.checkpoint.parts import is_finite
from phalanx.checkpoint.shard_file import TORCH_DTYPES, Reader
from phalanx.config.job import Optimizer
from phalanx.config.model import LoRA
from phalanx.config.precision import STORED
from phalanx.data.files import Progress, meter, silent, write_atomic
from phalanx.data.tokenizer import FILE as TOKENIZER
from phalanx.errors import CheckpointError, DamagedCheckpointError, JobError, RunError
from phalanx.optimizers.catalogue import keeps_masters, state_tensors
from phalanx.optimizers.catalogue import kinds as kinds_of_state
from phalanx.optimizers.entry import Shape
from phalanx.parallel.compression import STATE as FACTORS
from phalanx.partition.derived import PARAMETER_BYTES


def merged(source: Reader) -> Reader:
    """Returns the parameters of a checkpoint with its adapters merged into their matrices; without adapters `source`
    itself, optimizer state included. Raises CheckpointError if the checkpoint states no job that this version reads."""
    meta = source.manifest.meta
    if not any(is_adapter(name) for name in source.manifest.tensors):
        return source
    if "job" not in meta:
        raise CheckpointError(
            f"{source.manifest.path} has adapters and no job, which states their alpha: merge them from the run's own "
            "checkpoint, or from what phalanx checkpoint convert has written"
        )
    return MergedReader(source)


class MergedReader(Reader):
    """The tensors of the model without adapters."""

    def __init__(self, source: Reader):
        manifest = source.manifest
        self.source, job = source, job_of(manifest)
        self.scale = job.model.lora.scale
        tensors = {
            name: tensor for name, tensor in manifest.tensors.items() if not kind_of(name) and not is_adapter(name)
        }
        model = manifest.meta["job"]["model"] | {"lora": asdict(LoRA())}
        meta = manifest.meta | {"job": manifest.meta["job"] | {"model": model}}
        super().__init__(replace(manifest, meta=meta, tensors=tensors))

    def __exit__(self, *error: object) -> None:
        self.source.__exit__(*error)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        if name not in self.manifest.tensors:
            raise CheckpointError(f"checkpoint {self.manifest.path} has no parameter {name}")
        base, layer = self.source.read(name, box), name.removesuffix(".weight")
        shapes = self.source.manifest.tensors
        if (adapter := f"{layer}.{A}.weight") not in shapes:
            return base
        box = box or Box.of(shapes[name].shape)
        rank = shapes[adapter].shape[-2]
        *stack, rows, columns = zip(box.offsets, box.sizes, strict=True)
        a = self.source.read(adapter, _box(*stack, (0, rank), columns))
        b = self.source.read(f"{layer}.{B}.weight", _box(*stack, rows, (0, rank)))
        wide = torch.promote_types(base.dtype, torch.float32)
        return (base.to(wide) + self.scale * (b.to(wide) @ a.to(wide))).to(base.dtype)


def _box(*ranges: tuple[int, int]) -> Box:
    """Returns the box of some ranges, (offset, size) of each dimension."""
    offsets, sizes = zip(*ranges, strict=True)
    return Box(offsets, sizes)


FORMS = ("safetensors", "dcp", "phalanx")


@dataclass(frozen=True)
class Converted(WrittenFiles):
    """What a conversion wrote."""

    form: str


@dataclass
class _Work:
    """What is written where."""

    source: Reader
    target: Path
    directory: Path
    """The temporary directory, once there is one."""
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
    merge_lora: bool = False,
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
        merge_lora: write the parameters with their adapters merged into them, and no optimizer state.
        dtype: the type of the parameters, one of STORED; their own if it is empty.
        most_file_bytes: a larger state is divided into several files, if the target is a folder.
        progress: gets the bytes done.

    Raises JobError if the arguments do not go together or the target exists; CheckpointError if the source is damaged
    or lacks what the form needs; RunError if the target cannot be written.
    """
    wrong = list(target_problems(target))
    if dtype and not (weights_only or merge_lora):
        wrong.append(
            "--dtype needs --weights-only or --merge-lora: moments and master weights belong to the weights as they are"
        )
    if form != "safetensors" and target.name.endswith(consolidated.SUFFIX):
        wrong.append(f"{target}: --to {form} writes a folder, whose name does not end in {consolidated.SUFFIX}")
    if wrong:
        raise JobError(wrong)
    verify(source.manifest, progress)
    if merge_lora:
        if (whole := merged(source)) is source:
            raise JobError(f"--merge-lora: {source.manifest.path} has no adapters")
        source = whole
    work = _work(source, target, weights_only, dtype, most_file_bytes)
    write = {"safetensors": _to_safetensors, "dcp": _to_dcp, "phalanx": _to_run}[form]
    if form == "phalanx":
        _prepare_run(work)
    total = sum(tensor.nbytes for tensor in work.tensors.values())
    work.progress = meter(progress, "writing", total)
    with written_beside(target, total) as new:
        work.directory = new.directory
        new.product = write(work)
        paths = [path for path in sorted(work.directory.rglob("*")) if path.is_file()]
        written = {str(path.relative_to(work.directory)): path.stat().st_size for path in paths}
    return Converted(target, source.manifest.step, len(work.tensors), total, written, tuple(work.notes), form)


def verify(manifest: Manifest, progress: Progress) -> None:
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
            if tensor.dtype in STORED.values():
                tensors[name] = dataclasses.replace(tensor, dtype=STORED[dtype])

    def read(name: str) -> Tensor:
        return as_type(source.read(name), tensors[name].dtype, f"{source.manifest.path}: {name}")

    return _Work(source, target, target, tensors, read, most_bytes)


def as_type(tensor: Tensor, dtype: str, whose: str) -> Tensor:
    """Returns a tensor in a type, named as in safetensors files. Raises CheckpointError, which begins with `whose`, if
    it is not finite in another type than its own."""
    wanted = TORCH_DTYPES[dtype]
    if tensor.dtype == wanted:
        return tensor
    converted = tensor.to(wanted)
    if not is_finite(converted):
        named = {stored: name for name, stored in STORED.items()}.get(dtype, dtype)
        raise CheckpointError(f"{whose} exceeds the range of {named}, or is not finite")
    return converted


def _to_safetensors(work: _Work) -> Path:
    if work.target.name.endswith(consolidated.SUFFIX):
        planned = [PlannedFile(work.target.name, work.tensors)]
        consolidated.write(work.directory, planned, work.read, work.facts, work.progress)
        return work.directory / work.target.name
    facts = work.facts
    for stem, wanted in (("model", False), ("optimizer", True)):
        tensors = {name: tensor for name, tensor in work.tensors.items() if bool(kind_of(name)) == wanted}
        planned = plan(tensors, work.most_bytes, numbered(stem))
        consolidated.write(work.directory, planned, work.read, facts, work.progress)
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
    kinds = {kind for name in work.tensors if (kind := kind_of(name)) and kind != FACTORS}  # those are a rank's
    trained = trained_shapes(job.model, manifest.meta.get("vocab_size"))
    if lost := [name for name in _needed(job.optimizer, sorted(kinds), trained) if name not in work.tensors]:
        raise CheckpointError(f"{manifest.path} lacks {len(lost)} tensors of the optimizer, such as {lost[0]}")
    if kinds or not manifest.meta.get("updates"):
        return
    work.notes.append("no optimizer state: a run that resumes from it begins with new moments")
    work.source.manifest = dataclasses.replace(manifest, meta=manifest.meta | {"updates": 0, "replicas": 1})
    if keeps_masters(job.optimizer, PARAMETER_BYTES[job.train.precision]):
        weights, read = {name: tensor for name, tensor in work.tensors.items() if name in trained}, work.read
        work.tensors |= {f"master/{name}": dataclasses.replace(each, dtype="F32") for name, each in weights.items()}
        work.read = lambda name: read(name.removeprefix("master/")).float() if kind_of(name) else read(name)


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
    manifest = work.source.manifest
    write_run(
        work.directory,
        work.target,
        manifest,
        job_of(manifest),
        work.tensors,
        work.read,
        work.progress,
        origin=f"step {manifest.step}",
        most_bytes=work.most_bytes,
    )
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
