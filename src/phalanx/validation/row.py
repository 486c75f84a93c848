"""A row of a table of measured runs, as a prediction request and its measurement.

Tables are written for readers: columns are missing, models and devices have many names, and sources count FLOPs and
memory in their own ways. Missing values are filled in if possible, and `Reading.assumed` lists each of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import sqrt
from typing import Any, Literal

from phalanx.blocks.kinds import block_kinds, untrained
from phalanx.blocks.parameters import (
    attention_flops_per_token,
    block_flops_per_token,
    count,
    count_active,
    head_flops_per_token,
    matrix_flops_per_token,
    train_flops_per_step,
)
from phalanx.config.cluster import Accelerator
from phalanx.config.job import Optimizer
from phalanx.config.model import MLA, LoRA, Mamba, ModelConfig, MoE, SparseAttention
from phalanx.config.precision import Products
from phalanx.config.presets import PRESETS, gpt_kind, llama_kind, unknown
from phalanx.config.values import yaml_data
from phalanx.cost.frameworks import as_recipe, calibrated
from phalanx.cost.spec import StepSpec, as_used_by
from phalanx.errors import JobError
from phalanx.validation import row_layout
from phalanx.validation.row_layout import Cells

Counts = Literal["full", "causal", "parameters", "hardware", "hardware_matrices", "hardware_eight"]


@dataclass(frozen=True)
class Convention:
    """A source's count of FLOPs, and the peak of its MFU."""

    counts: Counts = "full"
    """FLOPs that its TFLOP/s and its MFU count; no known source prints both from different counts."""
    narrow_peak: bool = False
    """Whether MFU of 8-bit and 4-bit runs is against the peak of these formats instead of that of bfloat16."""
    peaks: Mapping[str, float] = field(default_factory=dict)
    """Peaks that replace the data sheets': 16 bits in TFLOP/s by device name; the narrower formats have twice that."""


def convention_of(cells: Cells) -> Convention:
    """Returns the convention of a source from its name and notes; unknown ones count full attention."""
    tables = row_layout.sources()["conventions"]
    return next((Convention(**fields) for pattern, fields in tables if cells.said(pattern)), Convention())


def flops_per_step(counts: Counts, model: ModelConfig, sequences: int, parameters: float = 0.0) -> float:
    """Returns the FLOPs of a step of `sequences` sequences on all devices; 0 `parameters` means to count them."""
    tokens = sequences * model.seq_len
    layers = range(model.n_layers)
    if counts in ("full", "causal"):
        return train_flops_per_step(model, sequences, attention=counts)
    if counts == "parameters":
        attention = 3 * sum(attention_flops_per_token(model, layer) for layer in layers)
        return tokens * (6 * count_active(model) + attention)
    if counts == "hardware":
        return tokens * (4 * sum(block_flops_per_token(model, i) for i in layers) + 3 * head_flops_per_token(model))
    if counts == "hardware_matrices":
        return tokens * 4 * sum(matrix_flops_per_token(model, i) for i in layers)
    return tokens * 8 * (parameters or count_active(model))


def peak_tflops(convention: Convention, device: Accelerator, products: Products) -> float:
    """Returns the peak of the source's MFU, in TFLOP/s."""
    sixteen = convention.peaks.get(device.name) or device.bf16_tflops or device.fp16_tflops
    if products in ("fp8", "fp4") and convention.narrow_peak:
        return 2 * sixteen
    return sixteen


def gpt(layers: int, width: int, heads: int, vocab: int = 51200, seq: int = 2048, **more: Any) -> ModelConfig:
    """Returns a GPT-2 kind of `seq` tokens; `more` are other fields."""
    return gpt_kind(layers, width, heads, vocab=vocab, seq_len=seq, **more)


def llama(
    layers: int, width: int, heads: int, kv: int, ff: int, vocab: int, seq: int = 4096, **more: Any
) -> ModelConfig:
    """Returns a Llama kind of `seq` tokens; `more` are other fields. Nothing that is predicted depends on the base of
    its rotary positions."""
    base = ModelConfig.rope_theta
    return llama_kind(layers, width, heads, kv_heads=kv, d_ff=ff, vocab=vocab, seq_len=seq, rope_theta=base, **more)


def _moe(experts: int, top_k: int, ff: int, shared: int = 0, dense: int = 0) -> MoE:
    return MoE(n_experts=experts, top_k=top_k, d_ff=ff, n_shared=shared, n_dense_layers=dense, renormalise=top_k > 1)


def _mla(q_rank: int, nope: int = 128, rope: int = 64, value: int = 128) -> MLA:
    return MLA(q_rank=q_rank, kv_rank=512, rope_head_dim=rope, nope_head_dim=nope, v_head_dim=value)


def _squared(layers: int, width: int, heads: int, kv: int, ff: int, vocab: int, seq: int, **more: Any) -> ModelConfig:
    """Returns a Nemotron: the Llama kind, with two matrices and a squared ReLU instead of SwiGLU."""
    return llama(layers, width, heads, kv, ff, vocab, seq, activation="gelu", **more)


def _hybrid(letters: str, width: int, heads: int, kv: int, ff: int, *mamba: int) -> ModelConfig:
    """Returns a Nemotron-H; a block is a layer of Mamba-2 or attention, and an MLP that follows it."""
    names = {"M": "mamba", "*": "heads", "": "none"}
    blocks = [(names[first], tail) for first, tail in re.findall(r"([M*]?)(-?)", letters)]
    blocks = [(attention, "dense" if tail else "none") for attention, tail in blocks if attention != "none" or tail]
    n_heads, head_dim, state = mamba
    return replace(
        PRESETS["nemotron3-nano-30b-a3b"],
        n_layers=len(blocks),
        attention=",".join(attention for attention, _ in blocks),
        feed_forward=",".join(feed_forward for _, feed_forward in blocks),
        d_model=width,
        n_heads=heads,
        n_kv_heads=kv,
        d_ff=ff,
        mamba=Mamba(n_heads=n_heads, head_dim=head_dim, state=state),
        moe=MoE(),
    )


def _maxtext(scale: int) -> ModelConfig:
    """Returns the shape of MaxText's `global_parameter_scale` in billions of parameters: doublings go in turn to heads
    and MLP, to the width, to the layers (maxtext, `get_individual_scales`; base: 16 layers, 2,048 wide, 16 heads, MLP
    7,168)."""
    cycles, rest = divmod(scale.bit_length() - 1, 3)
    heads, width, layers = 2 ** (cycles + (rest > 0)), 2 ** (cycles + (rest > 1)), 2**cycles
    return llama(16 * layers, 2048 * width, 16 * heads, 16 * heads, 7168 * heads, 32000, 2048, head_dim=128)


@cache
def shapes() -> dict[str, ModelConfig]:
    """Returns the published shapes by the `plain` form of their names: the presets, those of shapes.yaml, MaxText's."""
    found = {
        re.sub(r"[^a-z0-9]", "", name.replace(".", "p")): shape
        for name, shape in PRESETS.items()
        if shape.vocab_size  # those without one are small ones for tests
    }
    found["glm5"] = replace(found["glm5"], sparse=SparseAttention())  # before the last phases of its training
    found |= {name: PRESETS[preset] for name, preset in row_layout.sources()["presets"].items()}
    kinds = {"gpt": gpt, "llama": llama, "nemotron": _squared, "hybrid": _hybrid}
    parts: dict[str, Callable[..., Any]] = {"moe": _moe, "mla": _mla}
    written = yaml_data(__file__, "shapes.yaml")
    for name, (kind, *sizes) in written.items():
        more = sizes.pop() if isinstance(sizes[-1], dict) else {}
        more |= {field: part(*more[field]) for field, part in parts.items() if field in more}
        found[name] = kinds[kind](*sizes, **more)
    return found | {f"maxtext{scale}b": _maxtext(scale) for scale in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)}


def plain(name: str) -> str:
    """Normalises a model's name to the spelling of `shapes`: lower-case letters and digits, p for a point."""
    text = re.sub(r"[^a-z0-9]", "", re.sub(r"(?<=[0-9])\.(?=[0-9])", "p", name.lower()))
    text = re.sub(r"llama(?:3p[13]|31(?=8b|70b|405b))", "llama3", text)
    for other, own in row_layout.sources()["spellings"].items():
        text = text.replace(other, own)
    return text


def key_of(name: str) -> str | None:
    """Returns the longest key of `shapes` that a name contains: `llama3-70b-l12` is a llama3-70b. Another version is
    another model: `glm-5.3` is no glm-5."""
    text = plain(name)
    whole = row_layout.sources()["whole names"]
    if text in whole:
        return whole[text]
    listed = [key for key in shapes() if key in text and key not in whole]
    found = [key for key in listed if re.search(rf"{key}(?!p[0-9])", text)]
    return max(found, key=len) if found else None


def remark(key: str) -> str:
    """Returns the approximation that a shape stands for; empty if it is the model itself."""
    if key in shapes() and untrained(shapes()[key]):
        return ""
    return next((text for start, text in row_layout.sources()["remarks"].items() if key.startswith(start)), "")


_COLUMNS = ("n_layers", "hidden", "ffn_hidden", "n_heads", "n_kv_heads", "vocab", "seq_len", "moe_experts", "moe_topk")


def model_of(cells: Cells, framework: str, pp: int) -> ModelConfig | None:
    """Returns the row's model with vocabulary and sequence length; None with a recorded problem if it is unknown."""
    columns = {name: cells.whole(name) for name in _COLUMNS}
    name = cells.text("model_name")
    key = key_of(name)
    if "bloom" in name.lower() and not key:
        base, key = _bloom(columns), "bloom"
    elif key:
        base = shapes()[key]
    else:
        base = _unknown(cells, columns)
    if key and remark(key):
        cells.assume(remark(key))
    if base is None:
        return None
    if not (key or columns["vocab"]):
        sizes = row_layout.sources()["vocabularies"]
        columns["vocab"] = next((size for pattern, size in sizes if cells.said(pattern)), 0)
    if not columns["n_layers"] and (cut := re.search(r"-l([0-9]{1,3})\b", name.lower())):
        columns["n_layers"] = int(cut[1])
    halves = [half for kind in block_kinds(base) for half in kind[:2] if half != "none"] if base.mamba.n_heads else []
    if columns["n_layers"] == len(halves):
        columns["n_layers"] = 0  # counted apart, as Megatron counts the layers of a hybrid
    shape = _overridden(base, columns)
    dense = base.moe.n_dense_layers
    if base.n_layers and shape.n_layers < base.n_layers and dense > 1:
        dense = max(1, round(dense * shape.n_layers / base.n_layers))
        cells.assume(f"{shape.n_layers} of {base.n_layers} layers: {dense} of {base.moe.n_dense_layers} dense ones")
        shape = replace(shape, moe=replace(shape.moe, n_dense_layers=dense))
    for model, pattern, otherwise, modules, note in row_layout.sources()["further tokens"]:
        whole = shape.n_layers == base.n_layers or shape.mamba.n_heads
        if key == model and whole and cells.said(pattern) and not (otherwise and cells.said(otherwise)):
            cells.assume(note)
            shape = _with_modules(shape, modules)
    if shape.moe.n_experts and "tokendrop" in name.lower():
        shape = replace(shape, moe=replace(shape.moe, capacity=1.0))  # moe_expert_capacity_factor of release 25.09
    if shape.moe.n_experts and (slots := re.search(r"\bcf([0-9]\.[0-9]+)\b", name.lower())):
        shape = replace(shape, moe=replace(shape.moe, capacity=float(slots[1])))
    shape = _solved(cells, shape, pp, bool(key) and key != "bloom")
    if shape is None:
        return None
    if not (cells.text("vocab") or (key and key != "bloom")) and "bloom" not in name.lower():
        cells.assume(f"vocab blank: {shape.vocab_size}")
    if not columns["seq_len"]:
        cells.assume(f"seq_len blank: {shape.seq_len}")
    if shape.activation.startswith("gelu") and shape.positions == "learned":
        shape = replace(shape, dropout=row_layout.habits(framework).get("dropout", shape.dropout))
    return replace(shape, preset="")


def _with_modules(shape: ModelConfig, modules: int) -> ModelConfig:
    """Returns a model with modules that predict one more token each; a hybrid's are of attention and experts."""
    if not shape.mamba.n_heads:
        return replace(shape, n_layers=shape.n_layers + modules, mtp=modules)
    kinds = block_kinds(shape)
    attention = ",".join([*(kind.attention for kind in kinds), *["heads"] * modules])
    feed_forward = ",".join([*(kind.feed_forward for kind in kinds), *["experts"] * modules])
    layers = shape.n_layers + modules
    return replace(shape, n_layers=layers, mtp=modules, attention=attention, feed_forward=feed_forward)


def _bloom(columns: dict[str, int]) -> ModelConfig:
    """Returns a candidate for BLOOM: 250 thousand tokens; 96 heads if 14,400 wide, else 64 by default (bigscience,
    train/tr11-176B-ml/chronicles-prequel.md)."""
    width = columns["hidden"] or 14400
    return gpt(0, width, 96 if width == 14400 else 64, 250000)


def _unknown(cells: Cells, columns: dict[str, int]) -> ModelConfig | None:
    """Returns a model from its columns alone: Llama's kind if it has fewer key/value heads or experts, else GPT-2's."""
    name = cells.text("model_name")
    lower = name.lower()
    if not columns["hidden"] and not (columns["n_layers"] and cells.number("n_params_b")):
        listed = [shapes()[key] for key in shapes() if key.startswith(("megatron", "gpt3"))]
        billions = cells.number("n_params_b") or 0
        close = [shape for shape in listed if abs(_billions(shape) / billions - 1) < 0.06] if billions else []
        if close and re.search("gpt|megatron", lower):
            cells.assume(f"shape blank: the GPT of {_billions(close[0]):.1f} B")
            return close[0]
        cells.problem(
            f"model_name: {name!r} is not a known model; give n_layers, hidden and n_heads"
            + (unknown(name.replace(" ", "-")) if name else "")
        )
        return None
    modern = (
        0 < columns["n_kv_heads"] < columns["n_heads"]
        or columns["moe_experts"]
        or re.search("llama|mistral|qwen|deepseek", lower)
    )
    width = columns["hidden"] or 0
    if modern:
        return llama(0, width, 0, 0, 0, 32000)
    return gpt(0, width, 0)


def _billions(shape: ModelConfig) -> float:
    return (12 * shape.n_layers * shape.d_model**2 + shape.vocab_size * shape.d_model) / 1e9


def _overridden(shape: ModelConfig, columns: dict[str, int]) -> ModelConfig:
    """Returns the shape with the values of the columns."""
    width = columns["hidden"] or shape.d_model
    same_width = width == shape.d_model
    heads = columns["n_heads"] or (shape.n_heads if same_width else 0)
    shape = replace(
        shape,
        n_layers=columns["n_layers"] or shape.n_layers,
        d_model=width,
        head_dim=shape.head_dim if same_width else 0,
        n_heads=heads,
        n_kv_heads=columns["n_kv_heads"] or (shape.n_kv_heads if not columns["n_heads"] or same_width else 0),
        vocab_size=columns["vocab"] or shape.vocab_size,
        seq_len=columns["seq_len"] or shape.seq_len,
    )
    if columns["moe_experts"] > 1:
        moe = replace(
            shape.moe,
            n_experts=columns["moe_experts"],
            top_k=columns["moe_topk"] or min(shape.moe.top_k, columns["moe_experts"]),
        )
        shape = replace(shape, moe=replace(moe, renormalise=moe.top_k > 1))
    ff = columns["ffn_hidden"]
    if not ff or ff in (shape.d_ff, shape.moe.d_ff):
        return shape
    if shape.moe.n_experts and not shape.moe.n_dense_layers:
        return replace(shape, moe=replace(shape.moe, d_ff=ff))
    return replace(shape, d_ff=ff)


def _solved(cells: Cells, shape: ModelConfig, pp: int, known: bool) -> ModelConfig | None:
    """Returns the shape with unknown layers, width and heads from the number of parameters: N = 12 l h² + V h."""
    billions = cells.number("n_params_b") or 0
    if not shape.n_layers and not billions:
        cells.problem("n_layers: is blank, and so is n_params_b, from which it would follow")
        return None
    if not shape.n_layers:
        layers = (billions * 1e9 - shape.vocab_size * shape.d_model) / (12 * shape.d_model**2)
        # Equal stages, as chosen by authors whose layers fit their pipelines.
        if layers > 1000:
            cells.problem(
                f"hidden: {billions:g} B parameters {shape.d_model} wide are {layers:.0f} layers; give n_layers"
            )
            return None
        shape = replace(shape, n_layers=max(pp, round(layers / pp) * pp))
        cells.assume(f"n_layers blank: {shape.n_layers} by n_params_b")
    if not shape.d_model:
        width = sqrt(billions * 1e9 / (12 * shape.n_layers))
        shape = replace(shape, d_model=max(128, round(width / 128) * 128))
        cells.assume(f"hidden blank: {shape.d_model} by n_params_b")
    if not shape.n_heads:
        shape = replace(shape, n_heads=max(1, shape.d_model // 128))
        cells.assume(f"n_heads blank: {shape.n_heads}, of 128 each")
    elif not cells.text("n_heads") and not known:
        cells.assume(f"n_heads blank: {shape.n_heads}")
    if shape.d_model % shape.n_heads and not shape.head_dim and not shape.mla.kv_rank:
        # This is rare and comes from rounded tables: the nearest smaller head size is taken.
        cells.assume(f"hidden {shape.d_model} / n_heads {shape.n_heads} is not an integer: heads of its floor")
    if shape.n_kv_heads and shape.n_heads % shape.n_kv_heads:
        cells.problem(f"n_kv_heads: n_heads {shape.n_heads} / n_kv_heads {shape.n_kv_heads} is not an integer")
        return None
    if shape.moe.top_k > max(shape.moe.n_experts, 1) and shape.moe.n_experts:
        cells.problem(f"moe_topk: {shape.moe.top_k} of {shape.moe.n_experts} experts; nearest: {shape.moe.n_experts}")
        return None
    return shape


MemoryKind = Literal["allocated", "reserved", "device"]

SIZE_TOLERANCE = 0.1
"""Difference between a row's number of parameters and its shape's that rounding and vocabularies explain."""

UNEVEN = 1.14
"""Time of a block with experts if a row says that its routing was real, over that of balanced routing: the middle of
what the MoE ModelZoo states, 8 to 20 %."""


@dataclass(frozen=True)
class Reading:
    """The contents of a row."""

    spec: StepSpec
    memory_means: MemoryKind
    """Meaning of its bytes: allocated by tensors (torch's max_memory_allocated), reserved by the allocator
    (max_memory_reserved), or taken on the device (nvidia-smi)."""
    memory_unit: float
    """Bytes in the source's GB."""
    framework: str
    """Family of the framework."""
    source: str
    """Short name of the source."""
    convention: Convention
    parameters: float
    """Number of parameters as printed; 0 if it is not."""
    measured_s: float | None = None
    """Seconds of a step, measured or derived from measured tokens, TFLOP/s or MFU."""
    measured_from: str = ""
    """The column that it is from; empty if nothing was measured."""
    measured_memory: float | None = None
    """Bytes of the fullest device."""
    oom: bool = False
    """Whether it ran out of memory."""
    assumptions: tuple[str, ...] = ()
    """Values that were filled in, and approximations."""
    ignored: tuple[str, ...] = ()
    """Parts of the notes in which nothing was understood."""

    @property
    def devices(self) -> int:
        return self.spec.layout.world

    @property
    def peak_tflops(self) -> float:
        """Peak in TFLOP/s per device of the source's MFU."""
        return peak_tflops(self.convention, self.spec.cluster.accelerator, self.spec.products)

    def tflops(self, seconds: float) -> float:
        """Returns TFLOP/s per device of a step that takes `seconds`, as the source counts."""
        sequences = self.spec.batch.global_batch
        flops = flops_per_step(self.convention.counts, self.spec.model, sequences, self.parameters)
        return flops / seconds / self.devices / 1e12

    def mfu_pct(self, seconds: float) -> float:
        """Returns MFU in percent: `tflops` over the peak that the source divides by."""
        return 100 * self.tflops(seconds) / self.peak_tflops

    def tokens_per_s(self, seconds: float) -> float:
        """Returns tokens per second per device."""
        return self.spec.batch.global_batch * self.spec.model.seq_len / seconds / self.devices


_FILLED_IN = re.compile("(layout|global batch|micro_batch|seq_len) blank")
"""Assumptions on which the time depends most."""


OPTIMIZER_STATES = {"bf16 moments": Optimizer(state="bf16"), "bf16": Optimizer(state="bf16", master="none")}
"""The words for the optimizer's state that a job has, too."""


def read(row: Mapping[str, str]) -> Reading:
    """Reads a row. Raises JobError with every reason why it cannot be expressed."""
    cells = Cells(row)
    cells.check()
    framework = row_layout.framework_of(cells)
    habits = row_layout.habits(framework)
    cluster = row_layout.cluster_of_row(cells)
    model = model_of(cells, framework, row_layout.degree(cells, "pp") or 1)
    if cells.problems or not model or not cluster:
        raise JobError(cells.problems)
    found = row_layout.layout_of(cells, model, cluster, framework)
    products = row_layout.products_of(cells, cluster, framework)
    if not found:
        raise JobError(cells.problems)
    given, counted = cells.number("n_params_b"), count(model) / 1e9
    if given and abs(counted / given - 1) > SIZE_TOLERANCE:
        cells.assume(f"n_params_b {given:g} is not counted: the shape has {counted:.3g} B parameters")
    layout, batch = found
    width = 4 if products == "fp32" else 2
    if cells.said("(?<![a-z])lora(?![a-z])"):
        adapters = LoRA(rank=16, targets=habits.get("adapters", LoRA.targets))
        cells.assume(f"LoRA: rank {adapters.rank}, {adapters.targets}; memory is not predicted")
        model = replace(model, lora=adapters)
    program = calibrated(framework, cluster.accelerator)
    key = key_of(cells.text("model_name")) or ""
    if recipe := row_layout.recipe_of(cells, framework, model, key, cluster.accelerator.name):
        program, layout = as_recipe(program, recipe), row_layout.as_set_up(layout, recipe, model)
    program = replace(program, **habits.get(products, {}))
    if model.moe.n_experts and cells.said("real routing"):
        cells.assume(f"uneven routing: blocks with experts take {UNEVEN} × as long")
        program = replace(program, moe_slowdown=UNEVEN * program.moe_slowdown)
    state = row_layout.state_of(cells)
    program = replace(program, memory_profile=row_layout.with_state(state, program.memory_profile))
    optimizer = OPTIMIZER_STATES.get(state, Optimizer())
    cluster, program = as_used_by(layout.world, cluster, program)
    spec = StepSpec(model, cluster, layout, batch, products, width, program, optimizer=optimizer)
    sizes, parameters = _memory(cells), (given or 0) * 1e9
    told = Reading(spec, *sizes, framework, source_of(cells), convention_of(cells), parameters)
    reading = _measured(cells, told)
    if cells.problems:
        raise JobError(cells.problems)
    spec = replace(reading.spec, given=not any(map(_FILLED_IN.match, cells.assumed)))
    return replace(reading, spec=spec, assumptions=tuple(cells.assumed), ignored=cells.ignored)


def _measured(cells: Cells, reading: Reading) -> Reading:
    """Returns the reading with its measurements: seconds, or figures that determine them."""
    seconds: dict[str, float] = {}
    for name in ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct"):
        if (value := cells.number(name)) is not None:
            seconds[name] = _seconds(reading, name, value)
    first = next(iter(seconds), "")
    for name, other in seconds.items():
        if not 1 / 1.5 < other / seconds[first] < 1.5:
            cells.assume(f"{first} and {name} do not agree: by a factor of {other / seconds[first]:.2g}")
    gigabytes = cells.number("peak_mem_gb")
    oom = cells.said(r"\boom") or re.search(r"\boom", cells.text("peak_mem_gb").lower())
    near = cells.said(r"(close to|near|almost|before) oom")
    return replace(
        reading,
        measured_s=seconds.get(first),
        measured_from=first,
        measured_memory=None if gigabytes is None else gigabytes * reading.memory_unit,
        oom=bool(oom) and not near and not seconds,
    )


def _seconds(reading: Reading, name: str, value: float) -> float:
    """Returns the seconds of a step that correspond to a measured figure."""
    if name == "step_time_s":
        return value
    if name == "tokens_per_s_per_gpu":
        return reading.tokens_per_s(1.0) / value
    return (reading.tflops(1.0) if name == "tflops_per_gpu" else reading.mfu_pct(1.0)) / value


def source_of(cells: Cells) -> str:
    """Returns a short name of the source: the prefix of the row's id, else the first word of its source."""
    named = re.sub(r"[-_]?[0-9]+$", "", cells.text("row_id"))
    return named or re.split(r"[ @,;]", cells.text("source"))[0] or "unnamed"


def _memory(cells: Cells) -> tuple[MemoryKind, float]:
    """Returns the meaning of a source's memory, and the bytes in its GB."""
    for pattern, means, unit in row_layout.sources()["memory"]:
        if cells.said(pattern):
            return means, unit
    return "reserved", 2**30
