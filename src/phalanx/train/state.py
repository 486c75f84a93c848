"""The state of a run: weights, optimizer and progress, saved to a checkpoint and loaded from one by all ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.blocks.parameters import parameter_shapes, trained_shapes
from phalanx.blocks.residual import INDEX, is_adapter
from phalanx.check.load import as_dict
from phalanx.checkpoint.inventory import check
from phalanx.checkpoint.manifest import Box, Manifest, job_of, require_resumable
from phalanx.checkpoint.parts import HeldTensor, Part, Share, held, is_finite, shares
from phalanx.checkpoint.shard_file import Reader
from phalanx.comm.agree import on_every_rank
from phalanx.config.fields import get
from phalanx.config.job import Job
from phalanx.errors import CheckpointError, DamagedCheckpointError
from phalanx.launch.watchdog import heartbeat
from phalanx.optimizers.catalogue import kinds
from phalanx.optimizers.entry import COMPENSATION, MASTER, POSITIVE, scale_of
from phalanx.parallel.compression import STATE as FACTORS
from phalanx.parallel.offload import on_host
from phalanx.parallel.parameter_shards import ParameterShard
from phalanx.partition.ramp import Ramp
from phalanx.train.guard import History
from phalanx.train.learning_rate import ScheduleEnd, end_of, resumed_end
from phalanx.train.optimizers.narrow import table
from phalanx.train.run_directory import extension_facts
from phalanx.train.step import Stepper

log = logging.getLogger(__name__)

FACTORS_DEPEND_ON = (
    *("model.lora.rank", "train.precision", "train.gradients", "layout.compression", "layout.compression_rank"),
    *("layout.dp_replicate", "layout.dp_shard", "layout.cp", "layout.tp", "layout.pp", "layout.ep", "layout.zero"),
    *("layout.schedule", "layout.pp_chunks", "layout.pp_cut", "layout.tiles", "layout.tile"),
)
"""Fields that decide which matrices, or parts of them, a rank has errors of."""


@dataclass
class TrainState:
    """The complete state that determines the next step."""

    stepper: Stepper
    data_fingerprint: str
    """Identifies the token shards: a run does not resume with other data."""
    vocab_size: int
    step: int = 0
    """Steps done."""
    samples: int = 0
    """Sequences read: the position in the order of samples."""
    val_loss: float | None = None
    """The last validation loss."""
    val_step: int | None = None
    """Steps done when it was measured."""
    job: Job = field(init=False)
    """The run's; the stepper's is that of its own ranks where replicas come and go."""
    schedule_end: ScheduleEnd = field(init=False)
    """Where the learning rate reaches its minimum."""
    history: History = field(init=False)
    """The guard's record of recent steps."""

    def __post_init__(self) -> None:
        self.job = self.stepper.job
        self.history = History(self.stepper.job.guard)
        self.schedule_end = ScheduleEnd(end_of(self.stepper.job))

    def advance(self, step: int, ramp: Ramp) -> None:
        """Records that `step` steps are done, those since the last call over the samples of `ramp`."""
        self.samples += ramp.samples(step) - ramp.samples(self.step)
        self.step = step

    def validated(self, loss: float) -> None:
        self.val_loss, self.val_step = loss, self.step

    def shares(self) -> list[Share]:
        """Returns what this rank writes of the state, of every tensor that it holds."""
        return list(shares(self._held()))

    def names(self) -> list[str]:
        """Returns the names of all tensors of the state on all ranks, the parameters first."""
        stepper, job = self.stepper, self.stepper.job
        names = parameter_shapes(job.model, self.vocab_size)
        own = kinds(job.optimizer, trained_shapes(job.model, self.vocab_size))
        every = [*own, MASTER, *(stepper.sync.state_tensors() if stepper.sync else ())]
        prefixes = ["", *(f"{kind}/" for kind in every)]
        prefixes += [_of_replica(replica, kind) for replica in range(1, self.replicas) for kind in own]
        ranks = stepper.mesh.axis("world").size if job.layout.compression == "powersgd" else 0
        errors = [f"{FACTORS}/rank{rank}" for rank in range(ranks)]
        return [prefix + name for prefix in prefixes for name in names] + errors

    def load(self, path: Path) -> None:
        """Restores the state from a checkpoint, together with all other ranks: each reads the boxes that it holds.

        Raises DamagedCheckpointError on all ranks, which leaves the state undefined, if what any rank reads is damaged
        or holds NaN; CheckpointError if the checkpoint belongs to other data or another model."""
        self.load_from(Reader(check(path, verify=False)))

    def load_from(self, source: Reader) -> None:
        """Restores the state from the tensors of a checkpoint, as `load` does."""
        manifest = source.manifest
        on_every_rank(lambda: self._read(source))
        self.stepper.reload()
        self._continue(manifest.meta, manifest.step)
        job, end = self.stepper.job, manifest.meta.get("schedule_end")
        self.schedule_end = resumed_end(job, job_of(manifest), self.step, end)

    def _continue(self, meta: Mapping[str, Any], step: int) -> None:
        self.stepper.loss_scale.load_state(meta["loss_scale"])
        self.step, self.samples = step, meta["samples"]
        self.val_loss, self.val_step = meta["val_loss"], meta["val_step"]
        self.history.load_state(meta["guard"])

    def tensors(self) -> list[Tensor]:
        """Returns every tensor of this rank's state, in an order that ranks with the same part of it share."""
        return [held.value.detach() for held in self._held()]

    def adopt(self, meta: Mapping[str, Any], step: int) -> list[Tensor]:
        """Continues after step `step` with another rank's `meta`; returns `tensors`, which are to be filled with the
        other's. Then call `reload` of the stepper."""
        self.stepper.optimizer.make_state(meta["updates"])
        self._continue(meta, step)
        self.schedule_end = replace(self.schedule_end, step=meta["schedule_end"])
        return self.tensors()

    def start_from(self, source: Reader) -> None:
        """Takes over the parameters of another run or program, together with all other ranks: each reads the boxes that
        it holds. The optimizer, and everything else of the state, is that of a new run.

        Raises CheckpointError on all ranks if parameters are missing, extra or of another shape;
        DamagedCheckpointError if what any rank reads is damaged or holds NaN."""
        stepper = self.stepper
        with source:
            on_every_rank(lambda: self._take_over(source))
            stepper.reload()  # all copies of the parameters
            stepper.optimizer.restart()
            on_every_rank(lambda: self._take_over_masters(source))
        stepper.reload()

    def _take_over(self, source: Reader) -> None:
        world = self.stepper.mesh.axis("world")
        if self.stepper.job.checkpoint.verify:
            source.verify_share(world.rank, world.size)
        shapes = parameter_shapes(self.stepper.job.model, self.vocab_size)
        source.require({name: shape for name, shape in shapes.items() if self._is_there(name, source)})
        shards = [shard for shard in self.stepper.replica.shards if self._is_there(shard.whole_name, source)]
        _fill_all(held(shards, {f.name: f.value for f in shards}), source)

    def _is_there(self, name: str, source: Reader) -> bool:
        """Returns whether a run takes a parameter over: of adapters and indexers that begin, and of a reward's head,
        none."""
        known = source.manifest.tensors
        if self.stepper.job.model.reward and name == "head.weight":
            return name in known and known[name].shape[0] == 1
        begins = is_adapter(name) or f".{INDEX}" in name
        return not begins or name in known

    def _take_over_masters(self, source: Reader) -> None:
        """Fills master weights with what the parameters of a half precision were rounded from."""
        optimizer = self.stepper.optimizer
        masters = optimizer.state_tensors().get(MASTER, {})
        prefix = f"{MASTER}/" if f"{MASTER}/{next(iter(source.names()))}" in source.manifest.tensors else ""
        places = [shard for shard in optimizer.places(MASTER) if self._is_there(shard.whole_name, source)]
        _fill_all(held(places if masters else (), masters, prefix), source)

    def restart(self) -> None:
        """Returns to the beginning of the run."""
        self.stepper.restart()
        self.step, self.samples, self.val_loss, self.val_step = 0, 0, None, None
        self.history.restart()
        self.schedule_end = ScheduleEnd(end_of(self.stepper.job))

    def _factors(self) -> Iterator[HeldTensor]:
        """Yields PowerSGD's errors and factors on this rank, if there are any."""
        compression = self.stepper.replica.compression
        if compression is not None and self.stepper.job.layout.compression == "powersgd":
            place = compression.held(self.stepper.mesh.axis("world").rank)
            yield HeldTensor(f"{FACTORS}/{place.name}", place, place.value)

    def _read_factors(self, manifest: Manifest) -> Iterator[HeldTensor]:
        """Yields PowerSGD's state where the checkpoint has that of this layout. Otherwise it begins anew."""
        mine = list(self._factors())
        before, now = job_of(manifest), self.stepper.job
        same = all(get(before, path) == get(now, path) for path in FACTORS_DEPEND_ON)
        if mine and same and mine[0].name in manifest.tensors:
            yield from mine
        elif mine:
            assert self.stepper.replica.compression is not None, "has state"
            self.stepper.replica.compression.restart()
            if self.stepper.mesh.axis("world").rank == 0:
                log.warning(
                    "compression=powersgd: the error feedback of checkpoint %s belongs to another layout or is absent; "
                    "it begins anew, without the gradients that it held back",
                    manifest.path,
                )

    @property
    def replicas(self) -> int:
        """The number of replicas whose optimizers differ."""
        return self.stepper.independent_replicas if self.stepper.sync else 1

    def meta(self) -> dict[str, Any]:
        """Returns what a checkpoint holds of the state beside tensors."""
        stepper = self.stepper
        return {
            "job": as_dict(self.job),
            "samples": self.samples,
            "updates": stepper.optimizer.updates,
            "replicas": self.replicas,
            "loss_scale": stepper.loss_scale.state(),
            "data": self.data_fingerprint,
            "vocab_size": self.vocab_size,
            "val_loss": self.val_loss,
            "val_step": self.val_step,
            "guard": self.history.state(),
            "schedule_end": self.schedule_end.step,
            "extensions": extension_facts(),
        }

    def _held(self) -> Iterator[HeldTensor]:
        """Yields everything that this rank holds of the state."""
        stepper = self.stepper
        replicas = stepper.mesh.axis(stepper.job.layout.replica_axis)
        same = replicas.rank, replicas.size
        yield from held(stepper.replica.shards, {f.name: f.value for f in stepper.replica.shards}, "", *same)
        if stepper.job.layout.sync == "asp":
            same = 0, 1  # only the first replica, which serves, has an optimizer
        for kind, tensors in stepper.optimizer.state_tensors().items():
            places = stepper.optimizer.places(kind)
            if self.replicas > 1 and kind != MASTER:  # each replica's are its own
                yield from held(places, tensors, _of_replica(replicas.rank, kind))
            else:
                yield from held(places, tensors, f"{kind}/", *same)
        for kind, tensors in stepper.sync.state_tensors().items() if stepper.sync else ():
            yield from held(stepper.optimizer.shards, tensors, f"{kind}/", *same)
        yield from self._factors()

    def _read(self, source: Reader) -> None:
        """Reads this rank's part of a checkpoint. Ranks share the verification of the digests."""
        manifest, world = source.manifest, self.stepper.mesh.axis("world")
        meta = manifest.meta
        require_resumable(manifest)
        if meta["data"] != self.data_fingerprint:
            raise CheckpointError(
                f"checkpoint {manifest.path} was trained on other data (shards {meta['data'][:12]}…, now "
                f"{self.data_fingerprint[:12]}…); restore the corpus, or start over with --fresh"
            )
        if self.stepper.job.checkpoint.verify:
            source.verify_share(world.rank, world.size)
        optimizer, sync = self.stepper.optimizer, self.stepper.sync
        # With another number of replicas, each takes the state of one in turn.
        replica = self.stepper.mesh.coordinates[self.stepper.job.layout.replica_axis] % meta["replicas"] if sync else 0
        shards = self.stepper.replica.shards
        with source as tensors:
            tensors.require(parameter_shapes(self.stepper.job.model, self.vocab_size))
            state = [*held(shards, {f.name: f.value for f in shards})]
            own = optimizer.make_state(meta["updates"])
            # A run that becomes DiLoCo begins without an outer momentum.
            for kind, of_kind in sync.state_tensors().items() if sync else ():
                if all(f"{kind}/{shard.whole_name}" in manifest.tensors for shard in optimizer.shards):
                    state += held(optimizer.shards, of_kind, f"{kind}/")
            _fill_all([*state, *self._read_factors(manifest)], tensors)
            for kind, of_kind in own.items():
                for shard in optimizer.places(kind):
                    heartbeat.beat()
                    self._fill_state(kind, shard, of_kind[shard.name], own, replica, tensors)

    @torch.no_grad()
    def _fill_state(
        self,
        kind: str,
        shard: ParameterShard,
        value: Tensor,
        own: Mapping[str, Mapping[str, Tensor]],
        replica: int,
        tensors: Reader,
    ) -> None:
        """Reads a shard's tensor of a kind, in whatever format the checkpoint has it; `own` are those of all kinds."""
        name, known = shard.whole_name, tensors.manifest.tensors

        def read(kind: str, into: Tensor) -> Tensor:
            prefix = "" if not kind else f"{kind}/" if kind == MASTER else _of_replica(replica, kind)
            fill(HeldTensor(prefix + name, shard, into), tensors)
            return into

        scale, codes = scale_of(kind), own.get(scale_of(kind), {}).get(shard.name)
        has_scale = _of_replica(replica, scale) + name in known
        if kind == MASTER and f"{MASTER}/{name}" not in known:
            read("", value)
            if f"{COMPENSATION}/{name}" in known:
                value += read(COMPENSATION, torch.empty_like(value))
        elif kind == COMPENSATION and f"{COMPENSATION}/{name}" not in known:
            if f"{MASTER}/{name}" in known:  # else nothing has been cut off
                wide = torch.empty_like(value, dtype=torch.float32)
                value.copy_(read(MASTER, wide) - shard.value.view(value.shape))
        elif kind.endswith("_scale") and _of_replica(replica, kind) + name not in known:
            pass  # the codes' turn has set it, too
        elif codes is not None and not has_scale:
            wide = read(kind, torch.empty(value.shape, dtype=codes.dtype, device=value.device))
            if blocks := len(codes):
                coder = table(value.device, codes.dtype, signed=kind != POSITIVE)
                coder.quantise(wide.view(blocks, -1), value.view(blocks, -1), codes)
        elif codes is None and has_scale:
            held_codes = HeldTensor(_of_replica(replica, kind) + name, shard, value)
            if shard.tensor_slice.padding:
                value.zero_()
            for part in held_codes.parts():
                with on_host():
                    part.value.copy_(decoded(part, _of_replica(replica, scale) + name, tensors, kind != POSITIVE))
        else:
            read(kind, value)


def decoded(part: Part, scale: str, tensors: Reader, signed: bool) -> Tensor:
    """Returns the elements of a part of moments that a checkpoint holds as codes of 8 bits, with scales of this name:
    the part may cut their blocks."""
    known, box = tensors.manifest.tensors, part.box
    block = known[part.tensor].shape[-1] // known[scale].shape[-1]
    first, last = box.offsets[-1] // block, -(-(box.offsets[-1] + box.sizes[-1]) // block)
    scales = tensors.read(scale, Box((*box.offsets[:-1], first), (*box.sizes[:-1], last - first)))
    each = scales.repeat_interleave(block, -1)[..., box.offsets[-1] - first * block :][..., : box.sizes[-1]]
    codes, values = tensors.read(part.tensor, box), table(scales.device, scales.dtype, signed=signed).values
    return values[codes.long()] * each


def _fill_all(state: Iterable[HeldTensor], tensors: Reader) -> None:
    for tensor in state:
        heartbeat.beat()
        fill(tensor, tensors)


@torch.no_grad()
def fill(tensor: HeldTensor, tensors: Reader) -> None:
    """Reads this rank's elements of a tensor of the state; padding becomes zero."""
    if tensor.shard.tensor_slice.padding:
        tensor.value.zero_()
    for part in tensor.parts():
        with on_host():
            found = tensors.read(part.tensor, part.box)
        if not is_finite(found):
            raise DamagedCheckpointError(f"checkpoint {tensors.manifest.path}: {part.tensor} holds NaN or infinity")
        part.value.copy_(found)


def _of_replica(replica: int, kind: str) -> str:
    """Returns the prefix of a kind of tensors that differ between replicas."""
    return f"replica{replica}/{kind}/" if replica else f"{kind}/"
