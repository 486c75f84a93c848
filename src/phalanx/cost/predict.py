"""The whole prediction of a step: time, memory, FLOPs."""

from __future__ import annotations

from phalanx.blocks.flops import train_flops_per_step
from phalanx.cost.flops import hardware_flops_per_step
from phalanx.cost.memory.rank_memory import step_memory
from phalanx.cost.prediction import Prediction
from phalanx.cost.spec import StepSpec
from phalanx.cost.time.kernel import peak_flops
from phalanx.cost.time.step_time import step_parts


def predict(spec: StepSpec) -> Prediction:
    """Returns time, memory and FLOPs of one step. Raises JobError if the layout's schedule or cut does not fit it."""
    device, sequences = spec.cluster.accelerator, spec.batch.global_batch
    return Prediction(
        parts=step_parts(spec),
        devices=spec.layout.world,
        tokens=sequences * spec.model.seq_len,
        model_flops=train_flops_per_step(spec.model, sequences),
        hardware_flops=hardware_flops_per_step(spec.model, spec.layout, sequences),
        peak_flops=spec.cluster.peak_tflops * 1e12 or peak_flops(device, spec.products),
        memory=step_memory(spec),
        memory_limit=device.memory_gib * 2**30,
        spread=spec.framework.spread,
        memory_spread=spec.framework.memory_spread,
        host_limit=spec.cluster.host.memory_gib * 2**30,
        disk_limit=spec.cluster.host.disk_gib * 2**30,
    )
