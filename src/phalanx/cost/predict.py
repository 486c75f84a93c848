"""The whole prediction of a step: time, memory, FLOPs."""

from __future__ import annotations

from phalanx.cost.case import Case
from phalanx.cost.flops import hardware_flops_per_step, train_flops_per_step
from phalanx.cost.kernel import peak_flops
from phalanx.cost.prediction import Prediction
from phalanx.cost.stage_memory import step_memory
from phalanx.cost.step_time import step_parts


def predict(case: Case) -> Prediction:
    """Time, memory and FLOPs of one step. Raises JobError where the layout's schedule or cut do not go with it."""
    device, sequences = case.cluster.accelerator, case.batch.global_batch
    return Prediction(
        parts=step_parts(case),
        devices=case.layout.world,
        tokens=sequences * case.model.seq_len,
        model_flops=train_flops_per_step(case.model, sequences),
        hardware_flops=hardware_flops_per_step(case.model, case.layout, sequences),
        peak_flops=case.cluster.peak_tflops * 1e12 or peak_flops(device, case.products),
        memory=step_memory(case),
        memory_limit=device.memory_gib * 2**30,
        spread=case.software.spread,
        memory_spread=case.software.memory_spread,
    )
