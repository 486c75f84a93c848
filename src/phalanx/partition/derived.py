"""Quantities derived from the fields of a layout: the batch equation, stages, recomputation by layer, tiers, and the
second copy of parameters."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import Any, Literal, NamedTuple, get_args

from phalanx.blocks.parameters import Shapes, parameter_shapes
from phalanx.config.layout import Layout, Recompute
from phalanx.config.model import ModelConfig
from phalanx.config.precision import FORMATS
from phalanx.errors import JobError
from phalanx.nearest import did_you_mean, divisors
from phalanx.schedule import catalogue, file
from phalanx.schedule.schedule import Schedule
from phalanx.units import MIB

DEFAULT_GLOBAL_BATCH = 16
"""Default sequences per step: independent of the layout, so that the loss curve is too."""


@dataclass(frozen=True)
class Batch:
    """The batch of one optimizer step, in sequences: global, micro-batch, accumulation and data ranks."""

    global_batch: int
    micro_batch: int
    accumulation: int
    data_ranks: int

    def equation(self) -> str:
        return (
            f"global batch {self.global_batch} = micro-batch {self.micro_batch} × accumulation {self.accumulation}"
            f" × data ranks {self.data_ranks}"
        )


def solve(global_batch: int, layout: Layout) -> Batch:
    """Solves the batch equation for the fields that are open (0).

    If both the micro-batch and the accumulation are open, the micro-batch is all of a data rank's sequences. In a
    pipeline that would leave all ranks but one idle, so it gets the smallest accumulation that is at least 2 × pp and
    divides those sequences, or, if there is none, micro-batches of one sequence.

    Raises ValueError with the equation, its values and the nearest legal global batches if they disagree.
    """
    ranks = layout.data_ranks
    micro, accumulation = layout.micro_batch, layout.accumulation
    if not global_batch and not micro:
        global_batch = DEFAULT_GLOBAL_BATCH
    if not global_batch:
        return Batch(micro * (accumulation or 1) * ranks, micro, accumulation or 1, ranks)
    known = ranks * (micro or 1) * (accumulation or 1)
    if global_batch % known or (micro and accumulation and global_batch != known):
        raise ValueError(_disagreement(global_batch, layout, known))
    rest = global_batch // known
    if not micro and not accumulation:
        accumulation = _filling_accumulation(layout.pp, rest)
        return Batch(global_batch, rest // accumulation, accumulation, ranks)
    return Batch(global_batch, micro or rest, accumulation or rest, ranks)


def _filling_accumulation(pp: int, sequences: int) -> int:
    """Returns the accumulation that keeps a pipeline busy, for a data rank with `sequences` sequences."""
    if pp == 1:
        return 1
    return next((n for n in range(2 * pp, sequences) if sequences % n == 0), sequences)


def _disagreement(global_batch: int, layout: Layout, known: int) -> str:
    micro = f"micro_batch {layout.micro_batch}" if layout.micro_batch else "micro_batch ?"
    accumulation = f"accumulation {layout.accumulation}" if layout.accumulation else "accumulation ?"
    outside = "".join(f"{name} {size} × " for name, size in layout.axes.sizes.items())
    ranks = f"data ranks {layout.data_ranks} ({outside}dp_replicate {layout.dp_replicate} × dp_shard {layout.dp_shard})"
    if layout.micro_batch and layout.accumulation:
        legal = f"global_batch {known} agrees"
    else:
        below = global_batch // known * known
        legal = f"nearest legal global_batch: {f'{below} or ' if below else ''}{below + known}"
    return f"global_batch {global_batch} ≠ {micro} × {accumulation} × {ranks}: {legal}"


def is_file(schedule: str) -> bool:
    """Returns whether `layout.schedule` is a path and not the name of a schedule."""
    return schedule not in catalogue.SCHEDULES and (
        schedule.endswith(".csv") or "/" in schedule or os.path.isfile(schedule)
    )


def schedule_of(layout: Layout, micro_batches: int) -> Schedule:
    """Returns the schedule for `micro_batches` micro-batches per step (a file states its own). Raises JobError if they
    do not match it, or if the file is not a schedule."""
    if is_file(layout.schedule):
        return file.read(layout.schedule)
    return catalogue.build(layout.schedule, layout.pp, micro_batches, layout.pp_chunks, layout.pp_slices)


def slices_of(layout: Layout) -> int:
    """Returns into how many slices a layout's schedule cuts sequences. Raises JobError if a file is not a schedule."""
    if layout.pp == 1:
        return 1
    if is_file(layout.schedule):
        return file.read(layout.schedule).slices
    return layout.pp_slices or catalogue.SCHEDULES[layout.schedule].slices


def halved(global_batch: int, layout: Layout) -> int:
    """Returns the sequences of a micro-batch of whose halves each tensor rank has parts, as they compute in turn
    (layout.ep_overlap); 0: ranks have parts of whole micro-batches."""
    return solve(global_batch, layout).micro_batch if layout.ep > 1 and layout.ep_overlap and layout.sp else 0


def splits_backward(layout: Layout) -> bool:
    """Returns whether a layout's schedule splits backward passes, so that weight gradients are deferred. Raises
    JobError if a file is not a schedule."""
    if layout.pp == 1:
        return False
    if is_file(layout.schedule):
        programs = file.read(layout.schedule).programs
        return any(action.kind == "W" for program in programs for action in program)
    return catalogue.SCHEDULES[layout.schedule].splits


def flushes(layout: Layout) -> bool:
    """Returns whether every step begins with an empty pipeline; true without a pipeline. Raises JobError if a file is
    not a schedule."""
    if layout.pp == 1:
        return True
    if is_file(layout.schedule):
        return file.read(layout.schedule).steps == 1
    return catalogue.SCHEDULES[layout.schedule].steps == 1


def stashes(layout: Layout) -> bool:
    """Returns whether each stage is updated after each micro-batch, with stashed weights."""
    return layout.pp > 1 and layout.schedule in catalogue.SCHEDULES and catalogue.SCHEDULES[layout.schedule].stashes


def overlaps(layout: Layout) -> bool:
    """Returns whether steps overlap, in a pipeline without a flush; a wrong schedule has a message of its own."""
    try:
        return not flushes(layout)
    except (JobError, KeyError):
        return False


Mode = Recompute
MODES: tuple[Mode, ...] = get_args(Mode)


class RecomputeRun(NamedTuple):
    """Consecutive layers with the same recomputation."""

    layers: int
    mode: Mode

    def __str__(self) -> str:
        return f"{self.layers}*{self.mode}"


def parse(text: str) -> tuple[RecomputeRun, ...]:
    """Parses `layout.recompute_cut` such as "8*full+4*selective+20*none". Raises JobError for any other form."""
    runs = []
    for part in text.replace(" ", "").split("+"):
        written = re.fullmatch(r"([0-9]{1,9})\*([a-z]+)", part)
        if not written:
            raise JobError(
                f"{text!r} is not a list of runs of layers; write counts and modes joined by plus signs, such as "
                "8*full+4*selective+20*none"
            )
        layers, mode = int(written[1]), written[2]
        if mode not in MODES:
            raise JobError(
                f"{part}: {mode!r} is not a recomputation mode{did_you_mean(mode, MODES)} (known: {', '.join(MODES)})"
            )
        if not layers:
            raise JobError(f"{part} has no layers: remove it")
        runs.append(RecomputeRun(layers, mode))
    return tuple(runs)


@lru_cache(1024)
def modes(text: str, n_layers: int) -> tuple[Mode, ...]:
    """Returns the mode of every layer, from a cut or from one mode for all (`written`). Raises JobError with the
    nearest legal cut if the cut has another number of layers."""
    if text in MODES:
        return (text,) * n_layers
    runs = parse(text)
    total = sum(run.layers for run in runs)
    if total != n_layers:
        raise JobError(f"{text} = {total} layers, the model has {n_layers}; nearest legal: {_fitted(runs, n_layers)}")
    return tuple(run.mode for run in runs for _ in range(run.layers))


def written(layout: Layout) -> str:
    """Returns the recomputation as the layout states it: the cut if it is set, else the mode, or the budget in
    digits."""
    return layout.recompute_cut or str(layout.recompute)


def legal_modes(tiles: int) -> tuple[Mode, ...]:
    """Returns the modes of blocks that may run in tiles: tiles of an MLP are not gathered once more."""
    return tuple(mode for mode in MODES if tiles == 1 or mode != "mlp")


def with_modes(layout: Layout, every: Sequence[Mode]) -> Layout:
    """Returns the layout with these modes of its layers: one for all, or a cut."""
    runs = [RecomputeRun(len(list(run)), mode) for mode, run in groupby(every)]
    if len(runs) == 1:
        return replace(layout, recompute=runs[0].mode, recompute_cut="")
    return replace(layout, recompute="none", recompute_cut="+".join(map(str, runs)))


def recompute_of(layout: Layout, layer: int, n_layers: int) -> Mode:
    """Returns the mode of one layer. Raises JobError if the cut does not match the number of layers."""
    return modes(written(layout), n_layers)[layer]


def uniform_recompute(layout: Layout, mode: Mode) -> Layout:
    """Returns the layout with one recomputation mode in all layers."""
    return replace(layout, recompute=mode, recompute_cut="") if layout.recompute_cut else layout


def _fitted(runs: tuple[RecomputeRun, ...], n_layers: int) -> str:
    """Returns the runs as text, the last ones lengthened, shortened or removed so that they have `n_layers` layers."""
    left, found = n_layers, list[RecomputeRun]()
    for run in runs:
        if left:
            found.append(RecomputeRun(min(run.layers, left), run.mode))
            left -= found[-1].layers
    found[-1] = RecomputeRun(found[-1].layers + left, found[-1].mode)
    return "+".join(map(str, found))


def parse_cut(text: str) -> tuple[int, ...]:
    """Parses `layout.pp_cut`, the layers of each stage, such as "3+5+4+4". Raises JobError for any other form."""
    plain = text.replace(" ", "")
    if not re.fullmatch(r"[0-9]{1,9}(\+[0-9]{1,9})*", plain):
        raise JobError(
            f"{text!r} is not a list of layers per stage; write them with a plus between them, such as 3+5+4+4"
        )
    return tuple(int(layers) for layers in plain.split("+"))


def written_stages(text: str, stages: int, layers: int, together: int = 1) -> tuple[range, ...]:
    """Returns the layers of each stage by `layout.pp_cut`, for a pipeline of `stages` stages and a model of `layers`
    layers, of which the last ones belong `together` in one stage. Raises JobError with every reason why it does not
    match them."""
    sizes = parse_cut(text)
    problems = []
    if len(sizes) != stages:
        problems.append(f"{text} are {len(sizes)} stages, the pipeline has {stages}")
    if 0 in sizes:
        problems.append(
            f"{text} leaves stage {sizes.index(0)} without a layer: embedding and head belong to the stages of the "
            "first and the last layer, so it would have no weights and only pass on its input"
        )
    if sum(sizes) != layers:
        problems.append(f"{text} = {sum(sizes)} layers, the model has {layers}")
    if 0 < sizes[-1] < together:
        problems.append(
            f"{text} leaves {together - sizes[-1]} of the last {together} layers to earlier stages: modules for "
            "further tokens, or layers that share keys, belong to one stage"
        )
    if problems:
        fits = stages <= layers - together + 1
        fair = "+".join(str(len(part)) for part in even(layers, stages, together)) if fits else ""
        raise JobError([f"{problem}{f'; legal: {fair}' if fair else ''}" for problem in problems])
    return ranges(sizes)


def even(layers: int, stages: int, together: int = 1) -> tuple[range, ...]:
    """Distributes layers evenly, with one more in the later stages, which have fewer micro-batches in flight; the last
    layers, so many `together`, belong to the last stage."""
    ends = [(s + 1) * layers // stages for s in range(stages - 1)]
    if stages > 1 and ends[-1] > layers - together:
        ends = [(s + 1) * (layers - together) // (stages - 1) for s in range(stages - 1)]
    return tuple(range(start, end) for start, end in pairwise((0, *ends, layers)))


def ranges(sizes: Sequence[int]) -> tuple[range, ...]:
    """Returns the layers of each stage, if stage s has `sizes[s]` of them."""
    return tuple(range(start, end) for start, end in pairwise(accumulate(sizes, initial=0)))


def stage_shapes(model: ModelConfig, stages: Iterable[range], vocab_size: int | None = None) -> Shapes:
    """Returns name and whole shape of every parameter on a rank with these stages, in the order of the module tree. If
    the last stage computes with the embedding (a tied head, model.mtp), it holds `embed.weight` too: a copy whose
    gradient the two ranks sum."""
    layers = {layer for stage in stages for layer in stage}
    first, last = 0 in layers, model.n_layers - 1 in layers
    outside = {"embed": first or (last and model.embeds_at_end), **dict.fromkeys(("positions", "layer_inputs"), first)}
    outside |= {"final_norm": last, "head": last}
    return {
        name: shape
        for name, shape in parameter_shapes(model, vocab_size).items()
        if outside.get(name.split(".")[0], False) or (name.startswith("blocks.") and int(name.split(".")[1]) in layers)
    }


PARAMETER_BYTES: dict[str, int] = {name: each.bytes for name, each in FORMATS.items()}
"""Bytes per element of a parameter, by `train.precision`."""
BUFFERS = 3
"""Buffers through which state in files passes: one is read, one updated, one written."""
BUFFER_BYTES = 64 * MIB
"""Bytes of state in one buffer: requests of tens of MiB reach a disk's bandwidth."""
Tier = Literal["device", "host", "disk"]
Part = Literal["optimizer", "parameters", "activations"]
PARTS: tuple[Part, ...] = ("optimizer", "parameters", "activations")
"""Parts that `layout.offload` may name."""
HOST = "cpu"
"""The word of `layout.offload_to` for host memory; anything else is a folder."""


def named(layout: Layout) -> tuple[str, ...]:
    """Returns the words of `layout.offload` as they are written, joined by "+": known parts or not."""
    if layout.offload == "none":
        return ()
    return PARTS if layout.offload == "all" else tuple(layout.offload.split("+"))


def tier_of(layout: Layout, part: Part) -> Tier:
    """Returns where a part lives between its uses. Only optimizer state goes to a folder."""
    if part not in named(layout):
        return "device"
    return "disk" if part == "optimizer" and layout.offload_to != HOST else "host"


def figures(layout: Layout) -> tuple[str, ...]:
    """Returns the fields of cluster.host that the prediction of a layout's offload needs."""
    needed = ["link_gbs"] if named(layout) else []
    needed += ["update_gbs"] if is_offloaded(layout, "optimizer") else []
    return (*needed, "disk_gbs") if tier_of(layout, "optimizer") == "disk" else tuple(needed)


def is_offloaded(layout: Layout, part: Part) -> bool:
    """Returns whether a part lives elsewhere than on the device."""
    return tier_of(layout, part) != "device"


def bucket_bytes(layout: Layout) -> float:
    """Returns the least bytes of a flat bucket of gradients."""
    return layout.bucket_mb * MIB


def shard_axis(layout: Layout) -> str:
    """Returns the ledger's name of the axis that shards the state."""
    return "dp_shard" if layout.cp == 1 else "dp_shard_cp"


def shards_parameters(layout: Layout) -> bool:
    """Returns whether several ranks share every parameter (ZeRO-3)."""
    return layout.zero == 3 and layout.shard_ranks > 1


def gathers_parameters(layout: Layout) -> bool:
    """Returns whether a block's parameters are whole on the device only while it computes: ZeRO-3's, which several
    ranks share, or which come from the host."""
    return shards_parameters(layout) or (layout.zero == 3 and is_offloaded(layout, "parameters"))


def has_buckets(layout: Layout) -> bool:
    """Returns whether several processes sum their gradients in buckets, as DDP, ZeRO-1 and ZeRO-2 do."""
    replicas = 1 if layout.data_parallel == "threads" else layout.summed_replicas
    return layout.shard_ranks * replicas > 1 and not gathers_parameters(layout)


def offloaded_layers(layout: Layout, stage: range) -> range:
    """Returns the layers of a stage whose activations leave the device: its first ones, which keep them longest. By
    default all but the last, whose backward pass comes first, or the only one."""
    if not is_offloaded(layout, "activations"):
        return stage[:0]
    return stage[: layout.offload_blocks or max(1, len(stage) - 1)]


def is_copied(layout: Layout) -> bool:
    """Returns whether ranks keep a second copy of the parameters."""
    return layout.hpz > 1 and shards_parameters(layout)


def near_ranks(layout: Layout, *, experts: bool = False) -> int:
    """Returns how many ranks keep one second copy together, of experts that ep distributes or of other parameters; 1
    without a copy."""
    return max(1, layout.hpz // layout.ep_shard) if experts else layout.hpz


def legal_hpz(layout: Layout) -> list[int]:
    """Returns the values of `hpz` that fit the layout's ranks, 1 (no copy) first: they divide the ranks that shard the
    state and are fewer, and ep divides them."""
    ranks = layout.shard_ranks
    return [1, *(n for n in divisors(ranks) if 1 < n < ranks and n % layout.ep_shard == 0)]


BLOCK = 256
"""Elements that share a scale."""
SCALE_BYTES = 4
"""Bytes of a scale, in fp32."""
Format = Literal["none", "int8", "int4", "fp8"]
"""Codes of 8 bits, -127 to 127; of 4 bits, -7 to 7; numbers in e4m3 with a scale per row; none: numbers as they are."""
BITS = {"int8": 8, "int4": 4, "fp8": 8}
LARGEST = {"int8": 127, "int4": 7}
"""The largest code: a block's scale is its largest magnitude over this, so an element's error is at most half a scale.
"""


def sent_as(shape: Sequence[int], format: Format) -> Format:
    """Returns the format of a parameter of this shape: vectors are not quantised."""
    return format if len(shape) > 1 else "none"


def codes_of(layout: Layout) -> Format:
    """Returns the codes in which replicas sum gradients; none for numbers and for PowerSGD's factors."""
    return "none" if layout.compression == "powersgd" else layout.compression


def has_factors(rows: Any, columns: Any, rank: int, width: int) -> Any:
    """Returns whether PowerSGD sends a matrix's gradient, of `width` bytes per element, as two factors of this rank in
    fp32 or wider: where they are smaller."""
    return (rows + columns) * rank * max(4, width) < rows * columns * width


def wire_bytes(elements: int, format: Format, width: int, columns: int = 0) -> int:
    """Returns the bytes in which a rank's share of a parameter is sent, `width` per element if it is not quantised; in
    fp8 of rows of so many `columns`."""
    if format == "none":
        return elements * width
    return -(-elements * BITS[format] // 8) + -(-elements // (columns or BLOCK)) * SCALE_BYTES


def wire_width(format: Format, width: Any) -> Any:
    """Returns the bytes per element of large matrices."""
    if format == "fp8":
        return 1.0  # rows are long
    return width if format == "none" else BITS[format] / 8 + SCALE_BYTES / BLOCK
