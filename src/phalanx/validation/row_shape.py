"""The model of a table's row: a published shape by name, values of other columns, and solved values."""

from __future__ import annotations

import re
from dataclasses import replace
from math import sqrt

from phalanx.config.model import ModelConfig
from phalanx.nearest import did_you_mean
from phalanx.validation import shapes
from phalanx.validation.row_cells import Cells

_COLUMNS = ("n_layers", "hidden", "ffn_hidden", "n_heads", "n_kv_heads", "vocab", "seq_len", "moe_experts", "moe_topk")

_DROPOUT = ("megatron-2021", "megatron-2022", "megatron-deepspeed", "zero-bubble", "vtrain", "deepspeed-zero3")
"""Frameworks whose GPTs trained with dropout 0.1, Megatron-LM's default until 2022."""


def model_of(cells: Cells, framework: str, pp: int) -> ModelConfig | None:
    """Returns the row's model with vocabulary and sequence length; None with a recorded problem if it is unknown."""
    columns = {name: cells.whole(name) for name in _COLUMNS}
    name = cells.text("model_name")
    key = shapes.key_of(name)
    if "bloom" in name.lower() and not key:
        base, key = _bloom(columns), "bloom"
    elif key:
        base = shapes.SHAPES[key]
    else:
        base = _unknown(cells, columns)
    if key and shapes.remark(key):
        cells.assume(shapes.remark(key))
    if base is None:
        return None
    if not columns["n_layers"] and (cut := re.search(r"-l([0-9]{1,3})\b", name.lower())):
        columns["n_layers"] = int(cut[1])
    shape = _overridden(base, columns)
    dense = base.moe.n_dense_layers
    if base.n_layers and shape.n_layers < base.n_layers and dense > 1:
        dense = max(1, round(dense * shape.n_layers / base.n_layers))
        cells.assume(f"{shape.n_layers} of {base.n_layers} layers: {dense} of {base.moe.n_dense_layers} dense ones")
        shape = replace(shape, moe=replace(shape.moe, n_dense_layers=dense))
    if (
        key == "deepseekv3"
        and shape.n_layers == base.n_layers
        and re.search("nemo|megatron-bridge|dgxc|modelzoo", cells.description)
        and "w/o mtp" not in cells.description
    ):
        cells.assume("multi-token prediction as one layer more")
        shape = replace(shape, n_layers=shape.n_layers + 1)
    shape = _solved(cells, shape, pp, bool(key) and key != "bloom")
    if shape is None:
        return None
    if not (columns["vocab"] or (key and key != "bloom")) and "bloom" not in name.lower():
        cells.assume(f"vocab blank: {shape.vocab_size}")
    if not columns["seq_len"]:
        cells.assume(f"seq_len blank: {shape.seq_len}")
    if shape.activation.startswith("gelu") and shape.positions == "learned" and framework in _DROPOUT:
        shape = replace(shape, dropout=0.1)
    return replace(shape, preset="")


def _bloom(columns: dict[str, int]) -> ModelConfig:
    """Returns a candidate for BLOOM: 250 thousand tokens; 96 heads if 14,400 wide, else 64 by default (bigscience,
    train/tr11-176B-ml/chronicles-prequel.md)."""
    width = columns["hidden"] or 14400
    return shapes.gpt(0, width, 96 if width == 14400 else 64, 250000)


def _unknown(cells: Cells, columns: dict[str, int]) -> ModelConfig | None:
    """Returns a model from its columns alone: Llama's kind if it has fewer key/value heads or experts, else GPT-2's."""
    name = cells.text("model_name")
    lower = name.lower()
    if not columns["hidden"] and not (columns["n_layers"] and cells.number("n_params_b")):
        listed = [shapes.SHAPES[key] for key in shapes.SHAPES if key.startswith(("megatron", "gpt3"))]
        billions = cells.number("n_params_b") or 0
        close = [shape for shape in listed if abs(_billions(shape) / billions - 1) < 0.06] if billions else []
        if close and re.search("gpt|megatron", lower):
            cells.assume(f"shape blank: the GPT of {_billions(close[0]):.1f} B")
            return close[0]
        hint = did_you_mean(shapes.plain(name), shapes.SHAPES)
        cells.problem(
            f"model_name: {name!r} is not a known model{hint}; give n_layers, hidden and n_heads, or one of "
            f"{', '.join(shapes.SHAPES)}"
        )
        return None
    modern = (
        0 < columns["n_kv_heads"] < columns["n_heads"]
        or columns["moe_experts"]
        or re.search("llama|mistral|qwen|deepseek", lower)
    )
    width = columns["hidden"] or 0
    if modern:
        return shapes.llama(0, width, 0, 0, 0, 32000)
    return shapes.gpt(0, width, 0)


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
