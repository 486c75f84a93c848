"""The layout of a table's row: the degrees of the axes, sharding, recomputation, the batch."""

from __future__ import annotations

import re
from dataclasses import replace
from math import gcd, prod
from typing import Literal

from phalanx.blocks.parameters import count
from phalanx.config.cluster import Cluster
from phalanx.config.layout import Layout
from phalanx.config.model import ModelConfig
from phalanx.nearest import did_you_mean
from phalanx.partition.batch import Batch
from phalanx.validation import row_schedule
from phalanx.validation.row_cells import Cells
from phalanx.validation.row_machine import DISTRIBUTED, MODERN, SHARDED

STATE_SHARE = 0.6
"""Share of a device's memory for state in a layout that is filled in."""

_MAXTEXT = {
    ("tpu-v5e", "16b"): (6, 1, "full"),
    ("tpu-v5e", "32b"): (4, 1, "full"),
    ("tpu-v5e", "64b"): (2, 1, "full"),
    ("tpu-v5e", "128b"): (1, 16, "none"),
    ("tpu-v5p", "32b"): (7, 4, "none"),
    ("tpu-v5p", "64b"): (3, 4, "none"),
    ("tpu-v5p", "128b"): (1, 8, "none"),
    ("tpu-v5p", "256b"): (1, 8, "none"),
}
"""MaxText's scripts by device and size (maxtext, MaxText/configs/v5e and v5p): sequences per device, tensor-parallel
ranks, recomputation."""


def degree(cells: Cells, name: str) -> int:
    """Returns tp, pp, cp, ep or dp of the row, from its column or MLPerf's configuration name; 0 if it is not given."""
    if found := cells.whole(name):
        return found
    if written := re.search(r"xtp([0-9]{1,4})pp([0-9]{1,4})cp([0-9]{1,4})", cells.description):
        return int({"tp": written[1], "pp": written[2], "cp": written[3]}.get(name, 0))
    return 0


def layout_of(cells: Cells, model: ModelConfig, cluster: Cluster, framework: str) -> tuple[Layout, Batch] | None:
    """Returns the row's layout and batch; None with recorded problems if they disagree."""
    devices = cells.whole("n_gpus")
    layout = _degrees(cells, model, cluster, framework, devices)
    if layout is None:
        return None
    layout = replace(layout, recompute=_recompute(cells, cluster, framework))
    layout = _tensor(cells, model, framework, layout)
    batch = _batch(cells, cluster, layout)
    if batch is None:
        return None
    layout = replace(layout, micro_batch=batch.micro_batch, accumulation=batch.accumulation)
    return row_schedule.scheduled(cells, model, framework, layout), batch


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
    per_device, tp, _ = _maxtext(cells, cluster)
    if per_device:
        return tp, 1, 1
    if framework == "mlperf" and (recipe := _mlperf(model, cluster, devices, sequences)):
        return recipe
    tp = pp = cp = 1
    if framework not in SHARDED:
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


def _mlperf(model: ModelConfig, cluster: Cluster, devices: int, sequences: int) -> tuple[int, int, int] | None:
    """Returns tp, pp and cp of NVIDIA's submissions of the two large models, which others adopted: eight stages, four
    tensor ranks; for Llama 3.1 405B on 80 GB eight, and cp 2."""
    shapes = {(96, 12288): (4, 8, 1), (126, 16384): (4 if cluster.accelerator.memory_gib > 100 else 8, 8, 2)}
    recipe = shapes.get((model.n_layers, model.d_model))
    if not recipe or devices % prod(recipe) or sequences % (devices // prod(recipe)):
        return None
    return recipe


def _state_load(model: ModelConfig, cluster: Cluster, framework: str, devices: int, ranks: int) -> float:
    """Returns the bytes of the state over the memory available for it, with the model cut over `ranks` ranks."""
    dp = max(1, devices // ranks)
    each = 6 + 12 / dp if framework in DISTRIBUTED else 18
    return count(model) * each / ranks / (cluster.accelerator.memory_gib * 2**30 * STATE_SHARE)


def _maxtext(cells: Cells, cluster: Cluster) -> tuple[int, int, str]:
    found = re.search(r"maxtext-([0-9]+b)\b", cells.text("model_name").lower())
    return _MAXTEXT.get((cluster.accelerator.name, found[1] if found else ""), (0, 1, ""))


def _sharding(cells: Cells, model: ModelConfig, cluster: Cluster, framework: str, layout: Layout) -> Layout:
    """Returns the layout with the state's sharding, by zero_stage or, if that is blank, the framework's habit."""
    text, dp = cells.text("zero_stage"), layout.dp_shard
    stage = re.search("[0-3]", text)
    if not stage and text:
        cells.problem(f"zero_stage: expected 0, 1, 2 or 3, found {text!r}")
    default = 3 if framework in SHARDED else 1 if framework in DISTRIBUTED else 0
    zero = int(stage[0]) if stage else default
    if model.moe.n_experts and layout.ep > 1:
        zero = max(zero, 1)  # experts are distributed over ranks that shard
    if not model.moe.n_experts:
        layout = replace(layout, ep=1)
    elif layout.shard_ranks % layout.ep or model.moe.n_experts % layout.ep:
        ep = gcd(gcd(layout.shard_ranks, layout.ep), model.moe.n_experts)
        cells.assume(f"ep {layout.ep} reaches over tp {layout.tp}: ep {ep}, experts cut by tp besides")
        layout = replace(layout, ep=ep)
    if zero == 0:
        return replace(layout, dp_replicate=dp, dp_shard=1, zero=1)
    degrees: tuple[Literal[1], Literal[2], Literal[3]] = (1, 2, 3)
    layout = replace(layout, zero=degrees[zero - 1])
    if "shard_grad_op" in cells.description:
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
    if "fsdp group" in cells.description:
        # dgxc-benchmarking prints the groups by number of devices: 128, at 256 devices 256.
        return 256 if layout.dp_shard == 256 else min(128, layout.dp_shard)
    if "hsdp" in cells.description or "hybrid_shard" in cells.description:
        cells.assume("HSDP: sharded inside a node")
        return cluster.devices_per_node
    return 0


def _recompute(cells: Cells, cluster: Cluster, framework: str) -> Literal["none", "selective", "full"]:
    text = cells.text("recompute").lower()
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
        known = ("none", "selective", "full")
        cells.problem(f"recompute: {text!r} is unknown; known: {', '.join(known)}{did_you_mean(text, known)}")
        return "none"
    _, _, script = _maxtext(cells, cluster)
    if framework == "maxtext" and script != "none":
        cells.assume("recompute blank: full")  # the default of its base.yml
        return "full"
    if script == "none" or framework.startswith(("nemo", "mlperf", "zero-bubble", "fsdp1")):
        return "none"
    if framework in ("megatron-2021", "vtrain", "megatron-deepspeed"):
        cells.assume("recompute blank: full")
        return "full"
    if framework.startswith("torchtitan"):
        cells.assume("recompute blank: selective")
        return "selective"
    return "none"


def _tensor(cells: Cells, model: ModelConfig, framework: str, layout: Layout) -> Layout:
    """Returns the layout with its sequence parallelism; records a problem if tp does not divide the heads."""
    if layout.tp == 1:
        return layout
    if model.n_heads % layout.tp:
        legal = [t for t in range(1, model.n_heads + 1) if model.n_heads % t == 0]
        near = min(legal, key=lambda t: abs(t - layout.tp))
        cells.problem(f"tp: n_heads {model.n_heads} / tp {layout.tp} is not an integer; nearest: {near}")
    stated = cells.yes("sequence_parallel")
    by_default = framework in MODERN or framework.startswith("torchtitan")
    if stated is None and by_default:
        cells.assume("sequence_parallel blank: yes")
    sp = by_default if stated is None else stated
    # FSDP2's sequence parallelism keeps what it gathered; Megatron's gathers it again (Korthikanti et al. 2022).
    return replace(layout, sp=sp, sp_regather=sp and not framework.startswith("torchtitan"))


def _batch(cells: Cells, cluster: Cluster, layout: Layout) -> Batch | None:
    """Returns the batch with the micro-batch that matches it."""
    dp = layout.data_ranks
    micro, sequences = cells.whole("micro_batch"), cells.whole("global_batch_seqs")
    per_device, _, _ = _maxtext(cells, cluster)
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
    if not micro and (local := re.search(r"local batch ([0-9]{1,6})", cells.description)):
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
