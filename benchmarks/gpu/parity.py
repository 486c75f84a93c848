"""Every technique against one process on the same device, half-precision kernels against float64, GPU against CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.gpu import commands, shapes
from benchmarks.gpu.part import Case, Part
from benchmarks.gpu.results import Outcome, Row, reason
from benchmarks.gpu.setting import Setting

VERIFY_S = 3600.0
TRAIN_S = 300.0
JOB = "examples/main.yaml"
"""Commands run in ROOT."""
GPT = ["model.norm=layernorm", "model.positions=learned", "model.activation=gelu", "model.bias=true"]
KINDS = {
    "GPT, every technique and every pair of techniques": [*GPT, "--max-ranks", "8"],
    "GPT with dropout and documents, up to 4 ranks": [
        *GPT,
        *("model.dropout=0.1", "data.document_mask=true", "--max-ranks", "4"),
    ],
    "Llama, up to 4 ranks": ["--max-ranks", "4"],
    "Llama, every pipeline schedule": ["--schedules", "--max-ranks", "4"],
    "mixture of experts, up to 4 ranks": ["model=tiny-moe", "--max-ranks", "4"],
}
"""Words of `phalanx verify` for each kind of model; examples/main.yaml is of the Llama kind."""
QUICK = {
    "GPT, two layouts": [*GPT, "++model.n_layers=2", "++model.d_model=16", "--layouts", "tp=2", "dp_shard=2,zero=3"]
}
SAME_LOSS = 1e-4
"""Largest relative difference of a loss in fp32 between devices: sums of another order, over some steps."""


def cases(setting: Setting) -> list[Case]:
    kinds = QUICK if setting.quick else KINDS
    found = [Case(name, partial(verify, setting, words)) for name, words in kinds.items()]
    found.append(Case("attention over blocks, as ring attention has it", partial(blocks, setting)))
    found.append(Case(f"training in fp32, {setting.device} and cpu", partial(losses, setting)))
    return found


def verify(setting: Setting, words: Sequence[str]) -> dict[str, Any]:
    """Runs `phalanx verify` on the device, in float64."""
    argv = commands.phalanx("verify", JOB, f"cluster.device={setting.device}", "--json", *words)
    report = commands.answer(argv, limit_s=VERIFY_S, codes=(0, 1))
    compared = report["cases"]
    worst = {
        key: max((case[key] for case in compared if case[key] is not None), default=None)
        for key in ("loss_max_rel", "grad_max_rel", "param_max_rel")
    }
    return {
        "ok": report["ok"],
        "layouts": len(compared),
        "ranks": max(case["world"] for case in compared),
        "tolerance": report["tolerance"],
        **worst,
        "wrong": [
            {key: case[key] for key in ("layout", "first_difference", "error")} for case in compared if not case["ok"]
        ],
        "left_out": report["skipped"],
        "seconds": report["seconds"],
        "command": commands.shown(argv),
    }


def blocks(setting: Setting) -> dict[str, Any]:
    """Compares the device's fused attention kernel, block by block, with float64."""
    argv = commands.program("attention_blocks", "--device", setting.device)
    return {**commands.answer(argv, limit_s=TRAIN_S), "command": commands.shown(argv)}


def losses(setting: Setting) -> dict[str, Any]:
    """Compares the same training on the device and on the CPU."""
    steps = 3 if setting.quick else 10
    shape = shapes.TINY if setting.quick else shapes.Shape("small", 4, 128, 4, vocab=256, seq_len=128)
    layout = ["layout.micro_batch=2", "train.global_batch=4", "train.precision=fp32"]
    found = {}
    for device in dict.fromkeys((setting.device, "cpu")):
        words = shapes.training(replace(setting, device=device), shape, *layout)
        found[device] = [row["loss"] for row in commands.train(words, steps=steps, limit_s=TRAIN_S)]
    worst = max(abs(a - b) / abs(b) for a, b in zip(found[setting.device], found["cpu"], strict=True))
    command = commands.shown(commands.phalanx("train", *shapes.training(setting, shape, *layout)))
    return {"ok": worst <= SAME_LOSS, "loss_max_rel": worst, "tolerance": SAME_LOSS, "ranks": 1, "command": command}


def table(outcomes: Mapping[str, Outcome]) -> list[Row]:
    rows: list[Row] = [("what", "layouts", "ranks", "loss", "gradients", "parameters", "tolerance", "")]
    for name, found in outcomes.items():
        if why := reason(found):
            rows.append((name, why))
            continue
        figures = [found.get(key) for key in ("loss_max_rel", "grad_max_rel", "param_max_rel")]
        shown = ["" if figure is None else f"{figure:.1e}" for figure in figures]
        wrong = found.get("wrong", [])
        verdict = "ok" if found["ok"] else "FAIL: " + ("; ".join(case["layout"] for case in wrong) or "too far apart")
        counts = str(found.get("layouts", "")), str(found["ranks"])
        rows.append((name, *counts, *shown, f"{found['tolerance']:.0e}", verdict))
    return rows


PART = Part("parity", "Parity: relative differences from one process", cases, table)
