"""Offloading: optimizer state, parameters and activations that leave the device between their uses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd

from phalanx.blocks.kinds import FEED_FORWARD, block_kinds
from phalanx.blocks.operator import Weight
from phalanx.blocks.parameters import block_weights
from phalanx.blocks.residual import VOCABULARY, embedding_weights, head_weights
from phalanx.config.cluster import Cluster
from phalanx.config.job import Job, Optimizer
from phalanx.config.layout import TILED, Layout
from phalanx.config.model import ModelConfig
from phalanx.nearest import Misfit, did_you_mean, divisors
from phalanx.optimizers.catalogue import OPTIMIZERS
from phalanx.partition.derived import BLOCK, LARGEST, PARTS, Part, figures, is_offloaded, legal_hpz, named, overlaps
from phalanx.partition.tensor_slices import ENDS, is_tiled, layers_of, too_few_rows
from phalanx.techniques.technique import Effect, Problem, Technique, above

CHEAPEST_FIRST: tuple[Part, ...] = ("optimizer", "activations", "parameters")
"""Parts in the order in which they are offloaded where nothing fits otherwise."""


_NO_FOLDERS: dict[str, str] = {
    **dict.fromkeys(("", "host", "ram", "memory", "none"), "offload_to=cpu"),
    **dict.fromkeys(("disk", "nvme", "ssd", "file", "files"), "offload_to=/a/folder/on/the/disk"),
}
"""Words that `layout.offload_to` may get by mistake, each with its nearest legal choice."""


def offload_problems(job: Job) -> Iterator[Problem]:
    """Yields the dotted path of each wrong field, and the message with the nearest legal choice."""
    words = named(job.layout)
    known = ["none", "all", *PARTS]
    for word in words:
        if word not in PARTS:
            yield (
                "layout.offload",
                f"knows no {word!r}{did_you_mean(word, known)} (known: {', '.join(known)}; several with +)",
            )
    if len(set(words)) < len(words):
        yield "layout.offload", f"names a part twice; nearest legal: offload={'+'.join(dict.fromkeys(words))}"
    place = job.layout.offload_to
    if place.lower() in _NO_FOLDERS:
        legal = _NO_FOLDERS[place.lower()]
        yield "layout.offload_to", f"{place!r} is neither cpu nor a folder of files; nearest legal: {legal}"
    if job.layout.data_parallel == "threads" and words:
        yield "layout.offload", "threads of one process share its device; nearest legal: offload=none, or ddp"
    if is_offloaded(job.layout, "optimizer"):
        yield from _optimizer(job)
    if is_offloaded(job.layout, "parameters"):
        yield from _parameters(job.layout)
    yield from _activations(job)


def with_offload(part: Part, layout: Layout) -> Layout:
    """Returns the layout that also offloads a part; parameters with their optimizer."""
    wanted = {*named(layout), part, *(["optimizer"] if part == "parameters" else [])}
    parts = [each for each in PARTS if each in wanted]
    return replace(layout, offload="all" if len(parts) == len(PARTS) else "+".join(parts))


def can_offload(part: Part, layout: Layout, optimizer: Optimizer, cluster: Cluster) -> Layout | None:
    """Returns `with_offload`; None if the layout does it already, if it cannot, or if too little is known about the
    host to predict it."""
    more = with_offload(part, layout)
    if part in named(layout) or any(not getattr(cluster.host, name) for name in figures(more)):
        return None
    return None if any(True for _ in offload_problems(Job(layout=more, optimizer=optimizer))) else more


def offloads(layout: Layout, optimizer: Optimizer, cluster: Cluster) -> Iterator[Layout]:
    """Yields layouts that offload ever more, the parts first that cost least time."""
    for part in CHEAPEST_FIRST:
        if more := can_offload(part, layout, optimizer, cluster):
            layout = more
            yield layout


def _optimizer(job: Job) -> Iterator[Problem]:
    """Yields what cannot be combined with an optimizer on the host."""
    layout, name = job.layout, job.optimizer.name
    if layout.sync != "bsp":
        yield (
            "layout.offload",
            f"sync={layout.sync} averages parameters on the devices, which state on the host would miss; nearest "
            "legal: offload=none, or sync=bsp",
        )
    if name in OPTIMIZERS and OPTIMIZERS[name].needs_whole_matrices:
        legal = ", ".join(each for each, entry in OPTIMIZERS.items() if not entry.needs_whole_matrices)
        yield (
            "optimizer.name",
            f"{name} makes whole matrices orthogonal, which devices exchange and multiply, and an offloaded update "
            "runs on the host, element by element; nearest legal: offload=none, or "
            f"optimizer={legal.split(', ')[0]} (or {legal})",
        )
    if overlaps(layout):
        yield (
            "layout.offload",
            f"schedule {layout.schedule} computes with older versions of weights, which stay on the device; nearest "
            "legal: offload=none, or schedule=1f1b",
        )


def _parameters(layout: Layout) -> Iterator[Problem]:
    """Yields what cannot be combined with parameters on the host."""
    rest = "+".join(part for part in named(layout) if part != "parameters") or "none"
    if not is_offloaded(layout, "optimizer"):
        legal = "+".join(part for part in PARTS if part == "optimizer" or part in named(layout))
        yield (
            "layout.offload",
            f"parameters on the host are updated there, so their optimizer has to be there; nearest legal: "
            f"offload={'all' if legal == '+'.join(PARTS) else legal}, or offload={rest}",
        )
    if layout.zero != 3:
        yield (
            "layout.offload",
            f"parameters come from the host block by block, which is zero=3, and zero is {layout.zero}; nearest legal: "
            f"zero=3, or offload={rest}",
        )
    if layout.hpz > 1:
        yield (
            "layout.hpz",
            f"hpz {layout.hpz} keeps a second copy of the parameters on the devices, which offload={layout.offload} "
            "is to spare; nearest legal: hpz=1",
        )


def _activations(job: Job) -> Iterator[Problem]:
    """Yields what cannot be combined with activations on the host, and layers that there are not."""
    layout, layers = job.layout, job.model.n_layers
    if not is_offloaded(layout, "activations"):
        if layout.offload_blocks:
            yield (
                "layout.offload_blocks",
                f"counts layers whose activations leave the device, offload={layout.offload} keeps them; nearest "
                "legal: offload_blocks=0, or offload=activations",
            )
        return
    if layout.offload_blocks > layers:
        yield (
            "layout.offload_blocks",
            f"{layout.offload_blocks} layers of a model with n_layers {layers}; nearest legal: {layers}",
        )


OFFLOAD = Technique(
    "state and activations in host memory or in files",
    "Ren et al. 2021 (ZeRO-Offload); Rajbhandari et al. 2021 (ZeRO-Infinity)",
    is_on=lambda job: bool(named(job.layout)),
    fields=("layout.offload", "layout.offload_blocks", "layout.offload_to"),
    problems=offload_problems,
    conditions={
        "layout.offload_blocks": (
            lambda job: is_offloaded(job.layout, "activations") or job.layout.auto,
            "is for layout.offload=activations",
        ),
        "layout.offload_to": (
            lambda job: "optimizer" in named(job.layout) or job.layout.auto,
            "is for layout.offload=optimizer",
        ),
    },
    apply="phalanx.parallel.apply:apply_offload",
    layouts=(
        "accumulation=2,offload=optimizer+activations",
        "dp_shard=2,zero=3,offload=all,accumulation=2",
    ),
)


def tile_problems(job: Job) -> Iterator[Problem]:
    """Yields the dotted path of each wrong field, and the message with the nearest legal choice."""
    layout, model = job.layout, job.model
    unknown = [name for name in layout.tiled_layers if name not in TILED]
    for name in sorted(unknown):
        yield "layout.tile", f"no layers {name!r}{did_you_mean(name, TILED)} ({', '.join(TILED)}, joined by +, or all)"
    if layout.tiles == 1 or unknown:
        return
    tiled = list(_tileable(model))
    there = [name for name in TILED if any(layers_of(weight.name) == name for weight in tiled)]
    absent = [name for name in TILED if name in layout.tiled_layers and name not in there]
    tied = [name for name in absent if name in ENDS.values()]
    if tied and layout.tile != "all":
        legal = "+".join(name for name in there if name in layout.tiled_layers) or "all"
        yield (
            "layout.tile",
            "embedding and head are one matrix (model.tied=true), which both ends of the model read whole; nearest "
            f"legal: tile={legal}, or model.tied=false"
            if model.tied
            else f"modules for further tokens (model.mtp={model.mtp}) read embedding and head too, so that both run "
            f"whole; nearest legal: tile={legal}",
        )
        absent = [name for name in absent if name not in tied]
    if absent and (layout.tile != "all" or len(absent) == len(TILED)):
        legal = [f"tile={'+'.join(there)}"] if there else []
        yield (
            "layout.tile",
            f"this model has no layers of {' and '.join(absent)} that run in tiles, tiles is {layout.tiles}; nearest "
            f"legal: {', or '.join((*legal, 'tiles=1'))}",
        )
    if layout.sp_regather and layout.tp > 1:
        yield (
            "layout.sp_regather",
            f"the tiles {layout.tiles} of a matrix share the gathered input, which they save whole; nearest legal: "
            "sp_regather=false, or tiles=1",
        )
    yield from _divided(layout, model, [weight for weight in tiled if is_tiled(weight, layout) and not weight.padded])
    if any(is_tiled(weight, layout) for weight in tiled if weight.padded):
        rows = VOCABULARY._replace(shape=(model.vocab_size, 1)).part(layout.tp)
        # Without one the vocabulary is the tokenizer's, which is known at the start of the run.
        if model.vocab_size and (message := too_few_rows(rows, layout.tiles)):
            yield "layout.tiles", message


def _tileable(model: ModelConfig) -> Iterator[Weight]:
    """Yields the weights that may run in tiles, one of each kind of block, and those of the vocabulary."""
    every = [weight for kind in dict.fromkeys(block_kinds(model)) for weight in block_weights(model, kind)]
    every += [*embedding_weights(model, model.vocab_size), *head_weights(model, model.vocab_size)]
    yield from (weight for weight in every if weight.tiled)


def _divided(layout: Layout, model: ModelConfig, tiled: list[Weight]) -> Iterator[Problem]:
    """Yields the first of each size that a tensor rank holds and that does not divide by the tiles."""
    sizes = {weight.part(layout.tp): weight for weight in tiled[::-1] if weight.is_matrix}
    legal = {"layout.tiles": divisors(gcd(*sizes))}
    for size, weight in reversed(sizes.items()):
        assert weight.dim is not None, "a weight in tiles is cut"
        if size % layout.tiles:
            over = f"(tp {layout.tp} × tiles {layout.tiles})" if layout.tp > 1 else f"tiles {layout.tiles}"
            yield (
                "layout.tiles",
                Misfit(f"{_size_of(weight, model)} / {over} is not an integer", layout.tiles, legal),
            )


def _size_of(weight: Weight, model: ModelConfig) -> str:
    """Returns the size of a weight that tiles cut, in words."""
    assert weight.dim is not None, "a weight in tiles is cut"
    size = weight.shape[weight.dim]
    for kind in dict.fromkeys(each.feed_forward for each in block_kinds(model)):
        if not weight.name.startswith("attn.") and FEED_FORWARD[kind].width(model) == size:
            return f"{FEED_FORWARD[kind].width_name} {size}"
    return f"{size} {weight.cut} of {weight.name.removesuffix('.weight')}"


TILING = Technique(
    "large matrices in tiles",
    "docs/techniques/tiling.md",
    is_on=lambda job: job.layout.tiles > 1,
    fields=("layout.tiles", "layout.tile"),
    layout_problems=tile_problems,
    conditions={"layout.tile": above("layout.tiles", 1)},
    stage="layers",
    apply="phalanx.parallel.apply:apply_tiling",
    layouts=(
        "dp_shard=2,zero=3,tiles=2,tile=all,accumulation=2,recompute=products",
        "dp_shard=2,tp=2,zero=3,sp=true,tiles=2,tile=all,recompute=full",
    ),
)


_ROUNDED = {"quantise_weights": "gathered parameters", "quantise_gradients": "gradients each time they are sent"}
"""Messages that a layout rounds, by the setting that sends them as codes."""


def _second_copy(job: Job) -> Iterator[Problem]:
    """Yields the problems of the ranks that keep a second copy of the parameters."""
    layout = job.layout
    hpz, ranks = layout.hpz, layout.shard_ranks
    if hpz == 1:
        return
    if layout.zero < 3:
        yield (
            "layout.hpz",
            f"hpz {hpz} copies parameters that zero=3 shards, zero is {layout.zero}; nearest legal: zero=3, or hpz=1",
        )
    elif not layout.reshard:
        yield (
            "layout.hpz",
            f"hpz {hpz} copies parameters for the gathers of the backward pass, of which reshard=false has none; "
            "nearest legal: reshard=true, or hpz=1",
        )
    legal = legal_hpz(layout)
    if hpz in legal:
        return
    if ranks % hpz:
        equation = f"dp_shard {layout.dp_shard} × cp {layout.cp} = {ranks} / hpz {hpz} is not an integer"
    elif hpz == ranks:
        equation = f"hpz {hpz} ranks are all of dp_shard {layout.dp_shard} × cp {layout.cp}, which hold a copy already"
    else:
        equation = f"hpz {hpz} / ep {layout.ep_shard}{' (ep / tp)' if layout.folds else ''} is not an integer"
    yield "layout.hpz", Misfit(equation, hpz, {"layout.hpz": legal})


def _in_fp8(job: Job) -> Iterator[Problem]:
    """Yields what is not multiplied in 8 bits and so cannot be gathered in them."""
    device = job.cluster.accelerator
    if job.layout.quantise_weights != "fp8":
        return
    if job.train.precision != "fp8":
        yield (
            "layout.quantise_weights",
            f"fp8 gathers the matrices that train.precision=fp8 multiplies in 8 bits, and precision is "
            f"{job.train.precision}; nearest legal: quantise_weights=none, or precision=fp8",
        )
    elif job.model.moe.n_experts and device.fp8_tflops and not device.fp8_experts:
        yield (
            "layout.quantise_weights",
            f"fp8 gathers what is multiplied in 8 bits, and {device.name or 'this device'} multiplies experts in bf16 "
            "(cluster.accelerator.fp8_experts is false); nearest legal: quantise_weights=none",
        )


def _layout_problems(job: Job) -> Iterator[Problem]:
    layout = job.layout
    for name in _ROUNDED:
        if (format := getattr(layout, name)) == "none":
            continue
        if layout.zero < 3 or layout.shard_ranks == 1:
            ranks = f"dp_shard {layout.dp_shard} × cp {layout.cp} = {layout.shard_ranks}"
            yield (
                f"layout.{name}",
                f"{format} is for the messages of zero=3 on several ranks, zero is {layout.zero} and {ranks}; nearest "
                f"legal: {name}=none, or zero=3 with dp_shard=2",
            )
    yield from _in_fp8(job)


def _rounds(job: Job) -> Iterator[Problem]:
    """Yields why a layout that sends codes does not equal one process, with the bound of the error."""
    for name, messages in _ROUNDED.items():
        if (format := getattr(job.layout, name)) not in ("none", "fp8"):  # fp8 rounds what its product rounds anyway
            yield (
                f"layout.{name}",
                f"{format} rounds {messages} by at most 1/{2 * LARGEST[format]} of the largest of {BLOCK}, so it "
                f"does not equal one process to verify's tolerance; nearest legal: {name}=none",
            )


SECOND_COPY = Technique(
    "a second copy of the parameters inside a node (hpZ)",
    "Wang et al. 2023, section 3.2",
    is_on=lambda job: job.layout.hpz > 1,
    fields=("layout.hpz",),
    layout_problems=_second_copy,
    layouts=("dp_shard=4,zero=3,hpz=2,accumulation=2",),
)
QUANTISATION = Technique(
    "parameters and gradients sent as codes (qwZ, qgZ) or in fp8",
    "Wang et al. 2023, sections 3.1 and 3.3",
    is_on=lambda job: any(getattr(job.layout, name) != "none" for name in _ROUNDED),
    fields=("layout.quantise_weights", "layout.quantise_gradients"),
    layout_problems=_layout_problems,
    differs=_rounds,
    compared_without=True,
)


def compiles(job: Job, device: str = "") -> bool:
    """Returns whether blocks are compiled on a type of device; by default, on that of the job's cluster."""
    if job.train.compile != "auto":
        return job.train.compile
    return (device or job.cluster.device) != "cpu" and not refusal(job)


def compile_problems(job: Job) -> Iterator[Problem]:
    """Yields why a job that asks for it is not compiled."""
    if job.train.compile is True and (reason := refusal(job)):
        yield "train.compile", f"{reason}; nearest legal: train.compile=auto, which leaves it off"


def refusal(job: Job) -> str:
    """Returns why torch.compile does not take a job; empty if it does."""
    if job.layout.data_parallel == "threads" and job.layout.dp_replicate > 1:
        return "torch compiles in one thread at a time, and each of data_parallel=threads would make graphs of its own"
    return ""


COMPILED_PASSES, COMPILED_KERNEL_US = 0.56, 4
"""Memory-bound work over that of the eager mode (the same steps; half in torchtitan's rows), and `kernel_us`:
assumed."""
COMPILED_LOSS_TENSORS = 0, 2
"""The logits and their gradient: torch.compile fuses the loss with its cast to fp32 and saves nothing else. Measured on
a CPU in benchmarks/results/compiled_loss.md."""


def _effect(job: Job) -> Effect:
    if not compiles(job):
        return Effect()
    # The loss of a cut vocabulary communicates.
    profile = {"loss_tensors": COMPILED_LOSS_TENSORS} if job.layout.tp == 1 else {}
    if job.cluster.device == "cpu":
        return Effect(framework={"cast_bytes": 5}, profile=profile)
    return Effect(COMPILED_PASSES, framework={"cast_bytes": 5, "kernel_us": COMPILED_KERNEL_US}, profile=profile)


COMPILE = Technique(
    "blocks compiled by torch.compile",
    "Ansel et al. 2024",
    is_on=compiles,
    fields=("train.compile",),
    problems=compile_problems,
    effect=_effect,
    apply="phalanx.parallel.apply:apply_compile",
)
