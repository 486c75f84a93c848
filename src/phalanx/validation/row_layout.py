"""The layout of a table's row: the degrees of the axes, sharding, recomputation, the batch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from math import gcd, prod
from typing import Any, Literal

from phalanx.blocks.operator import MemoryProfile
from phalanx.blocks.parameters import count
from phalanx.check.model import BOUNDS
from phalanx.config.cluster import Accelerator, Cluster, Link
from phalanx.config.clusters import ACCELERATORS, CLUSTERS, MACHINES, MEMORY_TOLERANCE
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.config.precision import Products
from phalanx.config.values import yaml_data
from phalanx.errors import JobError
from phalanx.nearest import did_you_mean
from phalanx.partition import derived
from phalanx.partition.derived import Batch
from phalanx.registry import OWN
from phalanx.schedule import catalogue

COLUMNS = (
    *("source", "row_id", "model_name", "n_params_b", "n_layers", "hidden", "ffn_hidden", "n_heads", "n_kv_heads"),
    *("vocab", "seq_len", "moe_experts", "moe_topk", "gpu", "n_gpus", "gpus_per_node", "network"),
    *("dp", "tp", "pp", "vpp", "cp", "ep", "zero_stage", "sequence_parallel", "recompute", "schedule"),
    *("micro_batch", "global_batch_seqs"),
    *("precision", "optimizer_state", "tflops_per_gpu", "mfu_pct", "tokens_per_s_per_gpu", "step_time_s"),
    *("peak_mem_gb", "notes"),
)
"""Columns with a meaning; a table may have any subset of them, and others."""

COUNTS = {
    "n_layers": "model.n_layers",
    "hidden": "model.d_model",
    "ffn_hidden": "model.d_ff",
    "n_heads": "model.n_heads",
    "n_kv_heads": "model.n_kv_heads",
    "vocab": "model.vocab_size",
    "seq_len": "model.seq_len",
    "moe_experts": "model.moe.n_experts",
    "moe_topk": "model.moe.top_k",
    "n_gpus": "cluster.nodes",
    "gpus_per_node": "cluster.devices_per_node",
    "dp": "layout.dp_shard",
    "tp": "layout.tp",
    "pp": "layout.pp",
    "cp": "layout.cp",
    "ep": "layout.ep",
    "micro_batch": "layout.micro_batch",
    "global_batch_seqs": "train.global_batch",
}
"""Columns of whole numbers, and the field of a job whose upper bound each has."""
AMOUNTS = ("n_params_b", "tflops_per_gpu", "mfu_pct", "tokens_per_s_per_gpu", "step_time_s", "peak_mem_gb")
_UNITS = {"n_params_b": "B", "mfu_pct": "%", "step_time_s": "s", "peak_mem_gb": "GB?", "n_gpus": "x"}
"""The units that a column's numbers may carry, as patterns: others would change a number without a word."""

_THOUSANDS = re.compile(r"^[1-9][0-9]{0,2}(?:[,_][0-9]{3})+(?![0-9,_])")
"""A number in groups of three digits: 0,125 and 1.234,5 have a comma for the point."""

LONGEST = 2000
"""Most characters of a cell with a meaning; the longest of the published tables has 589."""

_BLANK = {"", "-", "--", "n/a", "na", "nan", "none", "null", "?", "x", "unknown", "tbd"}
_YES, _NO = {"yes", "true", "1", "on", "y"}, {"no", "false", "0", "off", "n"}


class Cells:
    """The cells of a row. Reading an invalid cell adds to `problems` and returns nothing."""

    def __init__(self, row: Mapping[str, str]):
        known = {name.strip().lower(): (value or "").strip() for name, value in row.items() if name}
        self._row = {name: known[name][:LONGEST] for name in COLUMNS if name in known}
        self.problems: list[str] = [
            f"{name}: {len(known[name]):,} characters; at most {LONGEST:,}"
            for name in self._row
            if len(known[name]) > LONGEST
        ]
        self.assumed: list[str] = []
        self._understood: set[str] = set()
        self.description = " ".join(self.text(name) for name in ("source", "row_id", "model_name", "notes")).lower()
        """All that says where the row is from, in small letters."""
        self.program = " ".join(self.text(name) for name in ("source", "model_name")).lower()
        """What says which program ran."""

    def said(self, pattern: str | re.Pattern[str]) -> re.Match[str] | None:
        """Returns where the description first matches, in small letters; all such words count as understood."""
        every = [*re.finditer(pattern, self.description)]
        self._understood.update(found[0].strip(" ,;") for found in every)
        return next(iter(every), None)

    @property
    def ignored(self) -> tuple[str, ...]:
        """The parts of the notes in which no word was understood."""
        parts = (part.strip(" .") for part in re.split(r"[;,()]", self.text("notes")))
        return tuple(
            part for part in parts if part and not any(word and word in part.lower() for word in self._understood)
        )

    def text(self, name: str) -> str:
        """Returns the cell's text; empty for a blank or unknown value."""
        text = self._row.get(name, "")
        return "" if text.lower() in _BLANK else text

    def raw(self, name: str) -> str:
        """Returns the cell's text in lower case, also where `none` has a meaning."""
        return self._row.get(name, "").lower()

    def number(self, name: str) -> float | None:
        """Returns a positive number, or None."""
        text = self.text(name)
        if not text or text.upper().startswith("OOM"):
            return None
        plain = re.sub(r" *\(.*\)$", "", text).lstrip("~≈<>≥≤ ")
        plain = _THOUSANDS.sub(lambda found: re.sub("[,_]", "", found[0]), plain)
        try:
            value = float(re.sub(f" *(?:{_UNITS.get(name, '')})$", "", plain))
        except ValueError:
            value = float("nan")
        if not 0 < value < float("inf"):
            self.problem(f"{name}: expected a number above 0, found {text!r}")
            return None
        return value

    def whole(self, name: str, default: int = 0) -> int:
        """Returns a whole number of at least 1, or `default` for a blank cell."""
        if self.text(name) == "0":
            return default
        value = self.number(name)
        if value is None:
            return default
        if value != int(value):
            self.problem(f"{name}: expected a whole number, found {self.text(name)!r}; nearest: {max(1, round(value))}")
            return default
        return int(value)

    def check(self) -> None:
        """Reads every number, so that all problems with them are reported at once."""
        for name, path in COUNTS.items():
            most, reason = BOUNDS[path]
            if self.whole(name) > most:
                self.problem(f"{name}: must be at most {most:,}, is {self.whole(name):,}: {reason}")
        for name in AMOUNTS:
            self.number(name)

    def yes(self, name: str) -> bool | None:
        """Returns yes, no, or None for a blank cell."""
        text = self.text(name).lower()
        if text and text not in _YES | _NO:
            self.problem(f"{name}: expected yes or no, found {text!r}")
        return True if text in _YES else False if text in _NO else None

    def problem(self, message: str) -> None:
        """Records why the row cannot be expressed."""
        if message not in self.problems:
            self.problems.append(message)

    def assume(self, message: str) -> None:
        """Records a value that was filled in."""
        if message not in self.assumed:
            self.assumed.append(message)


@cache
def sources() -> dict[str, Any]:
    """Returns the tables of sources.yaml."""
    return yaml_data(__file__, "sources.yaml")


def habits(framework: str) -> dict[str, Any]:
    """Returns what a program does where a row says nothing."""
    return sources()["habits"].get(framework, {})


@cache
def recipes() -> dict[str, Any]:
    """Returns the tables of recipes.yaml."""
    return yaml_data(__file__, "recipes.yaml")


_RELEASE = re.compile(r"\b(2[0-9]\.[0-9]{2}(?:\.[0-9]+)?)(?= nemo)|modelzoo|dgxc")
_FORMATS = (("nvfp4|fp4", "nvfp4"), ("mxfp8|fp8-mx", "mxfp8"), ("fp8", "fp8"), ("bf16", "bf16"))
_MODULES = {"norm": "layernorm", "layernorm": "layernorm", "act": "moe_act", "moe": "moe"}
"""Words for recomputed modules, and Megatron Core's names."""


def recipe_of(cells: Cells, framework: str, model: ModelConfig, key: str, device: str) -> dict[str, Any]:
    """Returns the facts of the recipe that a row ran (recipes.yaml), and the modules that the row itself says to be
    computed again; {} if nothing is known."""
    release = cells.said(_RELEASE)
    lines = recipes().get(framework if framework == "maxtext" else release[0] if release else "", [])
    lines = lines + recipes()["every release"] if framework.startswith("nemo") else lines
    precision = cells.text("precision").lower()
    degrees = {"pp": degree(cells, "pp") or 1, "zero": cells.whole("zero_stage")}
    kind = next((name for pattern, name in _FORMATS if re.search(pattern, precision)), "")
    found: dict[str, Any] = {}
    for names, devices, kinds, facts in lines:
        alike = key in names.split() and device.removeprefix("tpu-").split("-")[0] in devices.split()
        if alike and kind in kinds.split() and all(facts.get(name, n) == n for name, n in degrees.items()):
            found = facts
            break
    if not found and framework.startswith("nemo") and model.moe.n_experts:
        cells.assume("recipe unknown: expert traffic exposed, no CUDA graphs of experts")
    written = re.search(r"selective \(([^)]*)\)", cells.text("recompute").lower())
    modules = [_MODULES[word] for word in written[1].split(",") if word in _MODULES] if written else []
    return found | {"recomputes": modules} if modules else found


STATES = ("fp32", "bf16 moments", "8-bit moments", "bf16")
"""Words for the optimizer's state: moments and master weights in fp32; narrower moments beside master weights; and all
in bf16 with parameters in it, without master weights."""


def state_of(cells: Cells) -> str:
    """Returns the precision of the optimizer's state by the row, or its source; records a problem with the row's."""
    known = (word for pattern, word in sources()["optimizer states"] if cells.said(pattern))
    word = cells.text("optimizer_state").lower() or next(known, "fp32")
    if word not in STATES:
        cells.problem(f"optimizer_state: {word!r} is unknown; known: {', '.join(STATES)}{did_you_mean(word, STATES)}")
    return word


def with_state(word: str, profile: MemoryProfile) -> MemoryProfile:
    """Returns the memory profile with the optimizer's state in a precision (STATES)."""
    if word == "bf16":
        return replace(profile, parameter_bytes=0, unbuffered_gradient_bytes=2, state_bytes=4)
    master = 0 if profile.parameter_bytes == 4 else 4
    moments = {"bf16 moments": 4, "8-bit moments": 2}
    return replace(profile, state_bytes=master + moments[word]) if word in moments else profile


def as_set_up(layout: Layout, recipe: Mapping[str, Any], model: ModelConfig) -> Layout:
    """Returns the layout with what a recipe adds to it."""
    layout = replace(layout, zero=3 if recipe.get("fsdp") else layout.zero, ep=recipe.get("ep", layout.ep))
    if blocks := recipe.get("offloaded_layers"):
        layout = replace(layout, offload="activations", offload_blocks=blocks)
    if parts := recipe.get("loss_parts"):
        layout = replace(layout, loss_chunk=layout.micro_batch * model.seq_len // parts)
    return layout


_WHOLE = "(?:(?<=[0-9])(?![0-9])|(?<![0-9]))"
"""The end of a pattern that does not end within a number: H100 is not in H1000."""
_NETWORK = re.compile(r"(?:([0-9]{1,2}) ?[x×] ?)?([0-9]{2,4}) ?Gb(?:/s|ps|it)? (?:per node|RoCE|InfiniBand|Ethernet)")
"""What joins a node to others: 4 x 100 Gb per node. A capital B is memory."""
_CARDS = re.compile(r"([0-9]{1,2}) ?[x×] ?([0-9]{2,4}) ?G(?:b|bit|bps|b/s|bit/s)?(?![A-Za-z])")
"""The same in a column of its own, where a number of cards says enough: 8x400G NDR."""
USABLE_MEMORY = 0.99
"""Share of the printed memory that a program can use, assumed for devices with an unusual size."""


def framework_of(cells: Cells) -> str:
    """Returns the family of the framework; `megatron` if it is unknown."""
    found = next((family for pattern, family in sources()["frameworks"] if re.search(pattern, cells.program)), "")
    if not found:
        cells.assume("framework unknown: as Megatron")
    releases = sources()["releases"].get(found, ())
    return next((family for pattern, family in releases if cells.said(pattern)), found or "megatron")


def cluster_of_row(cells: Cells) -> Cluster | None:
    """Returns the machine with as many nodes as the row needs; None with a recorded problem if it is unknown."""
    text, devices = cells.text("gpu").lower(), cells.whole("n_gpus")
    if not devices and not any(problem.startswith("n_gpus") for problem in cells.problems):
        cells.problem(f"n_gpus: is {cells.text('n_gpus') or 'blank'}, and nothing else says how many devices there are")
    machine = _named(text)
    if not machine and not any(re.search(pattern, text) for pattern in sources()["other devices"]):
        patterns = (name for pattern, name in sources()["devices"] if re.search(f"(?:{pattern}){_WHOLE}", text))
        machine = next(patterns, "") or _spelled(text)
    if not machine:
        known = ", ".join(ACCELERATORS)
        hint = did_you_mean(re.sub(r"nvidia|amd|intel|google|[^a-z0-9-]", "", text), ACCELERATORS)
        cells.problem(f"gpu: {cells.text('gpu')!r} is not a known device{hint} (known: {known})")
    if not machine or not devices:
        return None
    cluster = _sited(cells, machine)
    per_node = cells.whole("gpus_per_node") or cluster.devices_per_node
    per_node = min(per_node, devices)
    cluster = replace(cluster, accelerator=_with_memory(cells, text, cluster.accelerator))
    cluster = replace(cluster, inter=_with_network(cells, cluster.inter, per_node))
    return replace(cluster, preset="", nodes=-(-devices // per_node), devices_per_node=per_node)


def _named(text: str) -> str:
    """Returns the machine of this name, or the first one that a package has added for a device of this name; empty if
    there is none."""
    if text in MACHINES:
        return text
    added = (name for name in MACHINES if MACHINES.package(name) != OWN)
    return next((name for name in added if MACHINES[name].cluster.accelerator.name == text), "")


def _spelled(text: str) -> str:
    """Returns the machine with the longest name, or device's name, that a text has in any spelling, such as "NVIDIA RTX
    PRO 6000 Blackwell"; empty if there is none."""
    names = {MACHINES[machine].cluster.accelerator.name: machine for machine in reversed([*MACHINES])}
    names |= {machine: machine for machine in MACHINES}
    spelled = {name: "[ _-]?".join(re.findall("[a-z]+|[0-9]+", name)) for name in names}
    found = [name for name, pattern in spelled.items() if re.search(rf"(?<![a-z0-9]){pattern}(?![a-z0-9])", text)]
    return names[max(found, key=len)] if found else ""


def _with_memory(cells: Cells, text: str, device: Accelerator) -> Accelerator:
    """Returns the device with the memory that its spelling states, if that differs: an A100 with 64 GB."""
    stated = re.search("([0-9]{2,3}) ?gi?b", text)
    if not stated or abs(float(stated[1]) / device.memory_gib - 1) < MEMORY_TOLERANCE:
        return device
    cells.assume(f"{device.name} with {stated[1]} GB")
    return replace(device, memory_gib=USABLE_MEMORY * float(stated[1]))


def _with_network(cells: Cells, link: Link, per_node: int) -> Link:
    """Returns the link between nodes with the bandwidth that the row states: 4 x 100 Gb per node."""
    text = cells.text("network")
    stated = _NETWORK.search(text or cells.text("notes")) or _CARDS.search(text)
    if not stated:
        if text:
            cells.problem(f"network: {text!r} is not understood; such as 4 x 100 Gb per node")
        return link
    cells.said(re.escape(stated[0].lower()))
    gbs = int(stated[1] or 1) * float(stated[2]) / 8 / per_node
    if abs(gbs / link.gbs - 1) > 0.01:
        cells.assume(f"{gbs:g} GB/s per device between nodes")
    return replace(link, gbs=gbs)


def _sited(cells: Cells, machine: str) -> Cluster:
    """Returns the machine of the source if it is known, else the device's usual one."""
    site = next(
        (own for pattern, of, own in sources()["sites"] if re.fullmatch(of, machine) and cells.said(pattern)),
        machine,
    )
    if site == "v100-16gb":  # the one device without a machine of its own in the catalogue
        cells.assume("V100 with 16 GB in a DGX-1")
        return replace(CLUSTERS["dgx-v100"], accelerator=ACCELERATORS["v100-16gb"])
    cluster = CLUSTERS[site]
    stated = next((gbs for pattern, gbs in sources()["networks"] if cells.said(pattern)), 0.0)
    return replace(cluster, inter=replace(cluster.inter, gbs=stated)) if stated else cluster


def products_of(cells: Cells, cluster: Cluster, framework: str) -> Products:
    """Returns the number format of the blocks' matrix products; the narrower one of two."""
    text = cells.text("precision").lower()
    device = cluster.accelerator
    for pattern, products in sources()["configurations"]:
        if re.search(pattern, cells.description) and getattr(device, f"{products}_tflops"):
            return products  # the name of the configuration that ran says more than the column
    for pattern, products in (("fp4", "fp4"), ("fp8|e4m3", "fp8"), ("bf16|bfloat", "bf16"), ("fp16|half", "fp16")):
        if re.search(pattern, text):
            if products in ("fp4", "fp8") and not getattr(device, f"{products}_tflops"):
                cells.problem(
                    f"precision: {cells.text('precision')!r}, but {device.name} has no {products}; nearest: bf16"
                )
            if products == "bf16" and not device.bf16_tflops:
                return "fp16"
            return products
    if re.search("fp32|float32", text):
        return "fp32"
    if text:
        cells.problem(f"precision: {cells.text('precision')!r} is unknown; known: fp32, fp16, bf16, fp8, fp4")
    if not device.bf16_tflops:
        return "fp16"
    for pattern, products, most, other, because in sources()["narrow products"]:
        able = getattr(device, f"{products}_tflops") and cells.whole("n_gpus") <= most
        if able and not device.name.startswith(other) and cells.said(pattern):
            cells.assume(f"precision blank: {products}, {because}")
            return products
    if habits(framework).get("precision"):
        return habits(framework)["precision"]
    cells.assume("precision blank: bf16")
    return "bf16"


def scheduled(cells: Cells, model: ModelConfig, framework: str, layout: Layout) -> Layout:
    """Returns the schedule and, if the framework distributes layers evenly, the cut."""
    if layout.pp == 1:
        return layout
    chunks = _chunks(cells, model, layout)
    name = _name(cells, chunks)
    if not name:
        return layout
    entry = catalogue.SCHEDULES[name]
    least, most = entry.chunks
    if entry.interleaves and chunks < least:
        stated = next((number for pattern, number in sources()["interleaved"] if cells.said(pattern)), 2)
        chunks = min(stated, model.n_layers // layout.pp)
        cells.assume(f"vpp blank: {chunks}")
    chunks = min(max(chunks, least), most)
    totals = _totals(model.n_layers, layout.pp, rest_last=habits(framework).get("rest_last", False))
    if entry.interleaves:
        if chunks > min(totals):
            cells.assume(f"vpp {chunks} with stages without layers: {min(totals)}")
        chunks = min(chunks, *totals)
        name = name if chunks > 1 else entry.interleaves
    if entry.placement != "round robin":
        return replace(layout, schedule=name, pp_chunks=chunks if most > 1 else 0)
    sizes = _cut(totals, chunks)
    named = cells.text("model_name").lower()
    if any(
        model in named and re.search(pattern, cells.program) for model, pattern in sources()["rest before the loss"]
    ):
        sizes = _last_rest(model, layout.pp * max(1, chunks)) or sizes
    cut = "+".join(map(str, sizes))
    return replace(layout, schedule=name, pp_chunks=chunks if chunks > 1 else 0, pp_cut=cut)


def _name(cells: Cells, chunks: int) -> str:
    """Returns the schedule's name; empty with a recorded problem if it is unknown."""
    text = re.sub(r"\(.*\)", "", cells.text("schedule").lower()).strip()
    text = text or Layout.schedule
    plain = re.sub("[^a-z0-9_]", "", text)
    found = text if text in catalogue.SCHEDULES else catalogue.likely(plain)
    if found is None:  # as in "modified interleaved 1F1B"
        within = [name for name in catalogue.SCHEDULES if name.replace("_", "") in plain]
        found = max(within, key=len, default=None)
    if found is None:
        cells.problem(f"schedule: {text!r} is unknown; known: {', '.join(catalogue.SCHEDULES)}")
        return ""
    forms = (name for name, entry in catalogue.SCHEDULES.items() if entry.interleaves == found)
    return next(forms, found) if chunks > 1 else found


def _chunks(cells: Cells, model: ModelConfig, layout: Layout) -> int:
    text = cells.text("vpp").lower()
    if text.startswith("max"):
        return max(1, -(-model.n_layers // layout.pp))
    if not text and cells.said("(vpp|layouts?) not given") and (fits := _fitting(model, layout)):
        cells.assume(f"vpp blank: {fits}, for a bubble of at most 5 %")
        return fits
    for pattern, layers, chunks in sources()["chunks"]:
        if not text and layers == model.n_layers and cells.said(pattern):
            cells.assume(f"vpp blank: {chunks}")
            return chunks
    return cells.whole("vpp", 1)


def _fitting(model: ModelConfig, layout: Layout) -> int:
    """Returns the fewest chunks of whole layers with which the bubble is at most 5 %; 0 if there are none."""
    each = model.n_layers // layout.pp
    legal = [n for n in range(1, each + 1) if model.n_layers % layout.pp == 0 and each % n == 0]
    return next((n for n in legal if (layout.pp - 1) <= 0.05 * layout.accumulation * n), max(legal, default=0))


def _totals(layers: int, pp: int, *, rest_last: bool) -> list[int]:
    """Returns the layers of each rank: equal parts; one less on the first and the last rank if the embedding and the
    head count as a layer each; else DeepSpeed's, whose last rank gets the rest."""
    if layers % pp == 0:
        return [layers // pp] * pp
    if (layers + 2) % pp == 0 and layers + 2 > pp:
        each = (layers + 2) // pp
        return [each - 1, *[each] * (pp - 2), each - 1]
    each = -(-layers // pp)
    left = layers - each * (pp - 1)
    if rest_last and left > 0:
        return [*[each] * (pp - 1), left]
    return [(layers + pp - 1 - rank) // pp for rank in range(pp)]


def _last_rest(model: ModelConfig, stages: int) -> list[int]:
    """Returns the layers of every stage as Megatron-Bridge cuts DeepSeek-V3 (set_deepseek_v3_pipeline_model_parallel_
    layout): equal ones, and the rest before the module for one more token and the loss; [] if there is no rest."""
    each = -(-(model.n_layers - model.mtp) // stages)
    rest = model.n_layers - each * (stages - 1)
    return [*[each] * (stages - 1), rest] if rest > 0 else []


def _cut(totals: list[int], chunks: int) -> list[int]:
    """Returns the layers of every stage, chunk after chunk. A remainder goes to a rank's later chunks, which have fewer
    micro-batches in flight; the last rank's last chunk, beside the head, has the fewest."""
    sizes = list[int]()
    for chunk in range(chunks):
        for rank, total in enumerate(totals):
            place = chunk if rank == len(totals) - 1 else chunks - 1 - chunk
            sizes.append(total // chunks + (place < total % chunks))
    return sizes


STATE_SHARE = 0.6
"""Share of a device's memory for state in a layout that is filled in."""


def degree(cells: Cells, name: str) -> int:
    """Returns tp, pp, cp, ep or dp of the row, from its column or MLPerf's configuration name; 0 if it is not given."""
    if found := cells.whole(name):
        return found
    if written := cells.said(r"xtp([0-9]{1,4})pp([0-9]{1,4})cp([0-9]{1,4})"):
        return int({"tp": written[1], "pp": written[2], "cp": written[3]}.get(name, 0))
    return 0


def layout_of(cells: Cells, model: ModelConfig, cluster: Cluster, framework: str) -> tuple[Layout, Batch] | None:
    """Returns the row's layout and batch; None with recorded problems if they disagree."""
    devices = cells.whole("n_gpus")
    layout = _degrees(cells, model, cluster, framework, devices)
    if layout is None:
        return None
    layout = derived.with_modes(layout, _recompute(cells, model.n_layers, cluster, framework))
    layout = _tensor(cells, model, framework, layout)
    batch = _batch(cells, cluster, layout)
    if batch is None:
        return None
    layout = replace(layout, micro_batch=batch.micro_batch, accumulation=batch.accumulation)
    return scheduled(cells, model, framework, layout), batch


def _degrees(cells: Cells, model: ModelConfig, cluster: Cluster, framework: str, devices: int) -> Layout | None:
    tp, pp, cp, ep, dp = (degree(cells, name) for name in ("tp", "pp", "cp", "ep", "dp"))
    if not (tp or pp or dp):
        tp, pp, cp = _guessed(cells, model, cluster, framework, devices)
        if devices % (tp * pp * cp):
            tp, pp, cp = 1, 1, 1
        cells.assume(f"layout blank: tp {tp}, pp {pp}, cp {cp}, dp {devices // (tp * pp * cp)}")
    tp, pp, cp, ep = tp or 1, pp or 1, cp or 1, ep or 1
    rest = devices // (tp * pp * cp)
    if cp > 1 and dp == rest * cp:
        cells.assume(f"dp {dp} is printed with cp {cp}: {rest}")
        dp = rest
    if devices % (tp * pp * cp) or (dp and dp != rest and dp * ep != rest):
        product = f"tp {tp} × pp {pp} × cp {cp}" + (f" × dp {dp}" if dp else "")
        whole = tp * pp * cp * (dp or 1)
        legal = (
            f"nearest dp: {rest}"
            if devices % (tp * pp * cp) == 0
            else f"nearest n_gpus: {max(1, round(devices / whole)) * whole}"
        )
        cells.problem(f"dp: {product} = {whole} devices, n_gpus is {devices}; {legal}")
        return None
    if dp and dp != rest:
        cells.assume(f"dp {dp} is printed without ep {ep}: {rest}")
    if model.n_layers < pp:
        cells.problem(
            f"pp: {pp} stages need at least as many layers, the model has {model.n_layers}; nearest: {model.n_layers}"
        )
        return None
    return _sharding(cells, model, cluster, framework, Layout(tp=tp, pp=pp, cp=cp, ep=ep, dp_shard=rest))


def _guessed(cells: Cells, model: ModelConfig, cluster: Cluster, framework: str, devices: int) -> tuple[int, int, int]:
    """Returns tp, pp and cp of a row without a layout: as few ranks as hold the state, tensor ranks inside a node first
    (Narayanan et al. 2021, section 5.4), and enough cp that every data rank has a sequence."""
    sequences = cells.whole("global_batch_seqs") or devices
    per_device, tp, _ = _script(cells, cluster)
    if per_device:
        return tp, 1, 1
    for family, layers, width, above_gib, *degrees in sources()["layouts"]:
        alike = framework.startswith(family) and (layers, width) == (model.n_layers, model.d_model)
        if alike and cluster.accelerator.memory_gib > above_gib:
            if devices % prod(degrees) == 0 and sequences % (devices // prod(degrees)) == 0:
                return tuple(degrees)
            break
    tp = pp = cp = 1
    if habits(framework).get("zero") != 3:
        within = min(8, cluster.devices_per_node, devices)
        while tp < within and _state_load(model, cluster, framework, devices, tp) > 1 and model.n_heads % (2 * tp) == 0:
            tp *= 2
        legal = [
            n
            for n in range(1, min(model.n_layers, devices // tp) + 1)
            if devices % (tp * n) == 0 and sequences % (devices // (tp * n)) == 0
        ]
        pp = next(
            (n for n in legal if _state_load(model, cluster, framework, devices, tp * n) <= 1), max(legal, default=1)
        )
    while devices // (tp * pp * cp) > sequences and devices % (2 * tp * pp * cp) == 0:
        cp *= 2
    return tp, pp, cp


def _state_load(model: ModelConfig, cluster: Cluster, framework: str, devices: int, ranks: int) -> float:
    """Returns the bytes of the state over the memory available for it, with the model cut over `ranks` ranks."""
    dp = max(1, devices // ranks)
    each = 6 + 12 / dp if habits(framework).get("zero") == 1 else 18
    return count(model) * each / ranks / (cluster.accelerator.memory_gib * 2**30 * STATE_SHARE)


def _script(cells: Cells, cluster: Cluster) -> tuple[int, int, str]:
    """Returns sequences per device, tensor-parallel ranks and recomputation of the script of a row's model on its
    device; 0 sequences if none is known."""
    found = re.search(r"(?:maxtext|llama3\.1)-([0-9]+b)\b", cells.text("model_name").lower())
    return next(
        (
            (each, tp, mode)
            for device, size, each, tp, mode in sources()["scripts"]
            if found and (device, size) == (cluster.accelerator.name, found[1])
        ),
        (0, 1, ""),
    )


def _sharding(cells: Cells, model: ModelConfig, cluster: Cluster, framework: str, layout: Layout) -> Layout:
    """Returns the layout with the state's sharding, by zero_stage or, if that is blank, the framework's habit."""
    text, dp = cells.text("zero_stage"), layout.dp_shard
    stage = re.search("(?<![0-9.])[0-3](?![0-9.])", text)
    if not stage and text:
        cells.problem(f"zero_stage: expected 0, 1, 2 or 3, found {text!r}")
    zero = int(stage[0]) if stage else habits(framework).get("zero", 0)
    if model.moe.n_experts and layout.ep > 1:
        zero = max(zero, 1)  # experts are distributed over ranks that shard
    stated = layout.ep
    whole = re.search(sources()["whole experts"], cells.program) or layout.ep > layout.shard_ranks
    if whole and habits(framework).get("whole_experts") and layout.ep % layout.tp == 0:
        # expert_tensor_parallel_size 1: tensor ranks are expert ranks, too, and cut nothing besides.
        layout = replace(layout, ep=layout.ep // layout.tp)
    if not model.moe.n_experts:
        if stated > 1:
            cells.problem(f"ep: {stated}, but the model has no experts; give moe_experts and moe_topk; nearest: 1")
        layout = replace(layout, ep=1)
    elif layout.shard_ranks % layout.ep or model.moe.n_experts % layout.ep:
        ep = gcd(gcd(layout.shard_ranks, layout.ep), model.moe.n_experts)
        cells.assume(f"ep {stated} reaches over tp {layout.tp}: ep {ep}, experts cut by tp besides")
        layout = replace(layout, ep=ep)
    if zero == 0:
        return replace(layout, dp_replicate=dp, dp_shard=1, zero=1)
    degrees: tuple[Literal[1], Literal[2], Literal[3]] = (1, 2, 3)
    layout = replace(layout, zero=degrees[zero - 1])
    if cells.said("shard_grad_op"):
        layout = replace(layout, zero=3, reshard=False)
    group = _group(cells, cluster, layout)
    if group and dp % group == 0 and group % layout.ep == 0:
        layout = replace(layout, dp_replicate=dp // group, dp_shard=group)
    return layout


def _group(cells: Cells, cluster: Cluster, layout: Layout) -> int:
    """Returns the ranks that shard among themselves, if they are fewer than all (HSDP); 0 if all do."""
    if cluster.accelerator.name.startswith("tpu") and cluster.domain and layout.dp_shard * layout.tp > cluster.domain:
        cells.assume("one replica per slice")
        return max(1, cluster.domain // layout.tp)
    if cells.said("fsdp group"):
        # dgxc-benchmarking prints the groups by number of devices: 128, at 256 devices 256.
        return 256 if layout.dp_shard == 256 else min(128, layout.dp_shard)
    if within := cells.said(r"\bzero-?[1-3] in groups of ([0-9]{1,5})\b"):
        return int(within[1])
    if cells.said("hsdp|hybrid_shard"):
        cells.assume("HSDP: sharded inside a node")
        return cluster.devices_per_node
    return 0


def _recompute(cells: Cells, n_layers: int, cluster: Cluster, framework: str) -> tuple[derived.Mode, ...]:
    """Returns the recomputation of every layer: by the row's words, by those of a layout, or by the program's habit."""
    text = cells.text("recompute").lower()
    if "*" in text:
        try:
            return derived.modes(text, n_layers)
        except JobError as error:
            cells.problem(f"recompute: {error}")
            return ("none",) * n_layers
    return (_recompute_of_all(cells, text, cluster, framework),) * n_layers


def _recompute_of_all(cells: Cells, text: str, cluster: Cluster, framework: str) -> derived.Mode:
    text = "mlp" if text == "selective (mlp)" else text
    if text in derived.MODES:
        return text
    if cells.raw("recompute") in ("no", "none", "false", "0", "off"):
        return "none"
    if re.search("full|yes|true|^1$|every layer|block", text):
        return "full"
    if "selective" in text or "attn" in text or "attention" in text:
        if re.search(r"\((?!op|layer\))", text) and not re.search("att|core", text):
            cells.assume(f"recompute {text!r}: next to no time, as none")
            return "none"
        return "selective"
    if text:
        known = f"{', '.join(derived.MODES)}, or runs of layers such as 8*full+24*none"
        cells.problem(f"recompute: {text!r} is unknown; known: {known}{did_you_mean(text, derived.MODES)}")
        return "none"
    mode, because = habits(framework).get("recompute", ("none", ""))
    if mode == "script":
        mode = "products" if _script(cells, cluster)[2] == "products" else "full"
    if mode != "none":
        cells.assume(f"recompute blank: {mode}{because}")
    return mode


def _tensor(cells: Cells, model: ModelConfig, framework: str, layout: Layout) -> Layout:
    """Returns the layout with its sequence parallelism; records a problem if tp does not divide the heads."""
    if layout.tp == 1:
        return layout
    if model.n_heads % layout.tp:
        legal = [t for t in range(1, model.n_heads + 1) if model.n_heads % t == 0]
        near = min(legal, key=lambda t: abs(t - layout.tp))
        cells.problem(f"tp: n_heads {model.n_heads} / tp {layout.tp} is not an integer; nearest: {near}")
    stated = cells.yes("sequence_parallel")
    habit = habits(framework)
    if stated is None and habit.get("sp"):
        cells.assume("sequence_parallel blank: yes")
    sp = habit.get("sp", False) if stated is None else stated
    return replace(layout, sp=sp, sp_regather=sp and habit.get("sp_regather", True))


def _batch(cells: Cells, cluster: Cluster, layout: Layout) -> Batch | None:
    """Returns the batch with the micro-batch that matches it."""
    dp = layout.data_ranks
    micro, sequences = cells.whole("micro_batch"), cells.whole("global_batch_seqs")
    per_device, _, _ = _script(cells, cluster)
    if not sequences:
        each = per_device * layout.tp or micro or 1
        sequences = each * dp
        micro = micro or each
        cells.assume(f"global batch blank: {sequences}, {each} per data rank")
    if sequences % dp:
        near = max(1, round(sequences / dp)) * dp
        cells.problem(f"global_batch_seqs: {sequences} sequences do not divide by {dp} data ranks; nearest: {near}")
        return None
    each = sequences // dp
    if not micro and (local := cells.said(r"local batch ([0-9]{1,6})")):
        micro = 1 if layout.pp > 1 else int(local[1])
    if not micro:
        micro = 1 if layout.pp > 1 or each > 8 else each
        if each > 1:
            cells.assume(f"micro_batch blank: {micro}")
    if each % micro:
        fits = max(n for n in range(1, min(micro, each) + 1) if each % n == 0)
        cells.assume(f"micro_batch {micro} does not divide the {each} sequences of a data rank: {fits}")
        micro = fits
    return Batch(sequences, micro, each // micro, dp)
