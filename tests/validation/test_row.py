from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.axes.catalogue import context_problems
from phalanx.config.cluster import Accelerator
from phalanx.config.clusters import ACCELERATORS
from phalanx.config.job import Job
from phalanx.cost.frameworks import FRAMEWORKS, PHALANX, calibrated, fits, sustained
from phalanx.cost.intervals import time_factors
from phalanx.errors import JobError
from phalanx.validation.row import UNEVEN, key_of, read, remark, shapes
from phalanx.validation.row_layout import AMOUNTS, COUNTS, Cells, sources

ROW = {
    "model_name": "llama3-8b",
    "gpu": "H100",
    "n_gpus": "64",
    "dp": "32",
    "tp": "2",
    "global_batch_seqs": "128",
    "micro_batch": "2",
    "step_time_s": "1.5",
}
"""Invented: nobody measured it."""


def row(**changed: str) -> dict[str, str]:
    return ROW | changed


def problems(**changed: str) -> str:
    with pytest.raises(JobError) as caught:
        read(row(**changed))
    return "\n".join(caught.value.problems)


def test_a_row_is_a_case():
    reading = read(ROW)
    spec = reading.spec
    assert (spec.model.n_layers, spec.model.d_model, spec.model.n_kv_heads) == (32, 4096, 8)
    assert (spec.model.vocab_size, spec.model.seq_len) == (128256, 8192)
    assert (spec.layout.tp, spec.layout.dp_shard, spec.layout.zero, spec.layout.sp) == (2, 32, 1, True)
    assert (spec.batch.global_batch, spec.batch.micro_batch, spec.batch.accumulation) == (128, 2, 2)
    assert (spec.cluster.nodes, spec.cluster.devices_per_node, spec.cluster.accelerator.name) == (8, 8, "h100-80gb")
    assert spec.products == "bf16"
    assert (reading.measured_s, reading.measured_from) == (1.5, "step_time_s")
    assert "sequence_parallel blank: yes" in reading.assumptions
    assert "framework unknown: as Megatron" in reading.assumptions


@pytest.mark.parametrize(
    ("column", "value"),
    [("tokens_per_s_per_gpu", 128 * 8192 / 64 / 1.5), ("tflops_per_gpu", None), ("mfu_pct", None)],
)
def test_seconds_follow_from_what_else_was_measured(column, value):
    told = read(ROW)
    value = value or {"tflops_per_gpu": told.tflops(1.5), "mfu_pct": told.mfu_pct(1.5)}[column]
    reading = read(row(step_time_s="", **{column: str(value)}))
    assert reading.measured_s == pytest.approx(1.5)
    assert reading.measured_from == column


def test_figures_that_contradict_each_other_are_told():
    reading = read(row(tokens_per_s_per_gpu="100"))
    assert any("do not agree" in said for said in reading.assumptions)


@pytest.mark.parametrize(
    ("gpu", "device", "a_node"),
    [
        ("NVIDIA Blackwell GPU (B200-SXM-180GB)", "b200", 8),
        ("NVIDIA Blackwell Ultra GPU (GB300)", "gb300", 4),
        ("GB200", "gb200", 4),
        ("NVIDIA H100-SXM5-80GB", "h100-80gb", 8),
        ("H100 PCIe", "h100-pcie-80gb", 8),
        ("H100-SXM-96GB-HBM2e-500W", "h100-96gb", 8),
        ("NVIDIA H200-SXM5-141GB", "h200", 8),
        ("GH200 120GB", "gh200", 1),
        ("A100", "a100-80gb", 8),
        ('A100 ("NVIDIA Ampere")', "a100-80gb", 8),
        ("A100-SXM4-40GB", "a100-40gb", 8),
        ("V100-SXM-16GB", "v100-16gb", 8),
        ("AMD Instinct MI355X", "mi355x", 8),
        ("AMD Instinct MI300X-192GB", "mi300x", 8),
        ("MI250X (GCD)", "mi250x-gcd", 8),
        ("Intel Max 1550", "max1550-tile", 12),
        ("Intel Gaudi 3", "gaudi3", 8),
        ("TPU v5p", "tpu-v5p", 4),
        ("TPU-trillium", "tpu-v6e", 8),
        ("tpu v5 lite", "tpu-v5e", 8),
    ],
)
def test_devices_are_known_by_many_names(gpu, device, a_node):
    cluster = read(row(gpu=gpu, n_gpus="96", dp="48", global_batch_seqs="96", precision="bf16")).spec.cluster
    assert (cluster.accelerator.name, cluster.devices_per_node) == (device, a_node)
    assert cluster.devices == 96


def test_sites_have_their_own_machines():
    def cluster(gpu: str, notes: str):
        return read(row(gpu=gpu, notes=notes, n_gpus="64")).spec.cluster

    assert cluster("A100-80GB", "Jean Zay").inter.gbs == 6.25
    assert cluster("A100-80GB", "").inter.gbs == 25
    assert cluster("A100", "vTrain").inter.gbs == 12.5
    assert cluster("H100", "24K-GPU cluster").oversubscription == 7
    assert cluster("A100-40GB", "on Polaris").devices_per_node == 4


def test_part_of_a_node_is_no_more_than_that():
    cluster = read(row(n_gpus="4", dp="2", gpus_per_node="8", global_batch_seqs="4")).spec.cluster
    assert (cluster.nodes, cluster.devices_per_node) == (1, 4)


@pytest.mark.parametrize(
    ("gpu", "precision", "products"),
    [
        ("H100", "MXFP8", "fp8"),
        ("GB300", "NVFP4", "fp4"),
        ("GB200", "fp8 or nvfp4", "fp4"),
        ("A100", "fp16/bf16 mixed", "bf16"),
        ("V100", "bf16", "fp16"),
        ("V100", "", "fp16"),
        ("A100", "amp_bf16", "bf16"),
    ],
)
def test_precision(gpu, precision, products):
    assert read(row(gpu=gpu, precision=precision)).spec.products == products


def test_zero_stages():
    ddp = read(row(zero_stage="0")).spec.layout
    assert (ddp.dp_replicate, ddp.dp_shard) == (32, 1)
    fsdp = read(row(zero_stage="3")).spec.layout
    assert (fsdp.dp_shard, fsdp.zero, fsdp.reshard) == (32, 3, True)
    kept = read(row(zero_stage="2", notes="FSDP SHARD_GRAD_OP")).spec.layout
    assert (kept.zero, kept.reshard) == (3, False)
    within = read(row(zero_stage="3", notes="HSDP")).spec.layout
    assert (within.dp_replicate, within.dp_shard) == (4, 8)


def test_stages_are_cut_as_the_programs_cut_them():
    def layout(**changed: str):
        defaults = {"tp": "1", "dp": "8", "pp": "8", "model_name": "", "hidden": "1024", "n_heads": "8"}
        return read(row(**(defaults | changed))).spec.layout

    assert layout(n_layers="32").pp_cut == "4+4+4+4+4+4+4+4"
    assert layout(n_layers="30").pp_cut == "3+4+4+4+4+4+4+3"
    looped = layout(n_layers="32", vpp="2")
    assert (looped.schedule, looped.pp_chunks, looped.pp_cut) == ("interleaved_1f1b", 2, "+".join(["2"] * 16))
    # 14 layers on 16 stages: the first and the last would have none.
    most = layout(n_layers="14", vpp="max (1 layer per chunk)", schedule="1F1B-I")
    assert (most.schedule, most.pp_cut) == ("1f1b", "1+2+2+2+2+2+2+1")
    assert layout(n_layers="126", vpp="8").pp_cut.startswith("1+2+2")
    assert layout(n_layers="126", vpp="8").pp_chunks == 8
    assert layout(n_layers="32", schedule="ZB-2p").schedule == "zb_h2"
    assert layout(n_layers="32", schedule="ZB-1p").schedule == "zb_h1"
    assert layout(n_layers="32", schedule="1f1b (DeepSpeed)").schedule == "1f1b"
    for spelling in ("modified interleaved 1F1B", "interleaved-1f1b", "1F1B-I", "VPP"):
        assert layout(n_layers="32", schedule=spelling).schedule == "interleaved_1f1b"
    # Every schedule that deals its stages round the ranks; the others cut themselves.
    assert layout(n_layers="30", schedule="GPipe").pp_cut == "3+4+4+4+4+4+4+3"
    assert layout(n_layers="32", schedule="GPipe", vpp="2").schedule == "looped_bfs"
    assert layout(n_layers="32", schedule="ZB-V").pp_cut == ""
    # Three layers of a rank in two chunks: the later one has two, of which fewer micro-batches are in flight.
    assert layout(n_layers="22", vpp="3").pp_cut == "1+1+1+1+1+1+1+1+1+2+2+2+2+2+2+1"
    last = layout(n_layers="30", pp="4", dp="16", notes="chronicles").pp_cut
    assert last == "8+8+8+6" or sum(map(int, last.split("+"))) == 30


def test_blank_layouts_are_filled_in():
    reading = read({"model_name": "gpt3-175b", "gpu": "A100", "n_gpus": "512", "global_batch_seqs": "512"})
    layout = reading.spec.layout
    assert layout.tp == 8
    assert layout.pp > 1
    assert layout.world == 512
    assert any(said.startswith("layout blank") for said in reading.assumptions)
    small = read({"model_name": "llama3.1-8b", "gpu": "B200", "n_gpus": "8", "global_batch_seqs": "16"}).spec
    assert (small.layout.dp_shard, small.batch.micro_batch) == (8, 2)


def test_an_mlperf_configuration_says_the_layout_in_its_name():
    notes = "MLPerf Training v5.0 config_X_2x8x8xtp4pp2cp2.sh"
    layout = read(
        row(n_gpus="16", dp="", tp="", pp="", notes=notes, global_batch_seqs="8", micro_batch="1")
    ).spec.layout
    assert (layout.tp, layout.pp, layout.cp, layout.data_ranks) == (4, 2, 2, 1)


def test_a_shape_is_solved_from_what_is_there():
    model = read(row(model_name="gpt-13B", n_params_b="12.9", hidden="5120", pp="4", dp="8")).spec.model
    assert (model.n_layers, model.n_heads) == (40, 40)
    cut = read(row(model_name="llama3-70b-l10", tp="8", dp="8")).spec.model
    assert (cut.n_layers, cut.d_model) == (10, 8192)
    few = read(row(model_name="deepseekv3-l4", ep="8", tp="1", dp="64")).spec.model
    assert (few.n_layers, few.moe.n_dense_layers) == (4, 1)
    own = read(row(model_name="ours", n_layers="10", hidden="1024", n_heads="16", n_kv_heads="4", ffn_hidden="4096"))
    assert (own.spec.model.activation, own.spec.model.d_ff) == ("swiglu", 4096)


def test_experts_over_tensor_ranks_are_folded():
    reading = read(row(model_name="mixtral-8x7b", tp="2", dp="32", ep="64", global_batch_seqs="128"))
    assert 32 % reading.spec.layout.ep == 0
    assert any(said.startswith("ep 64 reaches over tp 2") for said in reading.assumptions)
    beside = read(row(model_name="mixtral-8x7b", n_gpus="64", dp="4", tp="2", ep="8", global_batch_seqs="128"))
    assert beside.spec.layout.dp_shard == 32


def test_memory_and_what_it_means():
    smi = read(row(peak_mem_gb="60", notes="Mem = nvidia-smi max"))
    assert (smi.memory_means, smi.measured_memory) == ("device", 60 * 2**30)
    assert read(row(peak_mem_gb="60", notes="max allocated GiB")).memory_means == "allocated"
    assert read(row(peak_mem_gb="60")).memory_means == "reserved"


def test_out_of_memory():
    assert read(row(step_time_s="", notes="OOM; on two nodes")).oom
    assert read(row(step_time_s="", peak_mem_gb="OOM")).oom
    assert not read(row(notes="too close to OOM")).oom
    assert not read(row(step_time_s="")).oom


def test_lora_computes_no_gradients_of_frozen_weights():
    reading = read(row(notes="LoRA Performance"))
    assert reading.spec.model.lora.rank
    assert 2 / 3 < reading.tflops(1.0) / read(ROW).tflops(1.0) < 0.8


@pytest.mark.parametrize("device", ACCELERATORS)
def test_every_known_device_is_read_in_other_spellings(device):
    for name in (device, device.replace("-", " ").upper(), f"NVIDIA {device.replace('-', '')}"):
        assert read(row(gpu=name, n_gpus="64", precision="bf16")).spec.cluster.accelerator.name == device


def test_a_bad_row_says_all_that_is_wrong():
    told = problems(gpu="a fast one", n_gpus="sixty", tp="3.5")
    assert "n_gpus: expected a number above 0, found 'sixty'" in told
    assert "tp: expected a whole number, found '3.5'; nearest: 4" in told
    assert "gpu: 'a fast one' is not a known device" in told


@pytest.mark.parametrize("name", [*COUNTS, *AMOUNTS])
def test_a_number_carries_only_the_unit_of_its_column(name: str):
    own = {"n_params_b": "B", "mfu_pct": "%", "step_time_s": "s", "peak_mem_gb": "GB", "n_gpus": "x"}.get(name)
    for unit in ("B", "%", "s", "GB", "x", "G", "K"):
        taken = Cells({name: f"4{unit}"}).number(name)
        assert taken == (4 if unit == own or (unit, own) == ("G", "GB") else None), unit


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"gpu": "RTX 4090D"}, "gpu: 'RTX 4090D' is not a known device"),
        ({"gpu": "trainum2"}, "did you mean trainium2?"),
        ({"model_name": "lama3-8b"}, "did you mean llama3-8b?"),
        ({"model_name": "DeepSeek V4"}, "deepseek_v4: its attention to compressed keys"),
        ({"dp": "16"}, "nearest dp: 32"),
        ({"n_gpus": "63"}, "n_gpus is 63; nearest n_gpus: 64"),
        ({"global_batch_seqs": "100"}, "nearest: 96"),
        ({"pp": "64", "dp": "1", "tp": "1"}, "pp: 64 stages need at least as many layers, the model has 32"),
        ({"precision": "fp8", "gpu": "A100"}, "has no fp8"),
        ({"precision": "posit"}, "precision: 'posit' is unknown"),
        ({"schedule": "quantum", "pp": "2", "dp": "16"}, "schedule: 'quantum' is unknown"),
        ({"recompute": "some"}, "recompute: 'some' is unknown"),
        (
            {"recompute": "8*full+20*none"},
            "8*full+20*none = 28 layers, the model has 32; nearest legal: 8*full+24*none",
        ),
        ({"zero_stage": "many"}, "zero_stage: expected 0, 1, 2 or 3"),
        ({"sequence_parallel": "maybe"}, "sequence_parallel: expected yes or no"),
        ({"step_time_s": "-1"}, "step_time_s: expected a number above 0"),
        ({"step_time_s": "0,125"}, "step_time_s: expected a number above 0"),
        ({"step_time_s": "1.234,567"}, "step_time_s: expected a number above 0"),
        ({"n_gpus": "12,34"}, "n_gpus: expected a number above 0"),
        ({"tp": "3", "n_gpus": "96"}, "tp: n_heads 32 / tp 3 is not an integer; nearest: 2"),
        ({"n_gpus": ""}, "n_gpus: is blank"),
        ({"n_gpus": "0"}, "n_gpus: is 0"),
        ({"n_layers": "1e9"}, "n_layers: must be at most 1,024, is 1,000,000,000: the deepest published transformer"),
    ],
)
def test_what_cannot_be_is_refused_with_the_nearest_that_can(changed, said):
    assert said in problems(**changed)


def test_blank_words_are_blank():
    reading = read(row(vpp="n/a", ep="-", cp="", zero_stage="None", n_params_b="8 (approx)"))
    assert reading.spec.layout.pp == 1


def test_every_program_is_known():
    families = {family for _, family in sources()["frameworks"]}
    families |= {family for releases in sources()["releases"].values() for _, family in releases}
    assert families <= set(FRAMEWORKS)
    habits = sources()["habits"]
    assert set(habits) <= set(FRAMEWORKS)
    # Newer versions of a program have its habits.
    modern = {family for family, habit in habits.items() if habit.get("whole_experts")}
    assert {family for family in families if family.startswith(("nemo", "mlperf"))} <= modern


@pytest.mark.parametrize(
    ("source", "notes", "program"),
    [
        ("pytorch/torchtitan", "", "torchtitan"),
        ("pytorch/torchtitan", "eager beside Megatron-LM and NeMo", "torchtitan"),
        ("pytorch/torchtitan", "with torch.compile", "torchtitan-compile"),
        ("a paper", "faster than PaLM, MaxText and torchtitan; TorchSDPA", "megatron"),
        ("NVIDIA-NeMo/Automodel", "NeMo AutoModel, container 26.04", "automodel"),
        ("NVIDIA-NeMo/Megatron-Bridge", "26.04 NeMo", "nemo-early-2026"),
        ("NVIDIA-NeMo/Megatron-Bridge", "beside Automodel", "nemo"),
        ("MegaScale, table 3", "baseline", "megatron"),
        ("KempnerForge", "beside torchtitan", "kempnerforge"),
        ("InternLM/InternLM doc", "Megatron-like", "internlm"),
        ("a paper about InternLM", "", "megatron"),
    ],
)
def test_a_note_names_options_and_never_another_program(source: str, notes: str, program: str) -> None:
    assert read(row(source=source, notes=notes)).framework == program


@pytest.mark.parametrize(
    "told",
    [
        {"network": "4 x 100 Gb per node"},
        {"network": "4x100G EDR"},
        {"notes": "nodes with 4 x 100 Gb RoCE, 80GB per node"},
    ],
)
def test_a_network_that_is_stated_joins_the_nodes(told: dict[str, str]) -> None:
    reading = read(row(**told))
    assert reading.spec.cluster.inter.gbs == 6.25
    assert "6.25 GB/s per device between nodes" in reading.assumptions
    assert read(row(notes="80GB per node")).spec.cluster.inter.gbs == read(ROW).spec.cluster.inter.gbs


def test_a_number_of_parameters_that_is_not_the_shapes_is_noted() -> None:
    (said,) = [text for text in read(row(n_params_b="405")).assumptions if "n_params_b" in text]
    assert said == "n_params_b 405 is not counted: the shape has 8.03 B parameters"
    assert not [text for text in read(row(n_params_b="8")).assumptions if "n_params_b" in text]


def test_groups_that_share_the_state_are_those_of_the_note() -> None:
    assert read(row(zero_stage="1", notes="ZeRO-1 in groups of all")).spec.layout.dp_shard == 32
    layout = read(row(zero_stage="1", notes="ZeRO-1 in groups of 4; other things")).spec.layout
    assert (layout.dp_replicate, layout.dp_shard) == (8, 4)


def test_a_device_of_ampere_runs_the_second_flash_attention() -> None:
    assert calibrated("megatron-core", ACCELERATORS["a100-80gb"]).flash == 2
    assert calibrated("megatron-core", ACCELERATORS["h100-80gb"]).flash == 3
    assert calibrated("internlm", ACCELERATORS["a100-80gb"]).flash == 1


def test_a_vocabulary_that_is_not_printed_is_what_the_numbers_of_parameters_leave() -> None:
    shape = {"model_name": "gpt", "n_params_b": "14.6", "n_layers": "46", "hidden": "5120", "n_heads": "40"}
    reading = read(row(source="arXiv 2401.10241 Tables 3-5", **shape))
    assert reading.spec.model.vocab_size == 32000
    assert "vocab blank: 32000" in reading.assumptions
    assert read(row(source="a paper", **shape)).spec.model.vocab_size == 51200


def test_a_program_keeps_its_slowdown_on_devices_of_one_chip() -> None:
    h200, other = ACCELERATORS["h200"], ACCELERATORS["h100-96gb"]
    assert calibrated("torchtitan", h200).slowdown == calibrated("torchtitan", other).slowdown != 1


def test_a_program_without_rows_is_as_slow_as_the_median_of_those_with_some() -> None:
    device = read(ROW).spec.cluster.accelerator
    fitted = median(line.value for line in fits() if line.field == "slowdown")
    assert calibrated("megatron", device).slowdown == calibrated("automodel", device).slowdown == fitted
    assert calibrated("nemo", device).slowdown == 1, "recipes of vendors have rows without a factor"


def test_a_host_without_rows_launches_as_the_median_of_those_with_some() -> None:
    device = read(ROW).spec.cluster.accelerator
    assert calibrated("megatron", device).kernel_us == pytest.approx(44.7, abs=2), "MLPerf's and vTrain's agree"
    assert calibrated("maxtext", device).kernel_us == 0, "a step is one program"
    assert calibrated("megatron", device).across_sockets == PHALANX.across_sockets == 1.24, "the only fitted value"
    assert not calibrated("mlperf", device).fitted, "its host was, not its time on the device"


def test_the_rates_of_known_devices_are_those_that_were_fitted() -> None:
    named = {device for line in fits() if line.field == "sustained" for device in line.device.split()}
    for name in named:
        device = ACCELERATORS[name]
        assert device.sustained == pytest.approx(sustained(device), abs=0.006), name
    usual = median(
        {
            line.device: sustained(ACCELERATORS[line.device.split()[0]]) for line in fits() if line.field == "sustained"
        }.values()
    )
    assert Accelerator.sustained == pytest.approx(usual, abs=0.006)
    a100, v100 = ACCELERATORS["a100-80gb"], ACCELERATORS["v100-32gb"]
    assert sustained(a100) == a100.sustained, "a device that no line names keeps its own"
    assert sustained(v100, without="bigscience_v100") < v100.sustained, "the median of the others"


def test_a_source_that_is_left_out_fits_nothing() -> None:
    device = read(row(gpu="A100")).spec.cluster.accelerator
    fitted, left_out = calibrated("vtrain", device), calibrated("vtrain", device, without="vtrain_a100_measured")
    assert (fitted.slowdown, fitted.kernel_us) == pytest.approx((1.0, 42.0), rel=0.01)
    assert left_out.slowdown > 1.05
    assert left_out.kernel_us == next(line.value for line in fits() if line.programs.startswith("mlperf"))
    assert fitted.across_sockets > 1.1
    assert left_out.across_sockets == 1
    assert calibrated("vtrain", device, without="torchtitan") == fitted


@given(
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 2),
    st.integers(0, 3),
    st.integers(1, 4),
    st.sampled_from("0123"),
)
def test_what_is_read_is_a_layout_of_these_devices(tp, pp, cp, dp, accumulation, zero):
    devices = 2 ** (tp + pp + cp + dp)
    reading = read(
        {
            "model_name": "llama3-8b",
            "gpu": "H100",
            "n_gpus": str(devices),
            "tp": str(2**tp),
            "pp": str(2**pp),
            "cp": str(2**cp),
            "zero_stage": zero,
            "global_batch_seqs": str(2**dp * accumulation),
            "micro_batch": "1",
        }
    )
    spec = reading.spec
    assert spec.layout.world == devices
    assert spec.batch.micro_batch * spec.batch.accumulation * spec.batch.data_ranks == spec.batch.global_batch
    assert spec.layout.data_ranks == 2**dp
    assert not list(context_problems(Job(model=spec.model, layout=spec.layout)))
    cut = spec.layout.pp_cut
    assert not cut or sum(map(int, cut.split("+"))) == 32


def published() -> Iterator[dict[str, str]]:
    for path in sorted(Path(os.environ["PHALANX_TRUTH"]).glob("*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            if "step_time_s" in (reader.fieldnames or ()):
                yield from reader


@pytest.mark.skipif("PHALANX_TRUTH" not in os.environ, reason="PHALANX_TRUTH does not name published measurements")
def test_published_rows_are_expressed():
    measured = [
        one for one in published() if one["step_time_s"] or one["tflops_per_gpu"] or one["tokens_per_s_per_gpu"]
    ]
    refused = dict[str, list[str]]()
    for one in measured:
        try:
            reading = read(one)
        except JobError as error:
            refused[one["row_id"]] = error.problems
        else:
            assert reading.measured_s
            assert reading.spec.layout.world == int(one["n_gpus"])
    assert len(refused) <= 0.03 * len(measured), refused


@pytest.mark.skipif("PHALANX_TRUTH" not in os.environ, reason="PHALANX_TRUTH does not name published measurements")
def test_conventions_are_those_of_the_sources():
    """Rows that print a time and TFLOP/s: both mean the same seconds."""
    off: dict[str, list[float]] = {}
    for one in published():
        try:
            reading = read(one)
        except JobError:
            continue
        if one["tflops_per_gpu"] and reading.measured_from in ("step_time_s", "tokens_per_s_per_gpu"):
            assert reading.measured_s
            printed = float(one["tflops_per_gpu"])
            off.setdefault(reading.source, []).append(reading.tflops(reading.measured_s) / printed - 1)
    for source, each in off.items():
        assert abs(sorted(each)[len(each) // 2]) < 0.03, source


def test_a_row_may_recompute_in_the_words_of_a_layout():
    """Runs of layers were taken for full, MLPs for nothing."""
    for text in ("mlp", "selective (mlp)"):
        assert read(row(recompute=text)).spec.layout.recompute == "mlp"
    assert read(row(recompute="8*full+24*none")).spec.layout.recompute_cut == "8*full+24*none"


def test_maxtext_recomputes_as_its_configurations_do():
    def layout(**changed: str):
        return read({"source": "maxtext", "gpu": "TPU v5e", "n_gpus": "512", **changed}).spec.layout

    known = layout(model_name="maxtext-16b")
    # scripts of 256 devices a slice: six sequences a device, parameters sharded inside a slice.
    assert (known.dp_replicate, known.dp_shard, known.micro_batch, known.recompute) == (2, 256, 6, "full")
    assert layout(model_name="maxtext-128b", n_gpus="256").tp == 16
    assert layout(model_name="maxtext-128b", n_gpus="128", gpu="TPU v5p").recompute == "products"
    assert layout(model_name="llama3.1-8b", n_gpus="256").recompute == "full"
    assert layout(model_name="llama3.1-8b", n_gpus="256", recompute="none").recompute == "none"


def test_recipes_say_what_leaves_the_device_and_in_what_the_state_is():
    def spec(**changed: str):
        return read({"precision": "bf16", "n_gpus": "256", **changed}).spec

    bridge = {"source": "Megatron-Bridge", "model_name": "LLAMA3_70B", "gpu": "GB200", "micro_batch": "2"}
    layout = {"dp": "256", "tp": "1", "pp": "1", "precision": "FP8", "global_batch_seqs": "512"}
    sharded = spec(**bridge, **layout, zero_stage="3", notes="26.02 NeMo Container")
    assert (sharded.layout.offload, sharded.layout.offload_blocks) == ("activations", 40)
    assert spec(**bridge, **layout, notes="26.02 NeMo Container").layout.offload == "none"
    mixture = spec(source="maxtext", gpu="TPU v6e", model_name="mixtral-like 754b cf1.5", n_layers="56")
    profile = mixture.framework.memory_profile
    assert (profile.inputs_leave, profile.parameter_bytes, profile.state_bytes) == (True, 2, 0)
    assert (mixture.model.moe.capacity, mixture.layout.ep) == (1.5, 16)
    assert spec(source="maxtext", gpu="TPU v6e", model_name="gemma3-12b", seq_len="32768").layout.loss_chunk == 2048
    moments = spec(source="NeMo AutoModel", gpu="H100", model_name="llama3-8b").framework.memory_profile
    assert (moments.parameter_bytes, moments.unbuffered_gradient_bytes, moments.state_bytes) == (0, 2, 4)


def test_the_precision_of_the_optimizers_state_is_a_column():
    def state(**changed: str):
        profile = read(row(**changed)).spec.framework.memory_profile
        return profile.parameter_bytes, profile.unbuffered_gradient_bytes, profile.state_bytes

    assert state() == state(optimizer_state="fp32") == (0, 0, None)
    assert state(optimizer_state="bf16") == state(source="KempnerForge") == (0, 2, 4)
    assert state(optimizer_state="bf16 moments") == (0, 0, 8)
    assert state(source="torchtitan", optimizer_state="8-bit moments")[2] == 2
    with pytest.raises(JobError, match="optimizer_state: 'int4' is unknown; known: fp32"):
        state(optimizer_state="int4")


def test_chunks_that_nobody_gave_leave_a_small_bubble():
    given = {"model_name": "", "hidden": "1024", "n_heads": "8", "n_layers": "64", "tp": "1", "pp": "8", "dp": "8"}
    layout = read(row(**given, notes="vpp not given", micro_batch="1", global_batch_seqs="128")).spec.layout
    # It stands still for 7 of 16 micro-batches, divided by the chunks: all eight layers apart are the nearest to 5 %.
    assert (layout.schedule, layout.pp_chunks) == ("interleaved_1f1b", 8)


def test_hybrids_by_their_full_names_are_their_own_shapes_or_said_not_to_be() -> None:
    nano, super_ = key_of("Nemotron-3-Nano-30B-A3B"), key_of("Nemotron-3-Super-120B-A12B")
    assert nano is not None
    assert super_ is not None
    assert shapes()[nano].mamba.n_heads == 64
    assert remark(nano) == ""
    assert shapes()[super_].mamba.n_heads == 128
    assert shapes()[super_].moe.latent == 1024
    assert remark(super_) == ""


def test_layers_of_a_hybrid_are_counted_as_its_source_counts_them() -> None:
    blank, given = (read(row(model_name="Nemotron-H 56B", n_layers=layers)) for layers in ("", "118"))
    assert blank.spec.model.n_layers == given.spec.model.n_layers == 64


def test_modules_for_further_tokens_are_those_of_the_recipe() -> None:
    bridge = {"source": "NVIDIA-NeMo/Megatron-Bridge", "notes": "26.06 NeMo Container", "gpu": "GB200", "dp": ""}
    deepseek = read(row(model_name="DeepSeekV3", tp="1", pp="4", vpp="4", ep="64", n_gpus="256", **bridge)).spec
    assert deepseek.model.mtp == 1
    assert deepseek.layout.pp_cut == "+".join(["4"] * 15 + ["2"])
    hybrid = read(row(model_name="Nemotron_3_Super", tp="2", ep="64", n_gpus="64", **bridge)).spec
    assert (hybrid.model.mtp, hybrid.model.n_layers) == (2, 50)
    assert hybrid.layout.ep == 32  # of 64 expert ranks, among which are the tensor ranks


@pytest.mark.parametrize("blank", ["micro_batch", "seq_len"])
def test_what_is_filled_in_widens_the_interval(blank: str) -> None:
    whole = {"seq_len": "8192"}
    known, filled = read(row(**whole)).spec, read(row(**{**whole, blank: ""})).spec
    (low, high), (least, most) = time_factors(known), time_factors(filled)
    assert known.given
    assert not filled.given
    assert least <= low
    assert high <= most
    assert most / least > high / low


def test_a_round_and_a_configuration_say_how_mlperf_ran() -> None:
    notes = "MLPerf Training v{} closed NVIDIA/results/x/gpt3: config config_GB200_{}.sh"
    mlperf = {"source": "mlcommons/training_results", "gpu": "GB200", "precision": "fp8", "recompute": ""}
    old, new = (read(row(**mlperf, notes=notes.format(version, "8b"))) for version in ("3.0", "5.1"))
    assert (old.framework, old.spec.layout.recompute) == ("mlperf-2023", "selective")
    assert (new.framework, new.spec.layout.recompute) == ("mlperf", "none")
    assert new.spec.products == "fp8"
    assert read(row(**mlperf, notes=notes.format("5.1", "8b_fp4"))).spec.products == "fp4"


def test_real_routing_takes_longer() -> None:
    balanced, real = (read(row(model_name="mixtral-8x7b", notes=notes)).spec for notes in ("", "REAL routing"))
    assert real.framework.moe_slowdown == pytest.approx(UNEVEN * balanced.framework.moe_slowdown)


def test_an_unknown_program_has_the_usual_figures_of_experts() -> None:
    device = read(row(gpu="H100")).spec.cluster.accelerator
    assert calibrated("megatron", device).moe_host_ms > 5
    assert calibrated("megatron", device).moe_slowdown > 1


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"gpu": "H1000"}, "gpu: 'H1000' is not a known device"),
        ({"gpu": "RTX 4090 D"}, "gpu: 'RTX 4090 D' is not a known device; did you mean rtx-4090?"),
        ({"gpu": "H200 NVL"}, "gpu: 'H200 NVL' is not a known device"),
        ({"precision": "int8"}, "precision: 'int8' is unknown"),
        ({"precision": "tf32"}, "precision: 'tf32' is unknown"),
        ({"network": "400 Gb"}, "network: '400 Gb' is not understood; such as 4 x 100 Gb per node"),
        ({"ep": "8"}, "ep: 8, but the model has no experts"),
        ({"zero_stage": "13"}, "zero_stage: expected 0, 1, 2 or 3, found '13'"),
    ],
)
def test_what_only_resembles_a_known_value_is_refused(cells: dict[str, str], said: str) -> None:
    assert said in problems(**cells)
